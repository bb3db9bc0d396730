"""MLX's weights: integers with a scale and a bias for each group, and MXFP4, MXFP8 and NVFP4.

A weight X has words `X.weight` (U32), with a row's codes packed without gaps, and `X.scales`. With
`X.biases` it consists of integers (`affine`): code x scale + bias, in float32, rounded once.
Without them scales are bytes, and the number of words in a group tells the format. Bits and group
size of integers follow from the columns that the model has there; if these are unknown, from the
config's settings for the weight, or for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.encoding.base import (
    ANOTHER,
    NOWHERE,
    Coding,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    checked_scale,
    must,
    require,
    require_shape,
)
from offload.encoding.floats import Float8, Mxfp4, Nvfp4
from offload.encoding.integers import Integers, float_type

_WORDS = ".weight"
_SCALES = ".scales"
_BIASES = ".biases"
_WHOLE = ".global_scale"
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (16, 32, 64, 128)
_WORD_BITS = 32
_FLOATS: Mapping[int, Coding] = {  # by the number of words in a group
    2: Nvfp4(scales=_SCALES),
    4: Mxfp4(_SCALES),
    8: Float8("F8_E4M3", (1, 32), has_exponents=True),
}


@dataclass(frozen=True)
class MlxIntegers(Integers):
    """See `Coding`."""

    @property
    def name(self) -> str:
        return super().name.replace(" in", " (MLX) in")

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of scales and biases."""
        return 2 * super().companion_bytes(shape)

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        grid = self.grid(shape)
        names = {"scale": _SCALES, "added": _BIASES}
        return {
            key: checked_scale(suffix, companions[suffix], grid) for key, suffix in names.items()
        }


def _recognise(
    stored: Headers, settings: Settings, site: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return an MLX weight, integers or floats; None for others. Raises `ValueError`."""
    words = stored.get(_WORDS)
    if words is None or words.dtype != "U32":
        return None
    require(stored, (_SCALES,), _WORDS)
    requirement = "weights of MLX must have no scale per tensor"
    must(_WHOLE not in stored, requirement, f"have a {_WHOLE}", "convert in mode mxfp4 or affine")
    scales = stored[_SCALES]
    *rows, num_words = words.shape
    requirement = f"{_WORDS} and {_SCALES} must be rows, or stacks of them"
    is_matrix = len(words.shape) in (2, 3) and 0 not in words.shape
    must(is_matrix, requirement, f"have shapes {list(words.shape)} and {list(scales.shape)}")
    num_groups = scales.shape[-1] if scales.shape else 0
    require_shape(_SCALES, scales.shape, (*rows, num_groups))
    requirement = f"the {num_words} words of a row must be of as many groups as have {_SCALES}"
    must(num_groups > 0 and num_words % num_groups == 0, requirement, f"has {num_groups}")
    if scales.dtype == "U8":
        return _recognise_floats(words.shape, num_groups)
    require(stored, (_BIASES,), _WORDS)
    require_shape(_BIASES, stored[_BIASES].shape, scales.shape)
    kind = float_type(stored, _SCALES)
    requirement = f"{_BIASES} must be of type {kind} as {_SCALES} are"
    must(stored[_BIASES].dtype == kind, requirement, f"is {stored[_BIASES].dtype}")
    bits = _bits(num_words, num_groups, settings, site)
    num_columns = num_words * _WORD_BITS // bits
    coding = MlxIntegers(bits, num_columns // num_groups, kind)
    return RecognisedWeight(coding, (*rows, num_columns), (_WORDS,), (_SCALES, _BIASES))


def _recognise_floats(shape: Sequence[int], num_groups: int) -> RecognisedWeight:
    """Tell MLX's float formats apart by the 32-bit words of a group. Raises `ValueError`."""
    *rows, num_words = shape
    coding = _FLOATS.get(num_words // num_groups)
    if coding is None:
        requirement = (
            f"a group must have {', '.join(map(str, _FLOATS))} words where {_SCALES} are U8"
        )
        must(False, requirement, f"has {num_words // num_groups}", ANOTHER)
        raise AssertionError(requirement)
    bits = 8 if isinstance(coding, Float8) else 4
    columns = num_words * _WORD_BITS // bits
    return RecognisedWeight(coding, (*rows, columns), (_WORDS,), (_SCALES,))


def _bits(num_words: int, num_groups: int, settings: Settings, site: Site) -> int:
    """Return the bits of a code: by the model's columns, else by the config."""
    group_bits = num_words * _WORD_BITS // num_groups
    fitting = [bits for bits in _BITS if group_bits % bits == 0 and group_bits // bits in _GROUPS]
    of_site = settings.get(site.name)
    given = [of_site] if isinstance(of_site, Mapping) else []
    named = [(each.get("bits"), each.get("group_size")) for each in (*given, settings)]
    by_columns = [bits for bits in fitting if num_words * _WORD_BITS == bits * site.columns]
    by_config = [
        bits for bits, size in named if bits in fitting and size in (None, group_bits // bits)
    ]
    candidates = (*by_columns, *by_config, *(fitting if len(fitting) == 1 else ()))
    has = f"has {' or '.join(map(str, fitting)) or 'none'}"
    requirement = f"{num_words} words and {num_groups} scales a row must tell bits and group_size"
    must(bool(candidates), requirement, has, "give the config.json that belongs to the weights")
    return int(candidates[0])


MLX = Format((_WORDS, _SCALES, _BIASES, _WHOLE), _recognise)
