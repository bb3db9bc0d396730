"""Packed integers of 4 and 8 bits with scales and zero points: AWQ, GPTQ and compressed-tensors.

AWQ's `gemm` version packs eight rows of a column into a word, in an order of its own. GPTQ packs
eight (or four) columns of a row into a word. Its first version stores zero points less one; an
all-ones code (15 of 4 bits) is 16 here as in AutoGPTQ, while its older kernel reads 0. Shapes tell
GPTQ from AWQ, and how many bits a module has, whatever the config says of single modules.

compressed-tensors has `pack-quantized`, and `int-quantized` with signed bytes. Zero points are
packed along rows of the weight, words along its columns. The true number of columns is data
(`weight_shape`); headers only say how many words there are, so the last of them may be padded.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import (
    ENCODINGS,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Tensors,
    checked_scale,
    config_weights,
    must,
    require,
    require_shape,
)
from offload.errors import ensure

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

_BITS = (4, 8)  # in GPTQ and compressed-tensors
_GPTQ_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_PACKED_COMPANIONS = (".weight_scale", ".weight_shape", ".weight_zero_point")
_COMPRESSED_SUFFIXES = (
    ".weight_packed",
    *_PACKED_COMPANIONS,
    ".weight_g_idx",
    ".weight",
    ".input_scale",
    ".input_zero_point",
)


@dataclass(frozen=True)
class Integers:
    """The part of a `Coding` that does not depend on how words are laid out.

    Companions are "scale" (N, G) as stored, "zero" (N, G), and "order" (K,), int32: the scale of
    each column.
    """

    bits: int
    group: int  # columns that share a scale; 0: all
    scale: str  # the type of scales, as headers have it
    zero_bytes: int = 0  # of a zero point; 0: there are none
    is_ordered: bool = False  # whether a list says which group each column belongs to
    align_bytes: int = 4
    is_transposed: bool = False

    @property
    def name(self) -> str:
        groups = f"groups of {self.group}" if self.group else "whole rows"
        return f"int{self.bits} in {groups}{', reordered' if self.is_ordered else ''}"

    @property
    def dtype(self) -> str:
        return ENCODINGS[self.scale].dtype

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of whole words per row, or per column."""
        return shape[0] * 4 * math.ceil(shape[1] * self.bits / 32)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of scales, zero points and order of one matrix.

        Stacks do not occur: experts are stored one by one.
        """
        each = ENCODINGS[self.scale].align_bytes + self.zero_bytes
        return math.prod(self.grid(shape)) * each + (4 * shape[1] if self.is_ordered else 0)

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        group = companions["order"] if self.is_ordered else self.group or out.shape[1]
        words_NW = self.words(stored_B, out.shape)
        own = (companions["scale"], companions.get("zero"))
        expansion.integers(words_NW, self.bits, *own, group, out)

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return a view of the words, row by row."""
        import torch

        return stored_B.view(torch.int32).view(shape[0], -1)

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the scales: rows, and groups of each row."""
        return shape[0], math.ceil(shape[1] / self.group) if self.group else 1

    def transposed(self, companions: Tensors, shape: Sequence[int]) -> "tuple[Tensor, Tensor]":
        """Return scales and unpacked zero points (uint8), (N, G) each, from the file's (G, N)."""
        num_rows, num_groups = self.grid(shape)
        scale = checked_scale(".scales", companions[".scales"], (num_groups, num_rows))
        zero = unpacked(companions[".qzeros"], self.bits, 1, num_rows)
        require_shape(".qzeros unpacked", zero.shape, (num_groups, num_rows))
        return scale.t().contiguous(), zero.t()


@dataclass(frozen=True)
class Awq(Integers):
    """See `Coding`."""

    @property
    def name(self) -> str:
        return super().name.replace("int4", "int4 (AWQ)")

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of words of eight rows each."""
        return 4 * math.ceil(shape[0] / 8) * shape[1]

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        from offload.kernels.expand_columns import NIBBLES

        scale, zero = self.transposed(companions, shape)
        in_order = zero.unflatten(0, (-1, 8))[:, list(NIBBLES)].flatten(0, 1)
        return {"scale": scale, "zero": in_order.contiguous()}

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        import torch

        words_CK = stored_B.view(torch.int32).view(out.shape[1], -1).t()
        group = self.group or out.shape[1]
        expansion.columns(words_CK, companions["scale"], companions["zero"], group, out)


def _recognise_awq(stored: Headers, settings: Settings) -> RecognisedWeight | None:
    shapes = packed_shapes(stored)
    if shapes is None:
        return None
    (num_columns, num_words), zeros, (num_groups, num_rows) = shapes
    require_shape(".scales", (num_groups, num_rows), (num_groups, 8 * num_words))
    require_shape(".qzeros", zeros, (num_groups, num_words))
    group = group_size(num_columns, num_groups, settings.get("group_size"))
    coding = Awq(4, group, float_type(stored, ".scales"), zero_bytes=1)
    return RecognisedWeight(coding, (num_rows, num_columns), (".qweight",), (".qzeros", ".scales"))


AWQ = Format((".qweight", ".qzeros", ".scales"), _recognise_awq)


@dataclass(frozen=True)
class Gptq(Integers):
    """See `Coding`."""

    added: int = 1  # what has to be added to stored zero points

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`; without `desc_act`, groups must be consecutive columns."""
        import torch

        scale, zero = self.transposed(companions, shape)
        zero = zero.to(torch.uint8 if self.zero_bytes == 1 else torch.int16) + self.added
        ready = {"scale": scale, "zero": zero.contiguous()}
        num_columns = shape[1]
        if ".g_idx" in companions:
            order = checked_order(".g_idx", companions[".g_idx"], num_columns, scale.shape[1])
            if self.is_ordered:
                return {**ready, "order": order}
            in_order = (torch.arange(num_columns) // (self.group or num_columns)).int()
            rule = ".g_idx must be in order where desc_act is false"
            ensure(torch.equal(order, in_order), f"{rule}: set desc_act to true in config.json")
        return ready

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return a view of the words, whose rows are columns in the file."""
        import torch

        return stored_B.view(torch.int32).view(-1, shape[0]).t()


def _recognise_gptq(stored: Headers, settings: Settings) -> RecognisedWeight | None:
    shapes = packed_shapes(stored)
    if shapes is None or shapes[0][1] != shapes[2][1]:
        return None
    (num_words, num_rows), zeros, (num_groups, _) = shapes
    bits = zeros[1] * 32 / num_rows
    rule = f"GPTQ weights must have {_BITS} bits"
    must(bits in _BITS, rule, f"have {bits:g}", "take a checkpoint of 4 bits")
    require_shape(".qzeros", zeros, (num_groups, num_rows * int(bits) // 32))
    num_columns = num_words * 32 // int(bits)
    is_ordered = ".g_idx" in stored and num_groups > 1 and bool(settings.get("desc_act"))
    group = group_size(num_columns, num_groups, settings.get("group_size"))
    added = _added(settings)
    zero_bytes = 2 if added and bits == 8 else 1  # 255 + 1
    scale = float_type(stored, ".scales")
    coding = Gptq(int(bits), group, scale, zero_bytes, is_ordered, added=added)
    companions = tuple(suffix for suffix in _GPTQ_SUFFIXES[1:] if suffix in stored)
    return RecognisedWeight(coding, (num_rows, num_columns), (".qweight",), companions)


def _added(settings: Settings) -> int:
    """Return what has to be added to zero points, by the version of the format."""
    version = settings.get("checkpoint_format") or "gptq"
    is_known = isinstance(version, str) and version in _GPTQ_VERSIONS
    rule = f"checkpoint_format of GPTQ must be one of {', '.join(_GPTQ_VERSIONS)}"
    must(is_known, rule, f"got {version!r:.40}", "take a checkpoint of these")
    return 2 - _GPTQ_VERSIONS[version]


GPTQ = Format(_GPTQ_SUFFIXES, _recognise_gptq)


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
            ready["zero"] = unpacked(companions[".weight_zero_point"], self.bits, 0, shape[0])
            require_shape(".weight_zero_point unpacked", ready["zero"].shape, grid)
        if self.is_ordered:
            order = companions[".weight_g_idx"]
            if bool((order == -1).all()):
                order = torch.arange(shape[1]) // self.group
            ready["order"] = checked_order(".weight_g_idx", order, shape[1], grid[1])
        return ready


@dataclass(frozen=True)
class ByteIntegers(Integers):
    """See `Coding`: `int-quantized`, with signed bytes and possibly one scale for all."""

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return one byte for each weight."""
        return math.prod(shape)

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        grid = self.grid(shape)
        given = {suffix.removeprefix(".weight_"): one for suffix, one in companions.items()}
        ready = {"scale": checked_scale(".weight_scale", _spread(given["scale"], grid), grid)}
        if self.zero_bytes:
            zero = _spread(given["zero_point"], grid)
            ready["zero"] = checked_scale(".weight_zero_point", zero, grid)
        return ready

    def words(self, stored_B: "Tensor", shape: Sequence[int]) -> "Tensor":
        """Return the signed bytes."""
        import torch

        return stored_B.view(torch.int8).view(tuple(shape))


def _spread(stored: "Tensor", grid: tuple[int, int]) -> "Tensor":
    return stored.expand(grid) if stored.numel() == 1 else stored


def _recognise_compressed(stored: Headers, settings: Settings) -> RecognisedWeight | None:
    packed = stored.get(".weight_packed")
    weight = stored.get(".weight")
    if packed is not None and packed.dtype == "I32":
        return _recognise_packed(stored, settings)
    if weight is not None and weight.dtype == "I8" and ".weight_scale" in stored:
        return _recognise_bytes(stored, settings)
    return None


def _recognise_packed(stored: Headers, settings: Settings) -> RecognisedWeight:
    require(stored, (".weight_scale",), ".weight_packed")
    require_integers(stored, (".weight_zero_point", ".weight_g_idx"))
    (num_rows, num_words), scale = (
        matrix_shape(stored, one) for one in (".weight_packed", ".weight_scale")
    )
    require_shape(".weight_scale", scale, (num_rows, scale[1]))
    bits, said = _bits_and_group(num_words, scale[1], settings)
    num_columns = num_words * 32 // bits
    # Columns that pad the last word may seem to need a group more or not to divide; then the
    # config's size holds.
    group = said or group_size(num_columns, scale[1], None)
    has_zero = ".weight_zero_point" in stored
    is_ordered = ".weight_g_idx" in stored and group > 0
    if has_zero:
        wanted = (math.ceil(num_rows * bits / 32), scale[1])
        require_shape(".weight_zero_point", stored[".weight_zero_point"].shape, wanted)
    scales = float_type(stored, ".weight_scale")
    coding = PackedIntegers(bits, group, scales, int(has_zero), is_ordered)
    used = [*_PACKED_COMPANIONS, *([".weight_g_idx"] if is_ordered else [])]
    companions = tuple(suffix for suffix in used if suffix in stored)
    return RecognisedWeight(coding, (num_rows, num_columns), (".weight_packed",), companions)


def _bits_and_group(num_words: int, num_groups: int, settings: Settings) -> tuple[int, int]:
    """Return the bits and group size of the config group that fits these words and scales.

    Groups may be assigned by names, which tensors need not follow.
    """
    fitting = set()
    others = set()
    for weights in _integer_groups(settings):
        bits = weights.get("num_bits")
        size = weights.get("group_size")
        if type(bits) is not int or bits not in _BITS:
            others.add(f"{bits!r:.20}")
            continue
        if size is not None and type(size) is not int:
            continue
        per_word = 32 // bits
        is_wide = size is None or size < 0 or num_words <= -(-size // per_word)
        if num_groups == 1 and is_wide:
            fitting.add((bits, 0))
        elif size is not None and size > 0:
            most = num_words * per_word
            least = (num_words - 1) * per_word + 1
            if math.ceil(least / size) <= num_groups <= math.ceil(most / size):
                fitting.add((bits, size))
    if len(fitting) == 1:
        return next(iter(fitting))
    if not fitting and others:
        remedy = "take a checkpoint of 4 or 8 bits"
        raise ValueError(f"num_bits must be one of {_BITS}, got {others.pop()}: {remedy}")
    found = f"{len(fitting)} do" if fitting else "none does"
    rule = f"one of config_groups must fit {num_words} words and {num_groups} scales a row"
    raise ValueError(f"{rule}, {found}: mend config.json")


def _integer_groups(settings: Settings) -> Iterator[Mapping[str, Any]]:
    return (one for one in config_weights(settings) if one.get("type", "int") == "int")


def _recognise_bytes(stored: Headers, settings: Settings) -> RecognisedWeight:
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
    must(kind == "I8", ".weight_zero_point must be of type I8", f"is {kind}")
    scales = float_type(stored, ".weight_scale")
    coding = ByteIntegers(8, group, scales, int(zero is not None), align_bytes=1)
    companions = (".weight_scale", *([".weight_zero_point"] if zero is not None else []))
    return RecognisedWeight(coding, shape, (".weight",), companions)


COMPRESSED_INTEGERS = Format(_COMPRESSED_SUFFIXES, _recognise_compressed)


def float_type(stored: Headers, suffix: str) -> str:
    """Return the header's type of scales. Raises `ValueError` unless it is floating-point."""
    dtype = stored[suffix].dtype
    must(dtype in ENCODINGS, f"{suffix} must be of type {', '.join(ENCODINGS)}", f"is {dtype}")
    return dtype


def matrix_shape(stored: Headers, suffix: str) -> tuple[int, int]:
    """Return the shape of a matrix. Raises `ValueError` unless it has two dimensions."""
    shape = stored[suffix].shape
    is_matrix = len(shape) == 2 and 0 not in shape
    must(is_matrix, f"{suffix} must have two dimensions", f"has shape {list(shape)}")
    return shape[0], shape[1]


def packed_shapes(stored: Headers) -> list[tuple[int, int]] | None:
    """Return the shapes of `.qweight`, `.qzeros` and `.scales`, the names of AWQ and GPTQ alike.

    Returns None where there is no `.qweight`. Raises `ValueError` for a tensor that is missing, or
    of a type or shape that neither format stores.
    """
    if ".qweight" not in stored:
        return None
    require(stored, (".scales", ".qzeros"), ".qweight")
    require_integers(stored, (".qweight", ".qzeros", ".g_idx"))
    return [matrix_shape(stored, suffix) for suffix in (".qweight", ".qzeros", ".scales")]


def require_integers(stored: Headers, suffixes: Sequence[str]) -> None:
    """Raise `ValueError` unless these, where present, are I32; `.g_idx` may be I64."""
    for suffix in suffixes:
        known = ("I32", "I64") if suffix.endswith("g_idx") else ("I32",)
        dtype = stored[suffix].dtype if suffix in stored else "I32"
        must(dtype in known, f"{suffix} must be of type {' or '.join(known)}", f"is {dtype}")


def group_size(num_columns: int, num_groups: int, said: object) -> int:
    """Return how many columns share a scale: `said` by the config, or what divides them; 0 for all.

    Raises `ValueError` where so many groups do not fit so many columns.
    """
    if num_groups == 1:
        return 0
    if type(said) is int and said > 0 and math.ceil(num_columns / said) == num_groups:
        return said
    if num_groups <= 0 or num_columns % num_groups:
        rule = f"group_size must divide {num_columns} columns into {num_groups} groups"
        must(False, rule, f"is {said!r:.20}", "mend config.json")
    return num_columns // num_groups


def checked_order(suffix: str, order: "Tensor", num_columns: int, num_groups: int) -> "Tensor":
    """Return the index (int32) of each column's scale. Raises `ValueError` for a bad index."""
    import torch

    count = order.numel()
    must(count == num_columns, f"{suffix} must have {num_columns} numbers", f"has {count}")
    if num_columns:
        least = int(order.min())
        most = int(order.max())
        is_inside = least >= 0 and most < num_groups
        must(is_inside, f"{suffix} must lie in 0..{num_groups - 1}", f"has {least}..{most}")
    return order.reshape(num_columns).to(torch.int32)


def unpacked(words: "Tensor", bits: int, dim: int, num_codes: int) -> "Tensor":
    """Return the codes (uint8) packed in int32 words along a dimension, lowest bits first."""
    import torch

    shift_E = torch.arange(0, 32, bits, dtype=torch.int32)
    code = (words.movedim(dim, -1)[..., None] >> shift_E) & ((1 << bits) - 1)
    return code.flatten(-2)[..., :num_codes].movedim(-1, dim).to(torch.uint8).contiguous()
