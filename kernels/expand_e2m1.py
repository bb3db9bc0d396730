"""Floating-point weights of 4 bits (E2M1) with scales of 8 bits for groups: MXFP4 and NVFP4.

Scales index a table of levels, so they take no more memory than in the file. Invariant: value x
scale is rounded once.
"""

import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.expand_codebook import expand_codebook_reference, expand_nibbles
from offload.kernels.rounding import F32, U32, U64, pairs, rounded_pair

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TWICE = U32(0xC8643210)  # twice these, four bits each, from the lowest
_CHUNK_ROWS = 64  # expanded to float32 they stay in the cache


def expand_e2m1_reference(
    words_NB: Tensor, scale_NG: Tensor, levels: Tensor, out_NK: Tensor
) -> None:
    """Fill `out` with value x level; groups are of K / G columns.

    Args:
        words_NB: uint8, two columns each, the first in the lower half.
        scale_NG: uint8, numbers of `levels`.
        levels: (256,) float32.
        out_NK: bfloat16, float16 or float32, of an even number of columns.
    """
    values = torch.tensor([*_SIZES, *(-size for size in _SIZES)], device=words_NB.device)
    for lo in range(0, len(out_NK), _CHUNK_ROWS):
        rows = slice(lo, lo + _CHUNK_ROWS)
        scale_RG = levels[scale_NG[rows].int()]
        expand_codebook_reference(
            words_NB[rows], values, scale_RG, out_NK[rows], is_high_first=False
        )


def expand_e2m1_compiled(
    words_NB: Tensor, scale_NG: Tensor, levels: Tensor, out_NK: Tensor
) -> None:
    """Do what the reference does, with numba on a CPU."""
    words = words_NB.numpy()
    scale = scale_NG.numpy()
    out = pairs(out_NK)
    work = _scaled.to(out_NK.dtype)
    share_rows(
        lambda lo, hi: work(words[lo:hi], scale[lo:hi], levels.numpy(), out[lo:hi]), len(out)
    )


@compiled
def _product(code, level):  # type: ignore[no-untyped-def]  # numba infers types
    """Return code x level; no table, which no processor looks up in vectors. Halving is exact."""
    twice = U32(U32(_TWICE >> U32(U32(code & U32(7)) << U32(2))) & U32(15))
    size = F32(F32(F32(twice) * F32(0.5)) * level)
    return U32(size.view(U32) ^ U32(U32(code & U32(8)) << U32(28))).view(F32)


@compiled
def _scaled(words, scale, levels, out):  # type: ignore[no-untyped-def]
    half = U64(out.shape[1] // scale.shape[1])
    for row in range(U64(out.shape[0])):
        source = words[row]
        place = out[row]
        for one in range(U64(scale.shape[1])):
            level = levels[scale[row, one]]
            for pair in range(one * half, (one + U64(1)) * half):
                byte = U32(source[pair])
                first = U32(byte & U32(15))
                second = U32(byte >> U32(4))
                place[pair] = rounded_pair(_product(first, level), _product(second, level))


def expand_e2m1_kernel(words_NB: Tensor, scale_NG: Tensor, levels: Tensor, out_NK: Tensor) -> None:
    """Do what the reference does, in Triton."""
    expand_nibbles(words_NB, levels, scale_NG, out_NK, IS_E2M1=True, IS_HIGH_FIRST=False)
