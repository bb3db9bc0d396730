"""Weights of 4 bits that index a table of values, with a scale for each group of columns.

bitsandbytes stores such weights (NF4, FP4). Invariant: value x scale is rounded once.
"""

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.jit import jit, tl, triton
from offload.kernels.rounding import U64, numbers, rounded

_CHUNK_ROWS = 64  # expanded to float32 they stay in the cache
_BLOCK = 1024


def expand_codebook_reference(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, out_NK: Tensor, *, is_high_first: bool
) -> None:
    """Fill `out` with value x scale; groups are of K / G columns.

    Args:
        words_NB: uint8, two columns each.
        values: float32, what the 16 codes mean.
        scale_NG: float32.
        out_NK: bfloat16, float16 or float32, of an even number of columns.
        is_high_first: whether the first of two columns is in the upper half of a byte.
    """
    byte = torch.arange(256, device=words_NB.device)
    halves = (byte >> 4, byte & 15) if is_high_first else (byte & 15, byte >> 4)
    # torch looks up 8 bytes at a time fastest
    pairs_of_byte = values[torch.stack(halves, 1)].view(torch.int64)[:, 0]
    for lo in range(0, len(out_NK), _CHUNK_ROWS):
        rows = slice(lo, lo + _CHUNK_ROWS)
        scale_RG = scale_NG[rows]
        value = pairs_of_byte.index_select(0, words_NB[rows].flatten().int()).view(torch.float32)
        out_NK[rows] = (
            (value.view(*scale_RG.shape, -1) * scale_RG[..., None]).flatten(1).to(out_NK.dtype)
        )


def expand_codebook_compiled(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, out_NK: Tensor, *, is_high_first: bool
) -> None:
    """Do what the reference does, with numba on a CPU."""
    words = words_NB.numpy()
    scale = scale_NG.numpy()
    shifts = (4, 0) if is_high_first else (0, 4)

    def share(lo: int, hi: int) -> None:
        out = out_NK[lo:hi]
        _scaled.to(out.dtype)(words[lo:hi], shifts, values.numpy(), scale[lo:hi], numbers(out))

    share_rows(share, len(out_NK))


@compiled
def _scaled(words, shifts, values, scale, out):  # type: ignore[no-untyped-def]  # numba infers types
    """Fill `out`; the 16 rounded products of a group are computed once."""
    first, second = shifts
    group = U64(out.shape[1] // scale.shape[1])
    product = np.empty(16, out.dtype)
    for row in range(U64(out.shape[0])):
        source = words[row]
        place = out[row]
        for one in range(U64(scale.shape[1])):
            for code in range(U64(16)):
                product[code] = rounded(values[code] * scale[row, one])
            for column in range(one * group, (one + U64(1)) * group, U64(2)):
                byte = source[column >> U64(1)]
                place[column] = product[U64((byte >> first) & 15)]
                place[column + U64(1)] = product[U64((byte >> second) & 15)]


def expand_codebook_kernel(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, out_NK: Tensor, *, is_high_first: bool
) -> None:
    """Do what the reference does, in Triton."""
    expand_nibbles(words_NB, values, scale_NG, out_NK, IS_E2M1=False, IS_HIGH_FIRST=is_high_first)


def expand_nibbles(
    words_NB: Tensor, table: Tensor, scale_NG: Tensor, out_NK: Tensor, **kinds: bool
) -> None:
    """Run the Triton kernel; the table holds values, or the levels of `expand_e2m1`."""
    num_rows, num_columns = out_NK.shape
    num_groups = scale_NG.shape[1]
    sizes = (num_groups, num_columns, num_columns // num_groups)
    grid = (num_rows, triton.cdiv(num_columns, _BLOCK))
    _expand[grid](words_NB, table, scale_NG, out_NK, *sizes, **kinds, BLOCK=_BLOCK)


@jit
def _expand(
    words: tl.tensor,
    table: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    num_groups: tl.tensor,
    num_columns: tl.tensor,
    group: tl.tensor,
    IS_E2M1: tl.constexpr,
    IS_HIGH_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Run one program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < num_columns
    place = column % 2
    byte = tl.load(words + row * (num_columns // 2) + column // 2, mask=here, other=0).to(tl.int32)
    code = (byte >> (4 * (1 - place if IS_HIGH_FIRST else place))) & 15
    factor = tl.load(scale + row * num_groups + column // group, mask=here, other=0)
    if IS_E2M1:
        size = code & 7
        twice = tl.where(size < 5, size, tl.where(size == 7, 12, 2 * size - 4))
        bits = (twice.to(tl.float32) * 0.5 * tl.load(table + factor.to(tl.int32))).to(
            tl.int32, bitcast=True
        )
        product = (bits ^ ((code & 8) << 28)).to(tl.float32, bitcast=True)
    else:
        product = tl.load(table + code, mask=here, other=0) * factor
    tl.store(out + row * num_columns + column, product.to(out.dtype.element_ty), mask=here)
