"""Expand bfloat16 weights from their residual beside a copy of 4 bits, see `residual_layout`.

The copy's words and scales are those that a draft multiplies with (`int4_blocks`). All products are
exact in float32. Invariant: whatever words, symbols and places say, nothing outside of `stored` is
read, and nothing outside of `out` is written.

Shape letters beside those of `int4_blocks`: T tiles.
"""

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import faster, share_rows
from offload.kernels.jit import jit, tl
from offload.kernels.machine_code import call_of, fused_lanes
from offload.kernels.residual_code import EXPAND, code_for
from offload.kernels.residual_layout import (
    EMPTY_STEP,
    FURTHER,
    NO_HIGH_BYTE,
    NO_MAGNITUDE,
    STEP,
    TILE_COLUMNS,
    TILE_ROWS,
)

_SUBTRACTED, _KEPT, _SIGN = range(3)
_ESCAPES = 1024  # that a program handles at once


def _meanings() -> np.ndarray:
    """Return the subtrahend, the rest and the sign: of 4 symbols, then of 16."""
    table = np.zeros((3, 20), np.uint32)
    table[_KEPT] = 0x7FFF
    table[_SIGN, 1] = 0x8000
    table[_KEPT, NO_HIGH_BYTE] = 0xFF
    for symbol in range(16):
        table[_SUBTRACTED, 4 + symbol] = STEP * (1 + symbol % 8)
        table[_SIGN, 4 + symbol] = symbol // 8 * 0x8000
        if symbol % 8 == NO_MAGNITUDE:
            table[_KEPT, 4 + symbol] = 0xFF
    return table


MEANINGS = _meanings()


class Tile(NamedTuple):
    """The weights of a tile, as far as low bytes and the copy tell."""

    rows: slice
    columns: slice
    bits_RC: Tensor  # int32, the first number from the level's lower bound on
    is_near_RC: Tensor  # at level zero of a group that is not empty
    largest_RC: Tensor  # int32, the largest number with its low byte that level zero holds


def tiles_of(low_NK: Tensor, word_BKH: Tensor, scale_GN2: Tensor) -> Iterator[Tile]:
    """Yield all tiles of a matrix whose low bytes these are, in order, in plain torch."""
    num_rows, num_columns = low_NK.shape
    group = num_columns // len(scale_GN2)
    code_NK = torch.cat((word_BKH & 15, word_BKH >> 4), 2).transpose(1, 2).flatten(0, 1)
    for first_row in range(0, num_rows, TILE_ROWS):
        rows = slice(first_row, min(first_row + TILE_ROWS, num_rows))
        scale_RG, offset_RG = scale_GN2[:, rows].float().permute(2, 1, 0)
        zero_RG = 8 - (offset_RG / scale_RG).round()
        scale_RK, zero_RK = (of.repeat_interleave(group, 1) for of in (scale_RG, zero_RG))
        for first in range(0, num_columns, TILE_COLUMNS):
            columns = slice(first, min(first + TILE_COLUMNS, num_columns))
            low_RC = low_NK[rows, columns].int()
            scale_RC = scale_RK[:, columns].contiguous()
            level_RC = code_NK[rows, columns].float() - zero_RK[:, columns]
            half_RC = torch.where(level_RC > 0, 0.5, -0.5)
            bound_RC = ((level_RC - half_RC) * scale_RC).view(torch.int32) >> 16 & 0xFFFF
            top_RC = (0.5 * scale_RC).view(torch.int32) >> 16
            bits_RC = bound_RC + (low_RC - bound_RC & 0xFF) & 0xFFFF
            is_zero_RC = level_RC == 0
            is_empty_RC = scale_RC <= EMPTY_STEP
            yield Tile(
                rows,
                columns,
                torch.where(is_zero_RC & is_empty_RC, low_RC, bits_RC),
                is_zero_RC & ~is_empty_RC,
                top_RC - (top_RC - low_RC & 0xFF),
            )


def expand_residuals_reference(
    stored_B: Tensor, word_BKH: Tensor, scale_GN2: Tensor, start_3T: Tensor, out_NK: Tensor
) -> None:
    """Fill `out` with the original numbers, in plain torch.

    An `out` of another type than bfloat16 gets each number rounded once.

    Args:
        stored_B: uint8, low bytes, symbols, places, high bytes, padding.
        word_BKH: uint8, codes of the copy, in any layout of `int4_blocks`.
        scale_GN2: bfloat16, its scales and offsets.
        start_3T: int64, where the symbols of 2 bits of each tile begin, in bytes, those of 4 bits,
            and its escapes; then their ends.
    """
    num_rows, num_columns = out_NK.shape
    low_NK, near_B, far_B, lists = _parts(stored_B, start_3T, num_rows * num_columns)
    low_NK = low_NK.view(num_rows, num_columns)
    subtracted, kept, sign = torch.from_numpy(MEANINGS.astype(np.int32)).to(stored_B.device)
    starts = start_3T.tolist()
    for index, tile in enumerate(tiles_of(low_NK, word_BKH, scale_GN2)):
        near_lo, far_lo, lo = (start_T[index] for start_T in starts)
        bits_RC = tile.bits_RC
        largest = tile.largest_RC[tile.is_near_RC]
        symbol = _symbols(near_B[near_lo:], 2, len(largest))
        is_far = symbol == FURTHER
        symbol[is_far] = 4 + _symbols(far_B[far_lo:], 4, int(is_far.sum()))
        bits_RC[tile.is_near_RC] = largest - subtracted[symbol] & kept[symbol] | sign[symbol]
        low, high, value = lists[:, lo : starts[2][index + 1]].int()
        is_inside = (high < bits_RC.shape[0]) & (low < bits_RC.shape[1])
        place = (high[is_inside].long(), low[is_inside].long())
        bits_RC[place] = bits_RC[place] & 0xFF | value[is_inside] << 8
        out_NK[tile.rows, tile.columns] = bits_RC.to(torch.int16).view(torch.bfloat16)


def expand_residuals_compiled(
    stored_B: Tensor, word_BKH: Tensor, scale_GN2: Tensor, start_3T: Tensor, out_NK: Tensor
) -> None:
    """Do what the reference does, in machine code, on as many threads as torch has."""
    if not fused_lanes():
        expand_residuals_reference(stored_B, word_BKH, scale_GN2, start_3T, out_NK)
        return
    num_rows, num_columns = out_NK.shape
    held = (word_BKH.contiguous(), scale_GN2.contiguous(), stored_B, start_3T.contiguous(), out_NK)
    group = num_columns // len(scale_GN2)
    sizes = (num_rows, num_columns, scale_GN2.shape[1])
    call = call_of(0, (*held, *sizes, len(stored_B)))
    expand = code_for(EXPAND, out_NK.dtype, word_BKH.shape[2], group)

    def work(lo: int, hi: int) -> None:
        if lo // TILE_ROWS < hi // TILE_ROWS:
            expand(ctypes.addressof(call), lo // TILE_ROWS, hi // TILE_ROWS)

    share_rows(work, -(-num_rows // TILE_ROWS) * TILE_ROWS)


expand_residuals = faster(expand_residuals_compiled, expand_residuals_reference, fused_lanes)


def expand_residuals_kernel(
    stored_B: Tensor, word_BKH: Tensor, scale_GN2: Tensor, start_3T: Tensor, out_NK: Tensor
) -> None:
    """Do what the reference does, in Triton: all tiles, then all escapes."""
    num_rows, num_columns = out_NK.shape
    num_tiles = start_3T.shape[1] - 1
    out = out_NK.view(torch.int16) if out_NK.dtype == torch.bfloat16 else out_NK
    sizes = (num_rows, num_columns, num_columns // len(scale_GN2), scale_GN2.shape[1], num_tiles)
    constants = {"ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS}
    _expand_tiles[(num_tiles,)](
        stored_B,
        word_BKH,
        scale_GN2,
        start_3T,
        out,
        len(stored_B) - 1,
        *sizes,
        HALF=word_BKH.shape[2],
        EMPTY=EMPTY_STEP,
        **constants,
    )
    _put_escapes[(num_tiles,)](
        stored_B, start_3T, out, num_rows, num_columns, num_tiles, AT_ONCE=_ESCAPES, **constants
    )


def _parts(stored_B: Tensor, start_3T: Tensor, num_weights: int) -> tuple[Tensor, ...]:
    """Return low bytes, both kinds of symbols, and the three lists of escapes."""
    near_bytes, far_bytes, num_escapes = start_3T[:, -1].tolist()
    sizes = (num_weights, near_bytes, far_bytes, 3 * num_escapes)
    *others, lists = stored_B[: sum(sizes)].split(sizes)
    return *others, lists.view(3, -1)


def _symbols(packed_B: Tensor, num_bits: int, count: int) -> Tensor:
    """Return this many numbers of `num_bits` bits, as int64; zeros where the bytes end."""
    shift = torch.arange(0, 8, num_bits, device=packed_B.device)
    needed_B = packed_B[: -(-count * num_bits // 8)].long()
    symbols = ((needed_B[:, None] >> shift) & ((1 << num_bits) - 1)).flatten()[:count]
    return torch.nn.functional.pad(symbols, (0, count - len(symbols)))


@jit(do_not_specialize=["last", "num_rows", "num_columns", "group", "num_padded", "num_tiles"])
def _expand_tiles(
    stored: tl.tensor,
    word: tl.tensor,
    scale: tl.tensor,
    start: tl.tensor,
    out: tl.tensor,
    last: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    group: tl.tensor,
    num_padded: tl.tensor,
    num_tiles: tl.tensor,
    HALF: tl.constexpr,
    EMPTY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Run one program per tile, row after row; `residual_layout` explains levels and symbols."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_wide = tl.cdiv(num_columns, COLUMNS)
    top = tile // tiles_wide * ROWS
    column = tile % tiles_wide * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    num_weights = num_rows.to(tl.int64) * num_columns
    # next symbols of 2 bits and of 4 bits, counted in symbols from the beginning of `stored`
    far_lo = num_weights + tl.load(start + num_tiles)
    near_at = 4 * (num_weights + tl.load(start + tile))
    far_at = 2 * (far_lo + tl.load(start + num_tiles + 1 + tile))
    for row in range(top, tl.minimum(top + ROWS, num_rows)):
        # the copy: a weight is (code - 8) x step + offset
        block = row // (2 * HALF)
        line = row % (2 * HALF)
        place = (block * num_columns + column) * HALF + line % HALF
        pair = tl.load(word + place, mask=is_column, other=0).to(tl.int32)
        code = (pair >> (line // HALF * 4).to(tl.int32)) & 15
        of_group = (column // group * num_padded + row) * 2
        step = tl.load(scale + of_group, mask=is_column, other=1).to(tl.float32)
        offset = tl.load(scale + of_group + 1, mask=is_column, other=0).to(tl.float32)
        # adding 1.5 x 2^23 rounds to a whole number, ties to even
        zero = 8 - ((offset / step + 12582912.0) - 12582912.0).to(tl.int32)
        level = code - zero
        # the first number with this low byte from the level's lower bound on
        half = tl.where(level > 0, 0.5, -0.5)
        bound = ((level.to(tl.float32) - half) * step).to(tl.int32, bitcast=True) >> 16
        low = tl.load(stored + row * num_columns + column, mask=is_column, other=0).to(tl.int32)
        bits = bound + ((low - bound) & 0xFF)
        # at level zero a symbol of 2 bits follows, unless the group is empty: its high bytes are 0
        is_empty = step <= EMPTY
        bits = tl.where((level == 0) & is_empty, low, bits)
        is_near = (level == 0) & ~is_empty & is_column
        near = near_at + tl.cumsum(is_near.to(tl.int32), 0) - 1
        near_byte = tl.load(stored + tl.minimum(near >> 2, last), mask=is_near, other=0)
        symbol = (near_byte.to(tl.int32) >> ((near & 3) * 2).to(tl.int32)) & 3
        # symbol 2: a symbol of 4 bits follows
        is_far = is_near & (symbol == 2)
        far = far_at + tl.cumsum(is_far.to(tl.int32), 0) - 1
        far_byte = tl.load(stored + tl.minimum(far >> 1, last), mask=is_far, other=0)
        other = (far_byte.to(tl.int32) >> ((far & 1) * 4).to(tl.int32)) & 15
        near_at += tl.sum(is_near.to(tl.int32), 0)
        far_at += tl.sum(is_far.to(tl.int32), 0)
        # the largest number with this low byte in level zero, or one that lies 256 times 1 to 7 below
        largest = (0.5 * step).to(tl.int32, bitcast=True) >> 16
        number = largest - ((largest - low) & 0xFF)
        number -= tl.where(is_far, 256 * (1 + (other & 7)), 0)
        # a high byte of 0, except for its sign
        has_none = (symbol == 3) | (is_far & ((other & 7) == 7))
        number &= tl.where(has_none, 0xFF, 0x7FFF)
        is_negative = (symbol == 1) | (is_far & (other >= 8))
        number |= tl.where(is_negative, 0x8000, 0)
        bits = tl.where(is_near, number, bits)
        _store_number(out + row * num_columns + column, bits, is_column)


@jit(do_not_specialize=["num_rows", "num_columns", "num_tiles"])
def _put_escapes(
    stored: tl.tensor,
    start: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_tiles: tl.tensor,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Run one program per tile."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_wide = tl.cdiv(num_columns, COLUMNS)
    top = tile // tiles_wide * ROWS
    first = tile % tiles_wide * COLUMNS
    starts = start + 2 * (num_tiles + 1)
    num_escapes = tl.load(starts + num_tiles)
    lists = num_rows.to(tl.int64) * num_columns + tl.load(start + num_tiles)
    lists += tl.load(start + 2 * num_tiles + 1)
    hi = tl.load(starts + tile + 1)
    for begin in range(tl.load(starts + tile), hi, AT_ONCE):
        at = begin + tl.arange(0, AT_ONCE)
        is_here = at < hi
        column = first + tl.load(stored + lists + at, mask=is_here, other=0).to(tl.int64)
        within = tl.load(stored + lists + num_escapes + at, mask=is_here, other=0).to(tl.int64)
        high = tl.load(stored + lists + 2 * num_escapes + at, mask=is_here, other=0).to(tl.int32)
        row = top + within
        is_own = is_here & (within < ROWS) & (row < num_rows) & (column < num_columns)
        place = row * num_columns + column
        low = tl.load(stored + place, mask=is_own, other=0).to(tl.int32)
        _store_number(out + place, high << 8 | low, is_own)


@jit
def _store_number(out: tl.tensor, word: tl.tensor, mask: tl.tensor) -> None:
    """Store the bits as they are, or rounded to another type."""
    if out.dtype.element_ty == tl.int16:
        tl.store(out, word.to(tl.int16), mask=mask)
    else:
        number = (word << 16).to(tl.float32, bitcast=True)
        tl.store(out, number.to(out.dtype.element_ty), mask=mask)
