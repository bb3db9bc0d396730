"""Expand bfloat16 weights from their residual beside a copy of 4 bits, see `residual_layout`.

The copy's words and scales are those that a draft multiplies with (`int4_blocks`). All products are
exact in float32. Invariant: whatever words, symbols and places say, nothing outside of `stored` is
read, and nothing outside of `out` is written.

Shape letters beside those of `int4_blocks`: T tiles.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import ByType, compiled, faster, share_rows
from offload.kernels.jit import jit, tl
from offload.kernels.residual_layout import (
    EMPTY_STEP,
    FURTHER,
    NO_HIGH_BYTE,
    NO_MAGNITUDE,
    STEP,
    TILE_COLUMNS,
    TILE_ROWS,
)
from offload.kernels.rounding import F32, I32, U32, U64, bits_of, numbers, of_bfloat16, rounded

U8 = np.uint8
U16 = np.uint16
_SUBTRACTED, _KEPT, _SIGN = range(3)
_ESCAPES = 1024  # that a program handles at once


def _meanings() -> np.ndarray:
    """Return what is subtracted, what is kept then, and the sign: of 4 symbols, then of 16."""
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
    """Do what the reference does, with numba, on as many threads as torch has."""
    fill = _fill_blocks.to(out_NK.dtype)
    words = word_BKH.contiguous().numpy().view(np.uint64)
    scale = numbers(scale_GN2.contiguous())
    given = (stored_B.numpy(), words, scale, start_3T.contiguous().numpy(), MEANINGS)
    out = numbers(out_NK)
    block_rows = 2 * word_BKH.shape[2]
    blocks_at_once = TILE_ROWS // block_rows

    def work(lo: int, hi: int) -> None:
        fill(*given, (lo // TILE_ROWS, hi // TILE_ROWS, blocks_at_once), out)

    share_rows(work, -(-len(out_NK) // TILE_ROWS) * TILE_ROWS)


expand_residuals = faster(expand_residuals_compiled, expand_residuals_reference)


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
    """Return so many numbers of `num_bits` bits, as int64; zeros where the bytes end."""
    shift = torch.arange(0, 8, num_bits, device=packed_B.device)
    needed_B = packed_B[: -(-count * num_bits // 8)].long()
    symbols = ((needed_B[:, None] >> shift) & ((1 << num_bits) - 1)).flatten()[:count]
    return torch.nn.functional.pad(symbols, (0, count - len(symbols)))


@compiled
def _same(bits):  # type: ignore[no-untyped-def]  # numba infers types
    return bits


@compiled
def _rounded(bits):  # type: ignore[no-untyped-def]
    return rounded(of_bfloat16(bits))


_number = ByType({torch.bfloat16: _same, torch.float16: _rounded, torch.float32: _rounded})


@compiled
def _transposed(word: Any, block: Any, first: Any, width: Any, code: Any, line: Any) -> None:
    """Write the codes of some columns of a block row by row, eight bytes of eight columns at once.

    `word` has eight rows' bytes in each number, `code` eight columns'.
    """
    low8 = U64(0x00FF00FF00FF00FF)
    low16 = U64(0x0000FFFF0000FFFF)
    low32 = U64(0x00000000FFFFFFFF)
    nibbles = U64(0x0F0F0F0F0F0F0F0F)
    num_eights = U64(word.shape[2])
    swap = np.empty(8, np.uint64)
    for within in range(U64(0), width, U64(8)):
        for eight in range(num_eights):
            for i in range(U64(8)):
                swap[i] = word[block, first + within + i, eight]
            for i in range(U64(4)):
                first_lines = swap[i]
                last_lines = swap[i + U64(4)]
                swap[i] = (first_lines & low32) | (last_lines << U64(32))
                swap[i + U64(4)] = (first_lines >> U64(32)) | (last_lines & ~low32)
            for half in range(U64(0), U64(8), U64(4)):
                for i in range(U64(2)):
                    first_lines = swap[half + i]
                    last_lines = swap[half + i + U64(2)]
                    swap[half + i] = (first_lines & low16) | ((last_lines & low16) << U64(16))
                    swap[half + i + U64(2)] = ((first_lines >> U64(16)) & low16) | (
                        last_lines & ~low16
                    )
            for i in range(U64(0), U64(8), U64(2)):
                first_lines = swap[i]
                last_lines = swap[i + U64(1)]
                swap[i] = (first_lines & low8) | ((last_lines & low8) << U64(8))
                swap[i + U64(1)] = ((first_lines >> U64(8)) & low8) | (last_lines & ~low8)
            row = line + eight * U64(8)
            for i in range(U64(8)):
                code[row + i, within >> U64(3)] = swap[i] & nibbles
                high = (swap[i] >> U64(4)) & nibbles
                code[row + num_eights * U64(8) + i, within >> U64(3)] = high


@compiled
def _fill_blocks(
    stored: Any, word: Any, scale: Any, start: Any, meaning: Any, extent: Any, out: Any
) -> None:
    """Expand rows of tiles [lo, hi); `extent` is (lo, hi, blocks of the copy in a tile)."""
    num_rows = U64(out.shape[0])
    num_columns = U64(out.shape[1])
    group = num_columns // U64(scale.shape[0])
    num_blocks = U64(extent[2])
    last = U64(stored.size - 1)
    num_ends = start.shape[1] - 1
    near_lo = num_rows * num_columns
    far_lo = near_lo + U64(start[0, num_ends])
    list_lo = far_lo + U64(start[1, num_ends])
    num_escapes = U64(start[2, num_ends])
    eights = np.zeros((64, 32), np.uint64)
    code = eights.view(np.uint8)
    bits = np.empty(256, np.uint16)
    place_of = _places()
    tiles_wide = (num_columns + U64(255)) // U64(256)
    for across in range(U64(extent[0]), U64(extent[1])):
        top = across * U64(64)
        num_here = min(U64(64), num_rows - top)
        for panel in range(tiles_wide):
            first = panel * U64(256)
            width = min(U64(256), num_columns - first)
            for part in range(num_blocks):
                block = across * num_blocks + part
                _transposed(word, block, first, width, eights, part * (U64(64) // num_blocks))
            tile = across * tiles_wide + panel
            near_at = U64(4) * (near_lo + U64(start[0, tile]))
            far_at = U64(2) * (far_lo + U64(start[1, tile]))
            for row in range(num_here):
                line = (top + row) * num_columns + first
                for within in range(U64(0), width, group):
                    index = (first + within) // group
                    step = of_bfloat16(scale[index, top + row, 0])
                    offset = of_bfloat16(scale[index, top + row, 1])
                    # Added to 1.5 x 2^23 it is rounded, ties to even.
                    ratio = F32(F32(F32(offset / step) + F32(12582912)) - F32(12582912))
                    zero = I32(F32(8) - ratio)
                    for i in range(group):
                        level = I32(I32(code[row, within + i]) - zero)
                        half = F32(0.5) if level > I32(0) else F32(-0.5)
                        bound = U32(bits_of(F32(F32(F32(level) - half) * step)) >> U32(16))
                        low = U32(stored[line + within + i])
                        bits[within + i] = U16(bound + U32(U32(low - bound) & U32(0xFF)))
                    if step <= F32(EMPTY_STEP):
                        for i in range(group):
                            if I32(code[row, within + i]) == zero:
                                bits[within + i] = stored[line + within + i]
                        continue
                    largest = U32(bits_of(F32(F32(0.5) * step)) >> U32(16))
                    lanes = U64(U8(zero)) * U64(0x0101010101010101)
                    for eight in range(U64(0), group, U64(8)):
                        differs = eights[row, (within + eight) >> U64(3)] ^ lanes
                        # codes are below 16, so no byte carries
                        marked = ~(differs + U64(0x7F7F7F7F7F7F7F7F)) & U64(0x8080808080808080)
                        while marked:
                            lowest = marked & (~marked + U64(1))
                            lane = place_of[(lowest * U64(0x0218A392CD3D5DBF)) >> U64(58)]
                            marked ^= lowest
                            at = within + eight + U64(lane)
                            byte = stored[min(near_at >> U64(2), last)]
                            symbol = U64(byte >> U8(U8(near_at & U64(3)) << U8(1))) & U64(3)
                            near_at += U64(1)
                            byte = stored[min(far_at >> U64(1), last)]
                            other = U64(byte >> U8(U8(far_at & U64(1)) << U8(2))) & U64(15)
                            is_far = symbol == U64(2)
                            far_at += U64(is_far)
                            symbol = U64(4) + other if is_far else symbol
                            low = U32(stored[line + at])
                            number = U32(largest - U32(U32(largest - low) & U32(0xFF)))
                            number = U32(number - meaning[0, symbol]) & meaning[1, symbol]
                            bits[at] = U16(U32(number) | meaning[2, symbol])
                for i in range(width):
                    out[top + row, first + i] = _number(bits[i])
            for escape in range(U64(start[2, tile]), U64(start[2, tile + U64(1)])):
                column = U64(stored[list_lo + escape])
                line_of = U64(stored[list_lo + num_escapes + escape])
                if line_of < num_here and column < width:
                    low = U32(stored[(top + line_of) * num_columns + first + column])
                    high = U32(stored[list_lo + U64(2) * num_escapes + escape])
                    word_of = U16(U32(high << U32(8)) | low)
                    out[top + line_of, first + column] = _number(word_of)


@compiled
def _places() -> Any:
    """Return which byte a number's only bit lies in, by six bits of a product (de Bruijn's)."""
    place = np.zeros(64, np.uint8)
    for lane in range(8):
        bit = U64(0x80) << U64(8 * lane)
        place[(bit * U64(0x0218A392CD3D5DBF)) >> U64(58)] = U8(lane)
    return place


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
    """Run one program per tile, row after row."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_wide = tl.cdiv(num_columns, COLUMNS)
    top = tile // tiles_wide * ROWS
    column = tile % tiles_wide * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    num_weights = num_rows.to(tl.int64) * num_columns
    far_lo = num_weights + tl.load(start + num_tiles)
    near_at = 4 * (num_weights + tl.load(start + tile))
    far_at = 2 * (far_lo + tl.load(start + num_tiles + 1 + tile))
    for row in range(top, tl.minimum(top + ROWS, num_rows)):
        block = row // (2 * HALF)
        line = row % (2 * HALF)
        place = (block * num_columns + column) * HALF + line % HALF
        pair = tl.load(word + place, mask=is_column, other=0).to(tl.int32)
        code = (pair >> (line // HALF * 4).to(tl.int32)) & 15
        of_group = (column // group * num_padded + row) * 2
        step = tl.load(scale + of_group, mask=is_column, other=1).to(tl.float32)
        offset = tl.load(scale + of_group + 1, mask=is_column, other=0).to(tl.float32)
        zero = 8 - ((offset / step + 12582912.0) - 12582912.0).to(tl.int32)
        level = code - zero
        half = tl.where(level > 0, 0.5, -0.5)
        bound = ((level.to(tl.float32) - half) * step).to(tl.int32, bitcast=True) >> 16
        low = tl.load(stored + row * num_columns + column, mask=is_column, other=0).to(tl.int32)
        bits = bound + ((low - bound) & 0xFF)
        is_empty = step <= EMPTY
        bits = tl.where((level == 0) & is_empty, low, bits)
        is_near = (level == 0) & ~is_empty & is_column
        near = near_at + tl.cumsum(is_near.to(tl.int32), 0) - 1
        near_byte = tl.load(stored + tl.minimum(near >> 2, last), mask=is_near, other=0)
        symbol = (near_byte.to(tl.int32) >> ((near & 3) * 2).to(tl.int32)) & 3
        is_far = is_near & (symbol == 2)
        far = far_at + tl.cumsum(is_far.to(tl.int32), 0) - 1
        far_byte = tl.load(stored + tl.minimum(far >> 1, last), mask=is_far, other=0)
        other = (far_byte.to(tl.int32) >> ((far & 1) * 4).to(tl.int32)) & 15
        near_at += tl.sum(is_near.to(tl.int32), 0)
        far_at += tl.sum(is_far.to(tl.int32), 0)
        largest = (0.5 * step).to(tl.int32, bitcast=True) >> 16
        number = largest - ((largest - low) & 0xFF)
        number -= tl.where(is_far, 256 * (1 + (other & 7)), 0)
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
