"""Weights of 4 bits that index a table of values, with a scale for each group of columns.

bitsandbytes stores such weights with tables of its own (NF4, FP4). In MXFP4 and NVFP4 the table is
that of the floating-point type E2M1, and scales of 8 bits index a table of levels, so they take no
more memory than in the file. Invariant: value x scale is rounded once.
"""

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.jit import jit, tl, triton
from offload.kernels.rounding import F32, U32, U64, numbers, pairs, rounded, rounded_pair

_CHUNK_ROWS = 64  # expanded to float32 they stay in the cache
_BLOCK = 1024
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TWICE = U32(0xC8643210)  # twice these, four bits each, from the lowest


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
        value_RGk = value.view(*scale_RG.shape, -1) * scale_RG[..., None]
        out_NK[rows] = value_RGk.flatten(1).to(out_NK.dtype)


def expand_codebook_compiled(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, out_NK: Tensor, *, is_high_first: bool
) -> None:
    """Do what the reference does, with numba, on as many threads as torch has."""
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
        for number in range(U64(scale.shape[1])):
            for code in range(U64(16)):
                product[code] = rounded(values[code] * scale[row, number])
            for column in range(number * group, (number + U64(1)) * group, U64(2)):
                byte = source[column >> U64(1)]
                place[column] = product[U64((byte >> first) & 15)]
                place[column + U64(1)] = product[U64((byte >> second) & 15)]


def expand_codebook_kernel(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, out_NK: Tensor, *, is_high_first: bool
) -> None:
    _expand_nibbles(words_NB, values, scale_NG, out_NK, IS_E2M1=False, IS_HIGH_FIRST=is_high_first)


def _expand_nibbles(
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
        given = (words_NB[rows], values, levels[scale_NG[rows].int()], out_NK[rows])
        expand_codebook_reference(*given, is_high_first=False)


def expand_e2m1_compiled(
    words_NB: Tensor, scale_NG: Tensor, levels: Tensor, out_NK: Tensor
) -> None:
    words = words_NB.numpy()
    scale = scale_NG.numpy()
    table = levels.numpy()
    out = pairs(out_NK)
    work = _scaled_levels.to(out_NK.dtype)
    share_rows(lambda lo, hi: work(words[lo:hi], scale[lo:hi], table, out[lo:hi]), len(out))


@compiled
def _e2m1_product(code, level):  # type: ignore[no-untyped-def]  # numba infers types
    """Return code x level; no table, which no processor looks up in vectors. Halving is exact."""
    twice = U32(U32(_TWICE >> U32(U32(code & U32(7)) << U32(2))) & U32(15))
    size = F32(F32(F32(twice) * F32(0.5)) * level)
    return U32(size.view(U32) ^ U32(U32(code & U32(8)) << U32(28))).view(F32)


@compiled
def _scaled_levels(words, scale, levels, out):  # type: ignore[no-untyped-def]
    """Fill rows of pairs of numbers with E2M1 codes times the levels that scales index."""
    half = U64(out.shape[1] // scale.shape[1])
    for row in range(U64(out.shape[0])):
        source = words[row]
        place = out[row]
        for number in range(U64(scale.shape[1])):
            level = levels[scale[row, number]]
            for pair in range(number * half, (number + U64(1)) * half):
                byte = U32(source[pair])
                first = U32(byte & U32(15))
                second = U32(byte >> U32(4))
                place[pair] = rounded_pair(
                    _e2m1_product(first, level), _e2m1_product(second, level)
                )


def expand_e2m1_kernel(words_NB: Tensor, scale_NG: Tensor, levels: Tensor, out_NK: Tensor) -> None:
    _expand_nibbles(words_NB, levels, scale_NG, out_NK, IS_E2M1=True, IS_HIGH_FIRST=False)
