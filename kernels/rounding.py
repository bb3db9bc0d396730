"""Rounding of float32 to the compute types, for compiled functions.

Numba knows neither bfloat16 nor float16, so numbers are written as their bits: one by one
(`numbers`, `rounded`) or, where words hold neighbours, two at once (`pairs`, `rounded_pair`);
`widened` reads them. Invariant: rounding is to nearest, ties to even, overflow to infinity: the
bits of `tensor.to(dtype)`. NaN stays NaN; for bfloat16 only if its lowest bits are 0, as in the
results of products and in what was bfloat16: a check for others would cost every number a
comparison.
"""

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import ByType, compiled

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}
_PAIRS = {torch.bfloat16: torch.uint32, torch.float16: torch.uint32, torch.float32: torch.uint64}
U32 = np.uint32
U64 = np.uint64
I32 = np.int32
F32 = np.float32


def numbers(out: Tensor) -> np.ndarray:
    """Return the memory of `out` as an array for the bits that `rounded` returns.

    `out` is a contiguous bfloat16, float16 or float32 on the host.
    """
    return out.detach().view(_BITS[out.dtype]).numpy()


def pairs(out: Tensor) -> np.ndarray:
    """Return an array for what `rounded_pair` returns: rows, of even length, are half as long."""
    return out.detach().view(_PAIRS[out.dtype]).numpy()


# Numba widens operations on two 32-bit numbers to 64 bits: a cast back in every step keeps twice as
# many numbers in each vector instruction.


@compiled
def bits_of(value):  # type: ignore[no-untyped-def]  # numba infers types
    """Return the bits of a float32."""
    return F32(value).view(U32)


@compiled
def _high_half(value):  # type: ignore[no-untyped-def]
    """Return bits with the bfloat16 in the upper half; the lower half is meaningless."""
    bits = bits_of(value)
    return U32(bits + U32(0x7FFF) + U32(U32(bits >> U32(16)) & U32(1)))


@compiled
def _bfloat16(value):  # type: ignore[no-untyped-def]
    return U32(_high_half(value) >> U32(16))


@compiled
def _bfloat16_pair(first, second):  # type: ignore[no-untyped-def]
    return U32(U32(_high_half(first) >> U32(16)) | U32(_high_half(second) & U32(0xFFFF0000)))


@compiled
def _float16(value):  # type: ignore[no-untyped-def]
    """Return the bits of a float16.

    Normal numbers lose 13 bits; those below 2^-14 are added to 0.5, whose last bits are theirs.
    """
    bits = bits_of(value)
    sign = U32(U32(bits >> U32(16)) & U32(0x8000))
    size = U32(bits & U32(0x7FFFFFFF))
    normal = U32(U32(size + U32(0xC8000FFF) + U32(U32(size >> U32(13)) & U32(1))) >> U32(13))
    small = U32(F32(size.view(F32) + F32(0.5)).view(U32) - U32(0x3F000000))
    large = U32(0x7E00) if size > U32(0x7F800000) else U32(0x7C00)
    kept = small if size < U32(0x38800000) else normal
    return U32(sign | (large if size >= U32(0x47800000) else kept))


@compiled
def _float16_pair(first, second):  # type: ignore[no-untyped-def]
    return U32(_float16(first) | U32(_float16(second) << U32(16)))


@compiled
def of_bfloat16(bits):  # type: ignore[no-untyped-def]
    return U32(U32(bits) << U32(16)).view(F32)


@compiled
def of_float16(bits):  # type: ignore[no-untyped-def]
    """Return the float32 of a float16's bits.

    A product corrects the exponent's bias, for subnormal numbers as well.
    """
    size = U32(U32(U32(bits) & U32(0x7FFF)) << U32(13))
    finite = F32(size.view(F32) * F32(2.0**112))
    large = U32(0x7FC00000) if size > U32(0x0F800000) else U32(0x7F800000)
    value = large if size >= U32(0x0F800000) else bits_of(finite)
    return U32(value | U32(U32(U32(bits) & U32(0x8000)) << U32(16))).view(F32)


@compiled
def _of_float32(bits):  # type: ignore[no-untyped-def]
    return U32(bits).view(F32)


@compiled
def _float32_pair(first, second):  # type: ignore[no-untyped-def]
    return U64(bits_of(first)) | (U64(bits_of(second)) << U64(32))


rounded = ByType({torch.bfloat16: _bfloat16, torch.float16: _float16, torch.float32: bits_of})
rounded_pair = ByType(
    {torch.bfloat16: _bfloat16_pair, torch.float16: _float16_pair, torch.float32: _float32_pair}
)
widened = ByType(
    {torch.bfloat16: of_bfloat16, torch.float16: of_float16, torch.float32: _of_float32}
)
