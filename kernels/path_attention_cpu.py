"""Attention of each row along its own path, on a CPU: see `path_attention.py` for what it computes.

A score is the sum of eight sums, one for each lane of a register, whatever other rows and keys are
computed beside it. Weights are added up in eight sums by position, and values one position after
the other. So the bits of a row depend on its path alone, by construction: nothing of the tree
around it, of where `base` lies, of tiles or threads changes what is added up in which order.

Keys before `base` are widened to float32 block by block, for all rows of a tile; of those behind it
each row has its own. A block stays in the nearest cache, and two rows of queries are multiplied by
four keys at once, so that all of their sums stay in registers.

Shape letters beside those of `offload/units.py`: J sets of I heads, of which each shares the keys
of a group; A = T * I rows of a tile, a row of the pass and a head of the set being one; W and X
widths of keys and values in whole steps.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.kernels.machine_code import ParallelKernelCall, call_of, fused_lanes
from offload.kernels.path_attention import BLOCK, HEADER, PathRows, ScoreTerms, first_seen
from offload.kernels.path_attention_code import FIELDS, KEY_STEP, NAME, VALUE_STEP, code_for

# scores of a tile: they stay in the second cache
_MOST_SCORES = 1 << 16
# this many tiles at least, if rows allow, for threads to share
_LEAST_TILES = 16
_LOG2_E = math.log2(math.e)
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Tiles(NamedTuple):
    """How rows are cut, for all layers of a pass.

    Attributes:
        walk_TL: of the rows, on the host and without gaps.
        least_T: int64, the first position that each row sees.
        span_N2: int64, by tile: the positions before `base` that its rows look at, whole blocks.
        tile_rows: of each tile but the last.
        set_heads: of the heads that share keys, this many are computed at once.
        num_positions: from the first of a tile on, the most.
    """

    walk_TL: Tensor
    least_T: Tensor
    span_N2: Tensor
    tile_rows: int
    set_heads: int
    num_positions: int


def compile_for(dtype: torch.dtype) -> None:
    """Compile what `attention_of` runs for numbers of this type, where it would run at all.

    The compiler takes as much memory for a moment as a layer of a small model.
    """
    if dtype in _TYPES and fused_lanes() > 0:
        code_for(dtype)


def can_attend(key_GSK: Tensor, value_GSK: Tensor) -> bool:
    """Return True if `attention_of` takes these keys and values on this machine."""
    return (
        key_GSK.device.type == "cpu"
        and key_GSK.dtype == value_GSK.dtype
        and key_GSK.dtype in _TYPES
        and fused_lanes() > 0
    )


def attention_of(
    query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, rows: PathRows, terms: ScoreTerms
) -> ParallelKernelCall:
    """Return the result of `path_attention_kernel`, (T, H, V), in float32.

    `can_attend` must admit the keys and values, whose last dimension has no gaps. A row's bits are
    those of its path alone as long as values are finite.
    """
    num_heads, num_rows, width = query_HTK.shape
    num_groups, _, value_width = value_GSK.shape
    group = num_heads // num_groups
    kind = (rows.window, num_rows, group, num_groups)
    tiles = rows.once(kind, lambda: _cut(rows, num_rows, group, num_groups))
    num_sets = num_heads // tiles.set_heads
    query_JTIK = query_HTK.unflatten(0, (num_sets, tiles.set_heads)).transpose(1, 2)
    wide_JTIW = _scaled(query_JTIK, terms.scaling * (1.0 if terms.cap else _LOG2_E))
    out_sizes = (num_rows, num_heads, _in_steps(value_width, VALUE_STEP))
    out_THX = torch.empty(out_sizes, dtype=torch.float32)
    chosen_TP = None if rows.chosen_TS is None else _by_position(rows.chosen_TS, tiles)
    given = {
        "query": wide_JTIW,
        "key": key_GSK,
        "value": value_GSK,
        "walk": tiles.walk_TL,
        "least": tiles.least_T,
        "chosen": chosen_TP,
        "sink": None if terms.sink_H is None else terms.sink_H.float().mul(_LOG2_E).contiguous(),
        "span": tiles.span_N2,
        "out": out_THX,
        "cap": _cap_factors(terms.cap),
        "num_rows": num_rows,
        "tile_rows": tiles.tile_rows,
        "num_heads": num_heads,
        "set_heads": tiles.set_heads,
        "sets": num_sets // num_groups,
        "width": width,
        "whole": wide_JTIW.shape[3],
        "value_width": value_width,
        "value_whole": out_THX.shape[2],
        "key_group": key_GSK.stride(0),
        "key_row": key_GSK.stride(1),
        "value_group": value_GSK.stride(0),
        "value_row": value_GSK.stride(1),
        "walk_row": tiles.walk_TL.stride(0),
        "chosen_row": 0 if chosen_TP is None else chosen_TP.stride(0),
        "sink_step": 0 if terms.sink_H is None else 1,
        "score_row": tiles.num_positions,
    }
    num_tiles = num_sets * len(tiles.span_N2)
    call = call_of(num_tiles, (given[name] for name in FIELDS))
    num_all = min(num_rows, tiles.tile_rows) * tiles.set_heads
    block_width = max(wide_JTIW.shape[3], out_THX.shape[2])
    # a block, and of each row and head scores, sums of values and that of weights
    num_room = BLOCK * block_width + num_all * (tiles.num_positions + out_THX.shape[2] + 1)
    num_products = num_heads * num_rows * tiles.num_positions * (width + value_width)
    function = code_for(key_GSK.dtype).functions[NAME]
    return ParallelKernelCall(
        function, call, num_room, num_products, given, out_THX[..., :value_width]
    )


def _scaled(query_JTIK: Tensor, factor: float) -> Tensor:
    """Return queries in float32 without gaps; behind narrow ones zeros stand, which change no sum."""
    *sizes, width = query_JTIK.shape
    if width % KEY_STEP == 0:
        return torch.empty(query_JTIK.shape, dtype=torch.float32).copy_(query_JTIK).mul_(factor)
    wide_JTIW = torch.zeros(*sizes, _in_steps(width, KEY_STEP), dtype=torch.float32)
    wide_JTIW[..., :width].copy_(query_JTIK).mul_(factor)
    return wide_JTIW


def _cap_factors(cap: float | None) -> Tensor | None:
    """Return the factor of a score for e^(2 score / cap), and that of the tangent for 2^x."""
    if cap is None:
        return None
    return torch.tensor([2 * _LOG2_E / cap, cap * _LOG2_E], dtype=torch.float32)


def _in_steps(number: int, step: int) -> int:
    return number + -number % step


def _cut(rows: PathRows, num_rows: int, group: int, num_groups: int) -> _Tiles:
    """Return the tiles of the last rows."""
    walk_TL = rows.walk_TL[-num_rows:].contiguous()
    seen_T = walk_TL[:, 0].numpy().astype(np.int64)
    base = int(walk_TL[0, 1])
    least_T = np.zeros_like(seen_T)
    if rows.window is not None:
        least_T = np.array([max(0, first_seen(rows.window, int(seen) - 1)) for seen in seen_T])
    most_positions = _in_steps(int((seen_T - least_T).max()) + BLOCK, BLOCK)
    set_heads = group if group * most_positions <= _MOST_SCORES else min(group, 2)
    while group % set_heads:
        set_heads -= 1
    tile_rows = max(1, _MOST_SCORES // (set_heads * most_positions))
    num_sets = num_groups * (group // set_heads)
    tile_rows = min(tile_rows, -(-num_rows * num_sets // _LEAST_TILES))
    span = []
    num_positions = 0
    for lo in range(0, num_rows, tile_rows):
        some = slice(lo, lo + tile_rows)
        first = int(least_T[some].min()) // BLOCK * BLOCK
        end = _in_steps(int(seen_T[some].max()), BLOCK)
        span.append((min(first, base), max(min(first, base), min(end, base))))
        num_positions = max(num_positions, end - span[-1][0])
    return _Tiles(
        walk_TL,
        torch.from_numpy(least_T.astype(np.int64)),
        torch.tensor(span, dtype=torch.int64),
        tile_rows,
        set_heads,
        num_positions,
    )


def _by_position(chosen_TS: Tensor, tiles: _Tiles) -> Tensor:
    """Return which positions of its path each row may look at, (T, P) in bytes, from columns."""
    walk_TL = tiles.walk_TL
    base = int(walk_TL[0, 1])
    column_TC = walk_TL[:, HEADER:].long()
    own_TC = chosen_TS[-len(walk_TL) :].gather(1, column_TC)
    return torch.cat([chosen_TS[-len(walk_TL) :, :base], own_TC], 1).to(torch.uint8)
