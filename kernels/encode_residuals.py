"""Encode bfloat16 weights beside a copy of 4 bits as `residual_layout` describes.

Invariant: for any bits, and any words and scales of a copy, expanding returns the same bits.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, faster
from offload.kernels.expand_residuals import _transposed, tiles_of
from offload.kernels.residual_layout import (
    EMPTY_STEP,
    FURTHER,
    NO_HIGH_BYTE,
    NO_MAGNITUDE,
    STEP,
    TILE_COLUMNS,
    TILE_ROWS,
    num_tiles,
)
from offload.kernels.rounding import F32, I32, U32, U64, bits_of, numbers, of_bfloat16

U8 = np.uint8


class ResidualWords(NamedTuple):
    """The residual of a matrix, or of some rows of tiles."""

    low_NK: Tensor
    near_B: Tensor  # symbols of 2 bits
    far_B: Tensor  # of 4 bits
    escape_3E: Tensor
    count_3T: Tensor  # int64, bytes of both symbols and number of escapes of each tile


def encode_residuals_reference(
    weight_NK: Tensor, word_BKH: Tensor, scale_GN2: Tensor
) -> ResidualWords:
    """Return the residual of bfloat16 weights, in plain torch.

    Args:
        word_BKH: codes of a copy.
        scale_GN2: its scales and offsets.
    """
    bits_NK = weight_NK.view(torch.int16).int() & 0xFFFF
    low_NK = (bits_NK & 0xFF).to(torch.uint8)
    near_T = list[Tensor]()
    far_T = list[Tensor]()
    escapes_T = list[Tensor]()
    counts_T = list[tuple[int, int, int]]()
    for tile in tiles_of(low_NK, word_BKH, scale_GN2):
        bits_RC = bits_NK[tile.rows, tile.columns]
        is_lost_RC = bits_RC != tile.bits_RC
        bits = bits_RC[tile.is_near_RC]
        steps = (tile.largest_RC[tile.is_near_RC] - (bits & 0x7FFF)) // STEP
        sign = bits >> 15
        has_no_magnitude = (bits & 0x7F00) == 0
        is_further = (steps > 0) & (steps <= NO_MAGNITUDE) | has_no_magnitude
        other = torch.where(has_no_magnitude, NO_MAGNITUDE, steps - 1) | sign << 3
        symbol = torch.where(is_further, FURTHER, sign)
        symbol[(bits & 0xFF00) == 0] = NO_HIGH_BYTE
        symbol[steps == 0] = sign[steps == 0]
        is_lost_RC[tile.is_near_RC] = (steps != 0) & ~is_further
        near_T.append(_packed(symbol, 2))
        far_T.append(_packed(other[symbol == FURTHER], 4))
        row, column = is_lost_RC.nonzero(as_tuple=True)
        escapes_T.append(torch.stack((column, row, bits_RC[row, column] >> 8)).to(torch.uint8))
        counts_T.append((len(near_T[-1]), len(far_T[-1]), len(row)))
    return ResidualWords(
        low_NK,
        torch.cat(near_T),
        torch.cat(far_T),
        torch.cat(escapes_T, 1),
        torch.tensor(counts_T, dtype=torch.int64).t(),
    )


def encode_residuals_compiled(
    weight_NK: Tensor, word_BKH: Tensor, scale_GN2: Tensor
) -> ResidualWords:
    """Do what the reference does, with numba, on this thread."""
    num_weights = weight_NK.numel()
    # a symbol each at most, and what tiles are padded with
    most_bytes = num_weights + num_tiles(*weight_NK.shape)
    low_NK = np.empty(tuple(weight_NK.shape), np.uint8)
    near_B = np.zeros(most_bytes // 4 + num_tiles(*weight_NK.shape), np.uint8)
    far_B = np.zeros(most_bytes // 2 + num_tiles(*weight_NK.shape), np.uint8)
    escape_3E = np.empty((3, num_weights), np.uint8)
    count_3T = np.zeros((3, num_tiles(*weight_NK.shape)), np.int64)
    blocks_at_once = TILE_ROWS // (2 * word_BKH.shape[2])
    words = word_BKH.contiguous().numpy().view(np.uint64)
    scale = numbers(scale_GN2.contiguous())
    weight = numbers(weight_NK.contiguous())
    _encode_tiles(weight, words, scale, blocks_at_once, low_NK, near_B, far_B, escape_3E, count_3T)
    near_bytes, far_bytes, num_escapes = count_3T.sum(1).tolist()
    parts = (low_NK, near_B[:near_bytes], far_B[:far_bytes], escape_3E[:, :num_escapes].copy())
    return ResidualWords(*map(torch.from_numpy, (*parts, count_3T)))


encode_residuals = faster(encode_residuals_compiled, encode_residuals_reference)


def _packed(symbol: Tensor, num_bits: int) -> Tensor:
    """Return symbols in whole bytes, from the lowest bit on."""
    per_byte = 8 // num_bits
    padded = torch.nn.functional.pad(symbol, (0, -len(symbol) % per_byte)).view(-1, per_byte)
    shift = torch.arange(0, 8, num_bits)
    return (padded << shift).sum(1).to(torch.uint8)


@compiled
def _encode_tiles(
    weight: Any,
    word: Any,
    scale: Any,
    blocks_at_once: Any,
    low: Any,
    near: Any,
    far: Any,
    escape: Any,
    count: Any,
) -> None:
    """Encode tile after tile; symbols of a tile begin with a byte."""
    num_rows = U64(weight.shape[0])
    num_columns = U64(weight.shape[1])
    group = num_columns // U64(scale.shape[0])
    num_blocks = U64(blocks_at_once)
    eights = np.zeros((TILE_ROWS, TILE_COLUMNS // 8), np.uint64)
    code = eights.view(np.uint8)
    number = np.empty(TILE_COLUMNS, np.uint16)
    tiles_wide = (num_columns + U64(TILE_COLUMNS - 1)) // U64(TILE_COLUMNS)
    near_lo = U64(0)
    far_lo = U64(0)
    num_escapes = U64(0)
    for across in range((num_rows + U64(TILE_ROWS - 1)) // U64(TILE_ROWS)):
        top = across * U64(TILE_ROWS)
        num_here = min(U64(TILE_ROWS), num_rows - top)
        for panel in range(tiles_wide):
            first = panel * U64(TILE_COLUMNS)
            width = min(U64(TILE_COLUMNS), num_columns - first)
            for part in range(num_blocks):
                block = across * num_blocks + part
                line = part * (U64(TILE_ROWS) // num_blocks)
                _transposed(word, block, first, width, eights, line)
            num_near = U64(0)
            num_far = U64(0)
            first_escape = num_escapes
            for row in range(num_here):
                for within in range(U64(0), width, group):
                    index = (first + within) // group
                    step = of_bfloat16(scale[index, top + row, 0])
                    offset = of_bfloat16(scale[index, top + row, 1])
                    ratio = F32(F32(F32(offset / step) + F32(12582912)) - F32(12582912))
                    zero = I32(F32(8) - ratio)
                    num_differ = U64(0)
                    for i in range(group):
                        bits = U32(weight[top + row, first + within + i])
                        byte = U32(bits & U32(0xFF))
                        low[top + row, first + within + i] = U8(byte)
                        level = I32(I32(code[row, within + i]) - zero)
                        half = F32(0.5) if level > I32(0) else F32(-0.5)
                        bound = U32(bits_of(F32(F32(F32(level) - half) * step)) >> U32(16))
                        got = U32(U32(bound + U32(U32(byte - bound) & U32(0xFF))) & U32(0xFFFF))
                        # so that a weight at level zero of a group that is not empty differs
                        other = byte if step <= F32(EMPTY_STEP) else U32(bits ^ U32(0x8000))
                        number[within + i] = U32(got if level != I32(0) else other)
                        num_differ += U64(number[within + i] != bits)
                    if not num_differ:
                        continue
                    largest = U32(bits_of(F32(F32(0.5) * step)) >> U32(16))
                    for i in range(group):
                        bits = U32(weight[top + row, first + within + i])
                        if number[within + i] == bits:
                            continue
                        is_empty = step <= F32(EMPTY_STEP)
                        is_lost = is_empty or I32(code[row, within + i]) != zero
                        if not is_lost:
                            byte = U32(bits & U32(0xFF))
                            last = U32(largest - U32(U32(largest - byte) & U32(0xFF)))
                            steps = I32(I32(last) - I32(bits & U32(0x7FFF))) >> I32(8)
                            sign = bits >> U32(15)
                            symbol = sign
                            other = U32(0)
                            if steps != 0:
                                if (bits >> U32(8)) == 0:
                                    symbol = U32(NO_HIGH_BYTE)
                                elif (bits & U32(0x7F00)) == 0:
                                    symbol = U32(FURTHER)
                                    other = U32(NO_MAGNITUDE)
                                elif 0 < steps <= NO_MAGNITUDE:
                                    symbol = U32(FURTHER)
                                    other = U32(steps - 1)
                                else:
                                    is_lost = True
                            at = near_lo + (num_near >> U64(2))
                            near[at] |= U8(symbol << U32(U32(num_near & U64(3)) << U32(1)))
                            num_near += U64(1)
                            if symbol == U32(FURTHER):
                                other |= U32(sign << U32(3))
                                at = far_lo + (num_far >> U64(1))
                                far[at] |= U8(other << U32(U32(num_far & U64(1)) << U32(2)))
                                num_far += U64(1)
                        if is_lost:
                            escape[0, num_escapes] = U8(within + i)
                            escape[1, num_escapes] = U8(row)
                            escape[2, num_escapes] = U8(bits >> U32(8))
                            num_escapes += U64(1)
            tile = across * tiles_wide + panel
            count[0, tile] = (num_near + U64(3)) >> U64(2)
            count[1, tile] = (num_far + U64(1)) >> U64(1)
            count[2, tile] = num_escapes - first_escape
            near_lo += (num_near + U64(3)) >> U64(2)
            far_lo += (num_far + U64(1)) >> U64(1)
