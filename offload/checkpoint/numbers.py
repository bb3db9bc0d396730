"""The largest stored number of a tensor, found from bits at the speed of memory, and what it shows.

Among floats of one sign the larger has the larger bits, and infinity and NaN have the largest. So
two maxima of integers tell whether a run of weights is finite, whether it is all zero, and how
large its numbers are. No torch, whose reductions bring threads of their own.
"""

import math
from typing import NamedTuple

import numpy as np

from offload.encoding.base import STORED
from offload.encoding.gguf import BLOCKS

# no trained matrix has its largest number beyond these; a damaged exponent has
MOST = 2.0**20
LEAST = 2.0**-40
NOT_FINITE = "has numbers that are not finite"

_ENDLESS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000, "F64": 0x7FF0 << 48, "F8_E4M3": 0x7F, "F8_E5M2": 0x7C,
            "F8_E8M0": 0xFF}  # fmt: skip
_SIGNED = _ENDLESS.keys() - {"F8_E8M0"}
_SIZED = ("BF16", "F16", "F32", "F64")  # the size of other types depends on scales beside them
# GPT-NeoX and GPT-J: a buffer of -1e9, infinite in float16, which lies between the weights
_MASK = "masked_bias"
# others: (0, 2)
_BLOCK_SCALES = {"Q4_1": (0, 4), "Q5_1": (0, 4), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210), "Q2_K": (80, 84),
                 "Q3_K": (108, 110)}  # fmt: skip


class Form(NamedTuple):
    """How the bytes of a tensor become integers that can be compared."""

    item_bytes: int  # bytes of a number, or of a block, which is read whole or not at all
    number_bytes: int
    # from these bits on, sign excluded, a number is not finite; None: all are finite
    endless: int | None
    places: tuple[int, int] | None = None  # where a block has its scales; None: no blocks
    dtype: str = "F16"

    @property
    def is_sized(self) -> bool:
        """Return True if the numbers show how large weights are."""
        return self.places is None and self.dtype in _SIZED


def form_of(dtype: str, name: str = "") -> Form | None:
    """Return the form of a type in headers; None for unknown types and for non-weights."""
    if name.endswith(_MASK):
        return None
    if dtype == "MXFP4":  # types whose scales are exponents
        return Form(BLOCKS[dtype][1], 1, _ENDLESS["F8_E8M0"], (0, 1), "F8_E8M0")
    if dtype in BLOCKS:
        return Form(BLOCKS[dtype][1], 2, _ENDLESS["F16"], _BLOCK_SCALES.get(dtype, (0, 2)))
    if dtype not in STORED:
        return None
    item_bytes = STORED[dtype].align_bytes
    return Form(item_bytes, item_bytes, _ENDLESS.get(dtype), dtype=dtype)


def top_bits(stored: np.ndarray, form: Form) -> int:
    """Return the largest bits, sign excluded, among whole items (uint8); rows may be strided."""
    if form.places is not None:
        stored = np.ascontiguousarray(
            stored.reshape(-1, form.item_bytes)[:, slice(*form.places)]
        ).ravel()
    if not len(stored):
        return 0
    most = int(stored.view(f"<u{form.number_bytes}").max())
    if form.dtype not in _SIGNED:
        return most
    sign = 1 << (8 * form.number_bytes - 1)
    return max(most - sign, int(stored.view(f"<i{form.number_bytes}").max()), 0)


def is_finite(bits: int, form: Form) -> bool:
    """Return True if numbers with these largest bits are all finite."""
    return form.endless is None or bits < form.endless


def magnitude(bits: int, form: Form) -> float:
    """Return the number with these bits as a float."""
    wide = np.array([bits << 16 if form.dtype == "BF16" else bits], "<u8").view("<u4")[:1]
    if form.dtype == "F64":
        return float(np.array([bits], "<u8").view("<f8")[0])
    return float(wide.view("<f2")[0]) if form.dtype == "F16" else float(wide.view("<f4")[0])


class TensorMaximum(NamedTuple):
    """A tensor and the largest of its numbers."""

    name: str
    file: str
    is_matrix: bool
    form: Form
    bits: int

    @property
    def is_norm(self) -> bool:
        """Return True if it is the weight, not the bias, of a norm."""
        return not self.is_matrix and "norm" in self.name and not self.name.endswith("bias")


def remarks(tops: list[TensorMaximum], *, has_zeros: bool) -> list[str]:
    """Return a line for each kind of oddness in finite tensors that hints at damage.

    Vectors may be zero in sound models (biases, and norms with 1 added): that is odd only if others
    of their kind are not. `has_zeros`: the checkpoint says that its matrices may be zero.
    """
    has_norms = any(top.bits and top.is_norm for top in tops)
    zero = [top for top in tops if not top.bits and (top.is_matrix or (has_norms and top.is_norm))]
    sized = [(magnitude(top.bits, top.form), top) for top in tops if top.bits and top.form.is_sized]
    large = [(size, top) for size, top in sized if size > MOST]
    small = [(size, top) for size, top in sized if size < LEAST and top.is_matrix]
    lines = [f"all zero: {named(zero)}"] if zero and not has_zeros else []
    if large:
        finding = f"numbers as large as {max(large)[0]:.1e}, as no model has"
        lines.append(f"{finding}: {named([top for _, top in large])}")
    if small:
        finding = f"no number above {max(small)[0]:.1e}, as in no model"
        lines.append(f"{finding}: {named([top for _, top in small])}")
    return lines


def named(tops: list[TensorMaximum]) -> str:
    """Return the name of the first, and the number of the others."""
    others = f" and {len(tops) - 1} more" if len(tops) > 1 else ""
    return f"{tops[0].name:.200} in {tops[0].file}{others}"


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Return True if a tensor of this shape is a matrix, and no bias, norm or scale."""
    return len(shape) > 1 and math.prod(shape[:-1]) > 1
