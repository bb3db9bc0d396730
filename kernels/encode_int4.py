"""Encode matrices in words of 4 bits: each number becomes the nearest of 16 levels.

This is the inverse of `int4_blocks`. The levels of a group of columns lie evenly between its least
and its largest number. Scale and offset are rounded to the type of the weights before anything is
divided by them, so codes are the best for the rounded ones. In torch a chunk of rows goes through
its operators; compiled, a row is read once and its codes stay in the cache until their block is
complete. Invariant: both give the same codes, bit for bit, and none is above 15 whatever a file
holds.

Shape letters, in this file only: as in `int4_blocks`, and k columns of a group.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from offload.kernels.compiled import HAS_NUMBA, compiled, share_rows
from offload.kernels.int4_blocks import BLOCK_ROWS, WordLayout, pack_int4
from offload.kernels.rounding import F32, I32, U32, U64, bits_of, numbers, rounded, widened

_LEVELS = 15
_MIDDLE = 8
_CHUNK_NUMBERS = 1 << 20  # rounded at once by torch, or a block of rows if that is more
_TILE_COLUMNS = 16  # divides groups
_PANEL_COLUMNS = 1024  # codes of a panel stay in the cache; groups divide it
U8 = np.uint8


class Int4Words(NamedTuple):
    """A quantised matrix in memory; padding rows of the last block have scales of zero."""

    word_NK: Tensor  # (N, K / 2) uint8, two numbers in each
    scale_GN2: Tensor  # scale and offset


def encode_int4(weight_NK: Tensor, group: int, layout: WordLayout) -> Int4Words:
    """Encode a matrix with numba or torch.

    Args:
        weight_NK: bfloat16, float16 or float32, of any number of rows.
        group: columns that share scale and offset; divides K.
        layout: of the words.
    """
    is_compiled = HAS_NUMBA and weight_NK.device.type == "cpu"
    return (encode_int4_compiled if is_compiled else encode_int4_reference)(
        weight_NK, group, layout
    )


def encode_int4_reference(weight_NK: Tensor, group: int, layout: WordLayout) -> Int4Words:
    """Do what `encode_int4` does, in plain torch."""
    num_rows, num_columns = weight_NK.shape
    words = _room_for(weight_NK, group)
    rows_at_once = max(1, _CHUNK_NUMBERS // num_columns // BLOCK_ROWS) * BLOCK_ROWS
    for lo in range(0, num_rows, rows_at_once):
        rows = slice(lo, min(lo + rows_at_once, num_rows))
        step_NGk = weight_NK[rows].to(torch.float32, copy=True).unflatten(1, (-1, group))
        low_NG, high_NG = step_NGk.aminmax(dim=2)
        scale_NG = _rounded_to(
            ((high_NG - low_NG) / _LEVELS).clamp_(min=least_step(weight_NK.dtype)), weight_NK.dtype
        )
        offset_NG = _rounded_to(low_NG + _MIDDLE * scale_NG, weight_NK.dtype)
        step_NGk.sub_(offset_NG[..., None]).div_(scale_NG[..., None])
        code_NK = (
            step_NGk.round_()
            .add_(_MIDDLE)
            .clamp_(0, _LEVELS)
            .flatten(1)
            .to(torch.uint8)
            .bitwise_and_(15)
        )
        words.scale_GN2[:, rows] = torch.stack((scale_NG.t(), offset_NG.t()), 2).to(weight_NK.dtype)
        missing = -len(code_NK) % BLOCK_ROWS
        code_NK = functional.pad(code_NK, (0, 0, 0, missing)) if missing else code_NK
        words.word_NK[lo : lo + len(code_NK)] = pack_int4(code_NK, layout)
    return words


def encode_int4_compiled(weight_NK: Tensor, group: int, layout: WordLayout) -> Int4Words:
    """Do what `encode_int4` does, with numba on a CPU."""
    words = _room_for(weight_NK, group)
    half = layout.block_rows // 2
    word_BKH = words.word_NK.view(-1, weight_NK.shape[1], half).numpy()
    weight = numbers(weight_NK.contiguous())
    scale = numbers(words.scale_GN2)
    sizes = (group, F32(least_step(weight_NK.dtype)))
    encode = _encode_blocks.to(weight_NK.dtype)

    def share(lo: int, hi: int) -> None:
        encode(weight, sizes, (lo // layout.block_rows, hi // layout.block_rows), word_BKH, scale)

    share_rows(share, len(words.word_NK))
    return words


def least_step(dtype: torch.dtype) -> float:
    """Return the step between levels where all numbers are equal; it is not zero in this type."""
    return 2.0**-24 if dtype == torch.float16 else 1e-12


def _room_for(weight_NK: Tensor, group: int) -> Int4Words:
    num_rows, num_columns = weight_NK.shape
    num_padded = -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS
    word_NK = torch.empty(num_padded, num_columns // 2, dtype=torch.uint8, device=weight_NK.device)
    return Int4Words(word_NK, weight_NK.new_zeros(num_columns // group, num_padded, 2))


def _rounded_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).float()


@compiled
def _encode_blocks(weight: Any, sizes: Any, extent: Any, word: Any, scale: Any) -> None:
    """Encode panels of some columns of a block: rows into codes, then tiles into columns."""
    num_rows = U64(weight.shape[0])
    num_columns = U64(word.shape[1])
    half = U64(word.shape[2])
    group = U64(sizes[0])
    least = sizes[1]
    code = np.empty((half, U64(_PANEL_COLUMNS)), U8)
    value = np.empty(group, F32)
    panel = U64(_PANEL_COLUMNS)
    for block in range(U64(extent[0]), U64(extent[1])):
        num_here = min(U64(2) * half, num_rows - min(num_rows, block * U64(2) * half))
        for begin in range(U64(0), num_columns, panel):
            width = min(panel, num_columns - begin)
            code[:] = U8(0)
            for row in range(num_here):
                at = block * U64(2) * half + row
                line = row % half
                place = U8(16 if row >= half else 1)
                for within in range(U64(0), width, group):
                    # Integers of the same order as the floats: their minimum is vectorised.
                    low = I32(0x7FFFFFFF)
                    high = I32(-0x80000000)
                    for i in range(group):
                        number = widened(weight[at, begin + within + i])
                        value[i] = number
                        bits = I32(bits_of(number))
                        key = I32(bits ^ I32(I32(bits >> I32(31)) & I32(0x7FFFFFFF)))
                        low = min(low, key)
                        high = max(high, key)
                    lowest = _number_of(low)
                    index = (begin + within) // group
                    step_bits = rounded(max(F32(F32(_number_of(high) - lowest) / F32(15)), least))
                    step = widened(step_bits)
                    offset_bits = rounded(F32(lowest + F32(F32(8) * step)))
                    offset = widened(offset_bits)
                    scale[index, at, U64(0)] = step_bits
                    scale[index, at, U64(1)] = offset_bits
                    for i in range(group):
                        far = min(max(F32(F32(value[i] - offset) / step), F32(-8)), F32(7))
                        # Added to 1.5 x 2^23 it is rounded, ties to even, into the lowest bits.
                        nibble = U8(U8(bits_of(F32(far + F32(12582920)))) & U8(15))
                        code[line, within + i] |= U8(nibble * place)
            for first in range(U64(0), width, U64(_TILE_COLUMNS)):
                for row in range(half):
                    for column in range(U64(_TILE_COLUMNS)):
                        word[block, begin + first + column, row] = code[row, first + column]


@compiled
def _number_of(key: Any) -> Any:
    return F32(U32(I32(key ^ I32(I32(key >> I32(31)) & I32(0x7FFFFFFF)))).view(F32))
