"""Weights of 4 bits in blocks of rows, the layout of torch's int4 product for CPUs, and expansion.

A block of rows is stored column by column; a byte of a column has a row of the block's first half
in its lower bits and the corresponding row of the second half in its upper ones. The rows of a
block depend on the processor's instructions, so torch's converter is asked with a small matrix. A
weight is (code - 8) x scale + offset, with one scale and offset for each group of columns of a row.
Invariant: the product and the expansion mean the same numbers.

Shape letters, in this file only: N rows, a multiple of `BLOCK_ROWS`; K columns; G groups of them; B
blocks of R rows, H in each half.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from offload.kernels.compiled import HAS_NUMBA, compiled, share_rows
from offload.kernels.rounding import F32, I32, U32, numbers, rounded

BLOCK_ROWS = 64  # rows come in multiples of this, whatever the block of this processor is
_MIDDLE = 8
_PROBE_COLUMNS = 64
_TILE_COLUMNS = 16


class WordLayout(NamedTuple):
    """The layout of words."""

    block_rows: int
    has_product: bool  # whether torch multiplies with it on this processor


_OURS = WordLayout(BLOCK_ROWS, has_product=False)


def layout_for(place: torch.device) -> WordLayout:
    """Return the layout of torch's product on this processor, or our own where there is none."""
    return _of_this_processor() if place.type == "cpu" else _OURS


def pack_int4(code_NK: Tensor, layout: WordLayout) -> Tensor:
    """Return words (N, K / 2), uint8, of codes 0 to 15, uint8."""
    low_BHK, high_BHK = code_NK.view(-1, 2, layout.block_rows // 2, code_NK.shape[1]).unbind(1)
    return (low_BHK | high_BHK << 4).transpose(1, 2).reshape(len(code_NK), -1)


def int4_product(row_MK: Tensor, word_NK: Tensor, scale_GN2: Tensor) -> Tensor:
    """Return rows times the transposed weights, (M, N), by torch's product; best for few rows."""
    group = row_MK.shape[1] // len(scale_GN2)
    return torch._weight_int4pack_mm_for_cpu(row_MK, word_NK, group, scale_GN2)


def expand_int4_reference(
    word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout, out_KN: Tensor
) -> None:
    """Fill `out` (K, N) with the transposed weights, in plain torch.

    Product and sum are float32, rounded once to the type of `out`.
    """
    half = layout.block_rows // 2
    num_groups = len(scale_GN2)
    word_GkBH = word_NK.view(-1, num_groups, len(out_KN) // num_groups, half).permute(1, 2, 0, 3)
    for word_kBH, scale_N2, out_kN in zip(
        word_GkBH, scale_GN2, out_KN.chunk(num_groups), strict=True
    ):
        code_kBR = torch.cat((word_kBH & 15, word_kBH >> 4), 2)
        scale_N, offset_N = scale_N2.float().unbind(1)
        out_kN.copy_(code_kBR.flatten(1).float().sub_(_MIDDLE).mul_(scale_N).add_(offset_N))


def expand_int4_compiled(
    word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout, out_KN: Tensor
) -> None:
    """Do what the reference does, with numba on a CPU."""
    scale_GN, offset_GN = (part.contiguous().numpy() for part in scale_GN2.float().unbind(2))
    words = word_NK.view(-1, len(out_KN), layout.block_rows // 2).numpy()
    fill = _fill_columns.to(out_KN.dtype)
    out = numbers(out_KN)
    share_rows(lambda lo, hi: fill(words, scale_GN, offset_GN, (lo, hi), out), len(out_KN))


def expand_int4(word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout, out_KN: Tensor) -> None:
    """Expand words with numba or torch."""
    fill = (
        expand_int4_compiled if HAS_NUMBA and out_KN.device.type == "cpu" else expand_int4_reference
    )
    fill(word_NK, scale_GN2, layout, out_KN)


@compiled
def _fill_columns(word, scale, offset, extent, out):  # type: ignore[no-untyped-def]  # numba infers types
    """Fill tiles of a few columns of one block, so that writes stay in cache and few pages."""
    first, last = extent
    num_blocks, num_columns, half = word.shape
    group = num_columns // scale.shape[0]
    for begin in range(first, last, _TILE_COLUMNS):
        for block in range(num_blocks):
            low = block * 2 * half
            high = (block * 2 + 1) * half
            for column in range(begin, min(begin + _TILE_COLUMNS, last)):
                source = word[block, column]
                index = column // group
                factor = scale[index, low:high]
                addend = offset[index, low:high]
                target = out[column, low:high]
                for row in range(U32(half)):
                    target[row] = rounded(
                        F32(F32(F32((I32(source[row]) & 15) - 8) * factor[row]) + addend[row])
                    )
                end = high + half
                factor = scale[index, high:end]
                addend = offset[index, high:end]
                target = out[column, high:end]
                for row in range(U32(half)):
                    target[row] = rounded(
                        F32(F32(F32((I32(source[row]) >> 4) - 8) * factor[row]) + addend[row])
                    )


@cache
def _of_this_processor() -> WordLayout:
    """Return the first layout whose packing equals that of torch's converter."""
    code_NK = (
        torch.arange(2 * BLOCK_ROWS * _PROBE_COLUMNS).mul_(7919).remainder_(127).remainder_(16)
    )
    code_NK = code_NK.view(-1, _PROBE_COLUMNS).to(torch.uint8)
    try:
        theirs = torch._convert_weight_to_int4pack_for_cpu(code_NK.int(), 1)
    # this torch has no such product
    except (RuntimeError, AttributeError):
        return _OURS
    layouts = (WordLayout(size, has_product=True) for size in (BLOCK_ROWS, BLOCK_ROWS // 2))
    return next((one for one in layouts if torch.equal(pack_int4(code_NK, one), theirs)), _OURS)
