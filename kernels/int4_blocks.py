"""Weights of 4 bits in blocks of rows, the layout of torch's int4 product: encoding, product, expansion.

A block of rows is stored column by column; a byte of a column has a row of the block's first half
in its lower bits and the corresponding row of the second half in its upper ones. The rows of a
block depend on the processor's instructions, so torch's converter is asked with a small matrix. A
weight is (code - 8) x scale + offset, with one scale and offset for each group of columns of a row.

The 16 levels of a group lie evenly between its least and its largest number, one of them at zero,
and each number becomes the nearest: so only the numbers at that level have a sign or a magnitude
that the level leaves open (`residual_layout`). The scale is rounded to the type of the weights
before anything is divided by it, so codes are the best for the rounded one. In torch a chunk of
rows goes through its operators; compiled, a row is read once and its codes stay in the cache until
their block is complete.

Invariants: the product and the expansion mean the same numbers; both ways to encode give the same
codes, bit for bit, and none is above 15 whatever a file holds; the scale of a group with a number
that is not finite is not finite.

Shape letters, in this file only: N rows, a multiple of `BLOCK_ROWS`; K columns, k of a group; G
groups of them; B blocks of R rows, H in each half.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from offload.kernels.compiled import compiled, faster, share_rows
from offload.kernels.int4_code import code_for
from offload.kernels.machine_code import call_of, fused_lanes
from offload.kernels.rounding import F32, I32, U32, U64, bits_of, numbers, rounded, widened

BLOCK_ROWS = 64  # rows come in multiples of this, whatever the block of this processor is
_MIDDLE = 8
_PROBE_COLUMNS = 64
_TILE_COLUMNS = 16  # divides groups
_LEVELS = 15
_CHUNK_NUMBERS = 1 << 20  # rounded at once by torch, or a block of rows if that is more
_PANEL_COLUMNS = 1024  # codes of a panel stay in the cache; groups divide it
U8 = np.uint8


class WordLayout(NamedTuple):
    """The layout of words."""

    block_rows: int
    has_product: bool  # whether torch multiplies with it on this processor


# in files, and where torch has no product
FILE_LAYOUT = WordLayout(BLOCK_ROWS, has_product=False)


def layout_for(device: torch.device) -> WordLayout:
    """Return the layout of torch's product on this processor, or our own where there is none."""
    return _of_this_processor() if device.type == "cpu" else FILE_LAYOUT


def pack_int4(code_NK: Tensor, layout: WordLayout) -> Tensor:
    """Return words (N, K / 2), uint8, of codes 0 to 15, uint8."""
    low_BHK, high_BHK = code_NK.view(-1, 2, layout.block_rows // 2, code_NK.shape[1]).unbind(1)
    return (low_BHK | high_BHK << 4).transpose(1, 2).reshape(len(code_NK), -1)


def unpack_int4(word_NK: Tensor, layout: WordLayout) -> Tensor:
    """Return the codes (N, K) of words (N, K / 2)."""
    num_rows, half_columns = word_NK.shape
    word_BKH = word_NK.view(-1, 2 * half_columns, layout.block_rows // 2)
    code_BKR = torch.cat((word_BKH & 15, word_BKH >> 4), 2)
    return code_BKR.transpose(1, 2).reshape(num_rows, -1)


def in_layout(word_BKH: Tensor) -> Tensor:
    """Return words that are stored in blocks of `BLOCK_ROWS` in this processor's, in place."""
    layout = _of_this_processor()
    num_columns = word_BKH.shape[1]
    if layout != FILE_LAYOUT._replace(has_product=layout.has_product):
        for block_KH in word_BKH:
            code_NK = unpack_int4(block_KH.reshape(BLOCK_ROWS, -1), FILE_LAYOUT)
            block_KH.view(-1).copy_(pack_int4(code_NK, layout).view(-1))
    return word_BKH.view(-1, num_columns, layout.block_rows // 2)


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
    groups = zip(word_GkBH, scale_GN2, out_KN.chunk(num_groups), strict=True)
    for word_kBH, scale_N2, out_kN in groups:
        code_kBR = torch.cat((word_kBH & 15, word_kBH >> 4), 2)
        scale_N, offset_N = scale_N2.float().unbind(1)
        out_kN.copy_(code_kBR.flatten(1).float().sub_(_MIDDLE).mul_(scale_N).add_(offset_N))


def expand_int4_compiled(
    word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout, out_KN: Tensor
) -> None:
    """Do what the reference does, in machine code, on as many threads as torch has."""
    if not fused_lanes():
        expand_int4_reference(word_NK, scale_GN2, layout, out_KN)
        return
    num_columns = len(out_KN)
    assert word_NK.is_contiguous() and out_KN.is_contiguous(), "rows lie one behind the other"
    scale_GN, offset_GN = (part.contiguous() for part in scale_GN2.float().unbind(2))
    sizes = (len(word_NK) // layout.block_rows, num_columns, num_columns // len(scale_GN2))
    call = call_of(0, (word_NK, scale_GN, offset_GN, out_KN, *sizes))
    fill = code_for(out_KN.dtype, layout.block_rows // 2)
    share_rows(lambda lo, hi: fill(ctypes.addressof(call), lo, hi), num_columns)


expand_int4 = faster(expand_int4_compiled, expand_int4_reference, fused_lanes)


@cache
def _of_this_processor() -> WordLayout:
    """Return the layout in which torch's converter packs codes on this processor."""
    number_NK = torch.arange(2 * BLOCK_ROWS * _PROBE_COLUMNS).view(-1, _PROBE_COLUMNS)
    code_NK = number_NK.mul_(7919).remainder_(127).remainder_(16).to(torch.uint8)
    try:
        theirs = torch._convert_weight_to_int4pack_for_cpu(code_NK.int(), 1)
    # this torch has no such product
    except (RuntimeError, AttributeError):
        return FILE_LAYOUT
    layouts = (WordLayout(size, has_product=True) for size in (BLOCK_ROWS, BLOCK_ROWS // 2))
    return next(
        (layout for layout in layouts if torch.equal(pack_int4(code_NK, layout), theirs)),
        FILE_LAYOUT,
    )


class Int4Words(NamedTuple):
    """A quantised matrix in memory; padding rows of the last block have scales of zero."""

    word_NK: Tensor  # (N, K / 2) uint8, two numbers in each
    scale_GN2: Tensor  # scale and offset


def encode_int4_reference(weight_NK: Tensor, group: int, layout: WordLayout) -> Int4Words:
    """Encode a matrix, in plain torch.

    Args:
        weight_NK: bfloat16, float16 or float32, of any number of rows.
        group: columns that share scale and offset; divides K.
        layout: of the words.
    """
    num_rows, num_columns = weight_NK.shape
    dtype = weight_NK.dtype
    words = _room_for(weight_NK, group)
    rows_at_once = max(1, _CHUNK_NUMBERS // num_columns // BLOCK_ROWS) * BLOCK_ROWS
    for lo in range(0, num_rows, rows_at_once):
        rows = slice(lo, min(lo + rows_at_once, num_rows))
        step_NGk = weight_NK[rows].to(torch.float32, copy=True).unflatten(1, (-1, group))
        low_NG, high_NG = step_NGk.aminmax(dim=2)
        low_NG.clamp_(max=0)
        extent_NG = high_NG.clamp_(min=0).div(_LEVELS) - low_NG.div(_LEVELS)
        scale_NG = extent_NG.clamp_(min=least_step(dtype)).to(dtype).float()
        zero_NG = (-low_NG / scale_NG).round_().clamp_(0, _LEVELS)
        offset_NG = (_MIDDLE - zero_NG) * scale_NG
        step_NGk.div_(scale_NG[..., None]).round_().add_(zero_NG[..., None]).clamp_(0, _LEVELS)
        code_NK = step_NGk.flatten(1).to(torch.uint8).bitwise_and_(15)
        words.scale_GN2[:, rows] = torch.stack((scale_NG.t(), offset_NG.t()), 2).to(dtype)
        missing = -len(code_NK) % BLOCK_ROWS
        code_NK = functional.pad(code_NK, (0, 0, 0, missing)) if missing else code_NK
        words.word_NK[lo : lo + len(code_NK)] = pack_int4(code_NK, layout)
    return words


def encode_int4_compiled(weight_NK: Tensor, group: int, layout: WordLayout) -> Int4Words:
    """Do what the reference does, with numba, panel by panel."""
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


encode_int4 = faster(encode_int4_compiled, encode_int4_reference)


def least_step(dtype: torch.dtype) -> float:
    """Return the step between levels where all numbers are equal; it is not zero in this type."""
    return 2.0**-24 if dtype == torch.float16 else 1e-12


def _room_for(weight_NK: Tensor, group: int) -> Int4Words:
    num_rows, num_columns = weight_NK.shape
    num_padded = -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS
    word_NK = torch.empty(num_padded, num_columns // 2, dtype=torch.uint8, device=weight_NK.device)
    return Int4Words(word_NK, weight_NK.new_zeros(num_columns // group, num_padded, 2))


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
                    below = F32(_number_of(min(low, I32(-1))) / F32(15))
                    extent = F32(F32(_number_of(max(high, I32(0))) / F32(15)) - below)
                    index = (begin + within) // group
                    # what is no number stays none
                    step_bits = rounded(least if extent < least else extent)
                    step = widened(step_bits)
                    # Added to 1.5 x 2^23 a number is rounded, ties to even, into the lowest bits.
                    level = min(F32(F32(0) - F32(_number_of(min(low, I32(-1))) / step)), F32(15))
                    zero = F32(F32(level + F32(12582912)) - F32(12582912))
                    scale[index, at, U64(0)] = step_bits
                    scale[index, at, U64(1)] = rounded(F32(F32(F32(8) - zero) * step))
                    # Within these bounds, which are whole, the level is 0 to 15 once it is rounded.
                    least_far = F32(F32(0) - zero)
                    most_far = F32(F32(15) - zero)
                    whole = U8(I32(zero))
                    for i in range(group):
                        far = min(max(F32(value[i] / step), least_far), most_far)
                        nibble = U8(U8(bits_of(F32(far + F32(12582912)))) + whole)
                        code[line, within + i] |= U8(U8(nibble & U8(15)) * place)
            for first in range(U64(0), width, U64(_TILE_COLUMNS)):
                for row in range(half):
                    for column in range(U64(_TILE_COLUMNS)):
                        word[block, begin + first + column, row] = code[row, first + column]


@compiled
def _number_of(key: Any) -> Any:
    return F32(U32(I32(key ^ I32(I32(key >> I32(31)) & I32(0x7FFFFFFF)))).view(F32))
