"""Weights of 4 bits each that number the values of a table, with a scale for each group of columns.

The tables are those of E2M1 (MXFP4, NVFP4) and of bitsandbytes. Scales of 8 bits number the levels of a second table,
so that they need not grow in memory. Invariant: value x scale is rounded once.
"""

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.jit import jit, tl, triton
from offload.kernels.rounding import U64, numbers, rounded

_CHUNK_ROWS = 64  # what is made of them in float32 stays in the cache
_BLOCK = 1024


def expand_codebook_reference(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, levels: Tensor | None, out_NK: Tensor, *, is_high_first: bool
) -> None:
    """Fill `out` with value x scale; groups are of K / G columns.

    Args:
        words_NB: uint8, two columns each.
        values: float32, what the 16 codes mean.
        scale_NG: float32; or uint8, numbers of `levels` (256, float32).
        out_NK: bfloat16, float16 or float32, of an even number of columns.
        is_high_first: whether the first of two columns is in the upper half of a byte.
    """
    byte = torch.arange(256, device=words_NB.device)
    halves = (byte >> 4, byte & 15) if is_high_first else (byte & 15, byte >> 4)
    pairs_of_byte = values[torch.stack(halves, 1)].view(torch.int64)[:, 0]  # a look-up of 8 bytes is the fast one
    for lo in range(0, len(out_NK), _CHUNK_ROWS):
        rows = slice(lo, lo + _CHUNK_ROWS)
        scale_RG = scale_NG[rows] if levels is None else levels[scale_NG[rows].int()]
        value = pairs_of_byte.index_select(0, words_NB[rows].flatten().int()).view(torch.float32)
        out_NK[rows] = (value.view(*scale_RG.shape, -1) * scale_RG[..., None]).flatten(1).to(out_NK.dtype)


def expand_codebook_compiled(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, levels: Tensor | None, out_NK: Tensor, *, is_high_first: bool
) -> None:
    """The same on a CPU."""
    words, scale = words_NB.numpy(), scale_NG.numpy()
    shifts = (4, 0) if is_high_first else (0, 4)

    def share(lo: int, hi: int) -> None:
        out = out_NK[lo:hi]
        if levels is None:
            _scaled.to(out.dtype)(words[lo:hi], shifts, values.numpy(), scale[lo:hi], numbers(out))
        else:
            _levelled.to(out.dtype)(words[lo:hi], shifts, values.numpy(), scale[lo:hi], levels.numpy(), numbers(out))

    share_rows(share, len(out_NK))


@compiled
def _scaled(words, shifts, values, scale, out):  # type: ignore[no-untyped-def]  # numba infers types
    group, product = U64(out.shape[1] // scale.shape[1]), np.empty(16, out.dtype)
    for row in range(U64(out.shape[0])):
        for one in range(U64(scale.shape[1])):
            for code in range(U64(16)):
                product[code] = rounded(values[code] * scale[row, one])
            _look_up(words[row], shifts, product, one * group, group, out[row])


@compiled
def _levelled(words, shifts, values, scale, levels, out):  # type: ignore[no-untyped-def]
    group, product = U64(out.shape[1] // scale.shape[1]), np.empty(16, out.dtype)
    for row in range(U64(out.shape[0])):
        for one in range(U64(scale.shape[1])):
            s = levels[scale[row, one]]
            for code in range(U64(16)):
                product[code] = rounded(values[code] * s)
            _look_up(words[row], shifts, product, one * group, group, out[row])


@compiled
def _look_up(words, shifts, product, start, group, out):  # type: ignore[no-untyped-def]
    first, second = shifts
    for column in range(start, start + group, U64(2)):
        byte = words[column >> U64(1)]
        out[column] = product[U64((byte >> first) & 15)]
        out[column + U64(1)] = product[U64((byte >> second) & 15)]


def expand_codebook_kernel(
    words_NB: Tensor, values: Tensor, scale_NG: Tensor, levels: Tensor | None, out_NK: Tensor, *, is_high_first: bool
) -> None:
    """The same in Triton."""
    num_rows, num_columns = out_NK.shape
    _expand[(num_rows, triton.cdiv(num_columns, _BLOCK))](
        words_NB,
        values,
        scale_NG,
        values if levels is None else levels,
        out_NK,
        scale_NG.shape[1],
        num_columns,
        num_columns // scale_NG.shape[1],
        HAS_LEVELS=levels is not None,
        IS_HIGH_FIRST=is_high_first,
        BLOCK=_BLOCK,
    )


@jit
def _expand(
    words: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    levels: tl.tensor,
    out: tl.tensor,
    num_groups: tl.tensor,
    num_columns: tl.tensor,
    group: tl.tensor,
    HAS_LEVELS: tl.constexpr,
    IS_HIGH_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, place = column < num_columns, column % 2
    byte = tl.load(words + row * (num_columns // 2) + column // 2, mask=here, other=0).to(tl.int32)
    code = (byte >> (4 * (1 - place if IS_HIGH_FIRST else place))) & 15
    factor = tl.load(scale + row * num_groups + column // group, mask=here, other=0)
    if HAS_LEVELS:
        factor = tl.load(levels + factor.to(tl.int32), mask=here, other=0)
    product = tl.load(values + code, mask=here, other=0) * factor
    tl.store(out + row * num_columns + column, product.to(out.dtype.element_ty), mask=here)
