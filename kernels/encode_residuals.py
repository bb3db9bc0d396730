"""Encode bfloat16 weights beside a copy of 4 bits as `residual_layout` describes.

Invariant: for any bits, and any words and scales of a copy, expanding returns the same bits.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from offload.kernels.compiled import faster
from offload.kernels.expand_residuals import tiles_of
from offload.kernels.machine_code import call_of, fused_lanes
from offload.kernels.residual_code import ENCODE, SPARE_BYTES, code_for
from offload.kernels.residual_layout import (
    FURTHER,
    NO_HIGH_BYTE,
    NO_MAGNITUDE,
    STEP,
    TILE_ROWS,
    num_tiles,
)


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
    """Do what the reference does, in machine code, on this thread."""
    if not fused_lanes():
        return encode_residuals_reference(weight_NK, word_BKH, scale_GN2)
    num_rows, num_columns = weight_NK.shape
    tiles = num_tiles(num_rows, num_columns)
    # a symbol for each weight at most, and what tiles are padded with
    most_bytes = weight_NK.numel() + tiles
    low_NK = torch.empty(num_rows, num_columns, dtype=torch.uint8)
    near_B = torch.empty(most_bytes // 4 + tiles + SPARE_BYTES, dtype=torch.uint8)
    far_B = torch.empty(most_bytes // 2 + tiles + SPARE_BYTES, dtype=torch.uint8)
    # each symbol is written with zeros behind it, which the next one begins in
    near_B[0] = far_B[0] = 0
    escape_3E = torch.empty(3, weight_NK.numel(), dtype=torch.uint8)
    count_3T = torch.empty(3, tiles, dtype=torch.int64)
    given = (word_BKH.contiguous(), scale_GN2.contiguous(), weight_NK.contiguous())
    made = (low_NK, near_B, far_B, escape_3E, count_3T)
    group = num_columns // len(scale_GN2)
    sizes = (num_rows, num_columns, scale_GN2.shape[1])
    call = call_of(0, (*given, *made, *sizes))
    encode = code_for(ENCODE, torch.bfloat16, word_BKH.shape[2], group)
    encode(ctypes.addressof(call), 0, -(-num_rows // TILE_ROWS))
    near_bytes, far_bytes, num_escapes = count_3T.sum(1).tolist()
    symbols = (near_B[:near_bytes].clone(), far_B[:far_bytes].clone())
    return ResidualWords(low_NK, *symbols, escape_3E[:, :num_escapes].contiguous(), count_3T)


encode_residuals = faster(encode_residuals_compiled, encode_residuals_reference)


def _packed(symbol: Tensor, num_bits: int) -> Tensor:
    """Return symbols in whole bytes, from the lowest bit on."""
    per_byte = 8 // num_bits
    padded = torch.nn.functional.pad(symbol, (0, -len(symbol) % per_byte)).view(-1, per_byte)
    shift = torch.arange(0, 8, num_bits)
    return (padded << shift).sum(1).to(torch.uint8)
