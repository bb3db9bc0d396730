"""torchao's tensors of 8 bits: integers, integers of fewer bits in whole bytes, and FP8.

A weight X has `X._weight_qdata` and `X._weight_scale`, and integers `X._weight_zero_point`, with a
scale for each row or group of columns. Settings for activations are ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offload.encoding.base import (
    ANOTHER,
    NOWHERE,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    must,
    require,
    require_shape,
)
from offload.encoding.floats import Float8
from offload.encoding.integers import ByteIntegers, float_type, group_size, matrix_shape

_WORDS = "._weight_qdata"
_SCALE = "._weight_scale"
_ZERO = "._weight_zero_point"
_FLOATS = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class TorchaoBytes(ByteIntegers):
    """See `Coding`."""

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        named = {suffix.replace("._", "."): each for suffix, each in companions.items()}
        return super().prepare(named, shape)


def _recognise(stored: Headers, _settings: Settings, _: Site = NOWHERE) -> RecognisedWeight | None:
    """Return a torchao weight of 8 bits; None for others. Raises `ValueError`."""
    words = stored.get(_WORDS)
    if words is None:
        return None
    require(stored, (_SCALE,), _WORDS)
    is_known = words.dtype in ("I8", *_FLOATS)
    requirement = f"{_WORDS} must be of type I8, {', '.join(_FLOATS)}"
    must(is_known, requirement, f"is {words.dtype}", "quantise the model to int8, fp8 or intx")
    shape = matrix_shape(stored, _WORDS)
    num_rows, num_groups = matrix_shape(stored, _SCALE)
    must(num_rows == shape[0], f"{_SCALE} must have {shape[0]} rows", f"has {num_rows}")
    requirement = f"{_SCALE} must have groups that divide {shape[1]} columns"
    must(shape[1] % num_groups == 0, requirement, f"has {num_groups}")
    group = group_size(shape[1], num_groups, None)
    scales = float_type(stored, _SCALE)
    if words.dtype in _FLOATS:
        coding = Float8(words.dtype, (1, group))
        return RecognisedWeight(coding, shape, (_WORDS,), (_SCALE,))
    require(stored, (_ZERO,), _WORDS)
    zero = stored[_ZERO]
    must(zero.dtype == "I8", f"{_ZERO} must be of type I8", f"is {zero.dtype}", ANOTHER)
    require_shape(_ZERO, zero.shape, (num_rows, num_groups))
    integers = TorchaoBytes(8, group, scales, zero_bytes=1, align_bytes=1)
    return RecognisedWeight(integers, shape, (_WORDS,), (_SCALE, _ZERO))


TORCHAO = Format((_WORDS, _SCALE, _ZERO), _recognise)
