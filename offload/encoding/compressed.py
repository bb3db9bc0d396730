"""compressed-tensors' integers: `pack-quantized` of 2 to 8 bits, `int-quantized` of 8.

Zero points are packed along rows of the weight, words along its columns. Codes of 3, 5, 6 and 7
bits are packed without gaps; by the library's 0.17.1 and before each word begins with a new code,
and the number of words tells the two apart. The true number of columns is data (`weight_shape`);
headers only give the number of words, so the last may be padded. Shapes tell which group of the
config a weight belongs to; if several fit, the columns that the model has there decide.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.encoding.base import (
    ANOTHER,
    NOWHERE,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    checked_scale,
    config_weights,
    must,
    require,
    require_shape,
)
from offload.encoding.integers import (
    ByteIntegers,
    Integers,
    checked_order,
    float_type,
    group_size,
    matrix_shape,
    require_integers,
    unpacked,
)

_BITS = (2, 3, 4, 5, 6, 7, 8)
_PACKED_COMPANIONS = (".weight_scale", ".weight_shape", ".weight_zero_point")
_SUFFIXES = (
    ".weight_packed",
    *_PACKED_COMPANIONS,
    ".weight_g_idx",
    ".weight",
    ".input_scale",
    ".input_zero_point",
)


class _Fit(NamedTuple):
    """A way to read a row's words and scales."""

    bits: int
    group: int  # columns of a group; 0: all
    codes_per_word: int
    least: int  # most columns that need as many words
    most: int  # columns that the words can hold

    def holds(self, columns: int, num_groups: int) -> bool:
        """Return True if these words and scales fit this many columns."""
        fits = num_groups == (math.ceil(columns / self.group) if self.group else 1)
        return fits and self.least <= columns <= self.most


@dataclass(frozen=True)
class PackedIntegers(Integers):
    """See `Coding`: `pack-quantized`."""

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`; an order of -1 everywhere means consecutive groups."""
        import torch

        wanted = list(shape)
        said = companions[".weight_shape"].tolist() if ".weight_shape" in companions else wanted
        remedy = "give the model's own config.json"
        must(said == wanted, f".weight_shape must be {wanted}", f"is {said}", remedy)
        grid = self.grid(shape)
        ready = {"scale": checked_scale(".weight_scale", companions[".weight_scale"], grid)}
        if self.zero_bytes:
            zero = companions[".weight_zero_point"]
            ready["zero"] = unpacked(zero, self.bits, 0, shape[0], self.codes_per_word)
            require_shape(".weight_zero_point unpacked", ready["zero"].shape, grid)
        if self.is_ordered:
            order = companions[".weight_g_idx"]
            if bool((order == -1).all()):
                order = torch.arange(shape[1]) // self.group
            ready["order"] = checked_order(".weight_g_idx", order, shape[1], grid[1])
        return ready


def _recognise(
    stored: Headers, settings: Settings, site: Site = NOWHERE
) -> RecognisedWeight | None:
    packed = stored.get(".weight_packed")
    weight = stored.get(".weight")
    if packed is not None and packed.dtype == "I32":
        return _recognise_packed(stored, settings, site)
    if weight is not None and weight.dtype == "I8" and ".weight_scale" in stored:
        return _recognise_bytes(stored, settings)
    return None


def _recognise_packed(stored: Headers, settings: Settings, site: Site) -> RecognisedWeight:
    """Return a weight with packed words; its columns are the model's where they fit."""
    require(stored, (".weight_scale",), ".weight_packed")
    require_integers(stored, (".weight_zero_point", ".weight_g_idx"))
    (num_rows, num_words), scale = (
        matrix_shape(stored, suffix) for suffix in (".weight_packed", ".weight_scale")
    )
    require_shape(".weight_scale", scale, (num_rows, scale[1]))
    fit = _fit(num_words, scale[1], settings, site)
    has_zero = ".weight_zero_point" in stored
    is_ordered = ".weight_g_idx" in stored and fit.group > 0
    per_word = fit.codes_per_word
    if has_zero:
        words = num_rows / per_word if per_word else num_rows * fit.bits / 32
        wanted = (math.ceil(words), scale[1])
        require_shape(".weight_zero_point", stored[".weight_zero_point"].shape, wanted)
    scales = float_type(stored, ".weight_scale")
    coding = PackedIntegers(
        fit.bits, fit.group, scales, int(has_zero), is_ordered, codes_per_word=per_word
    )
    # headers do not show the columns that pad the last word
    num_columns = site.columns if fit.holds(site.columns, scale[1]) else fit.most
    used = [*_PACKED_COMPANIONS, *([".weight_g_idx"] if is_ordered else [])]
    companions = tuple(suffix for suffix in used if suffix in stored)
    return RecognisedWeight(coding, (num_rows, num_columns), (".weight_packed",), companions)


def _fit(num_words: int, num_groups: int, settings: Settings, site: Site) -> _Fit:
    """Return the settings of the config group that fits these words and scales.

    The config assigns groups by names, which tensors need not follow, so shapes decide.
    """
    fitting = dict[tuple[int, int], _Fit]()
    others = set()
    for weights in _integer_groups(settings):
        bits = weights.get("num_bits")
        size = weights.get("group_size")
        if type(bits) is not int or bits not in _BITS:
            others.add(f"{bits!r:.20}")
        elif size is None or type(size) is int:
            for fit in _readings(bits, size or 0, num_words, num_groups):
                # for few columns both layouts may fit: then the newer one holds
                fitting.setdefault((fit.bits, fit.group), fit)
    known = [fit for fit in fitting.values() if fit.holds(site.columns, num_groups)]
    left = known if len(fitting) > 1 and known else [*fitting.values()]
    if len(left) == 1:
        return left[0]
    if not fitting and others:
        remedy = "take a checkpoint of 2 to 8 bits"
        raise ValueError(f"num_bits must be one of {_BITS}, got {others.pop()}: {remedy}")
    fits = " and ".join(f"{fit.bits} bits in groups of {fit.group}" for fit in left)
    requirement = f"one of config_groups must fit {num_words} words and {num_groups} scales a row"
    remedy = "give the config.json that belongs to the weights"
    raise ValueError(f"{requirement}, {fits or 'none'} {'fit' if fits else 'does'}: {remedy}")


def _readings(bits: int, size: int, num_words: int, num_groups: int) -> Iterator[_Fit]:
    """Yield the layouts, today's first, in which a group of the config fits."""
    for per_word in (0, 32 // bits) if 32 % bits else (0,):
        least = (num_words - 1) * per_word if per_word else (num_words - 1) * 32 // bits
        most = num_words * per_word if per_word else num_words * 32 // bits
        if num_groups == 1 and (size <= 0 or size > least):
            yield _Fit(bits, 0, per_word, least + 1, most)
        elif size > 0 and math.ceil((least + 1) / size) <= num_groups <= math.ceil(most / size):
            yield _Fit(bits, size, per_word, least + 1, most)


def _integer_groups(settings: Settings) -> Iterator[Mapping[str, Any]]:
    return (weights for weights in config_weights(settings) if weights.get("type", "int") == "int")


def _recognise_bytes(stored: Headers, settings: Settings) -> RecognisedWeight:
    """Return a weight of whole bytes with scales for all, rows or groups. Raises `ValueError`."""
    shape = matrix_shape(stored, ".weight")
    scale = stored[".weight_scale"].shape
    if math.prod(scale) == 1:
        group = 0
    else:
        require_shape(".weight_scale", scale[:1], shape[:1])
        said = next((weights.get("group_size") for weights in _integer_groups(settings)), None)
        group = group_size(shape[1], math.prod(scale[1:]), said)
    zero = stored.get(".weight_zero_point")
    kind = "I8" if zero is None else zero.dtype
    must(kind == "I8", ".weight_zero_point must be of type I8", f"is {kind}", ANOTHER)
    scales = float_type(stored, ".weight_scale")
    coding = ByteIntegers(8, group, scales, int(zero is not None), align_bytes=1)
    companions = (".weight_scale", *([".weight_zero_point"] if zero is not None else []))
    return RecognisedWeight(coding, shape, (".weight",), companions)


COMPRESSED_INTEGERS = Format(_SUFFIXES, _recognise)
