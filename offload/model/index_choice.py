"""Which positions of its path each row of a pass attends to, by the keys of an index.

Of a pass over many paths every index key is scored by every row, as scores of other rows' keys cost
no more; then a row chooses among those on its own path alone, in the order of the path. A key
stands for one token, or for a pool of some tokens in a row: a pool belongs to the token that
completes it, and a row that sees that one sees the others.

Invariant: a row's choice depends on its own path alone. Scores are products of one shape, added up
over heads one after another, and of equal scores the earliest count.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.path_attention import HEADER, PathRows
from offload.memory.plan import PATH_SCRATCH_BYTES
from offload.model.parts import BatchMask

_SPAN = 512  # keys whose scores are one product
_TILE_NUMBERS = PATH_SCRATCH_BYTES // 16
_POOLED_TOKENS = 4096  # at once
# raw keys (J, R, W) of the tokens of pools, and the positions (J,) of their first ones -> keys
PoolKeys = Callable[[Tensor, Tensor], Tensor]


class Pool(NamedTuple):
    """How several tokens have one key."""

    size: int
    keys: PoolKeys


class Choice(NamedTuple):
    """How many keys, the best ones, a row sees the tokens of; and those of a pool that is not
    complete.
    """

    num_keys: int
    pool: Pool | None = None


_MOST_KEYS: ContextVar[float] = ContextVar("most_keys", default=math.inf)


@contextmanager
def choosing_few(num_keys: int) -> Iterator[None]:
    """Let rows of this thread choose no more keys meanwhile, so that a short trial has choices."""
    token = _MOST_KEYS.set(num_keys)
    try:
        yield
    finally:
        _MOST_KEYS.reset(token)


class _Columns(NamedTuple):
    """Where the tokens of index keys lie: columns of one text's cache."""

    seen_TJ: Tensor  # bool; keys on the path of each row
    token_JR: Tensor  # of each key
    first_J: Tensor  # positions of these tokens
    tail_TS: Tensor  # bool; tokens of each row that no pool of its path has


def choose(
    choice: Choice, seen: Any, query_THK: Tensor, weight_TH: Tensor | None, state_SW: Tensor
) -> Any:
    """Return `seen` with the choice of its rows: `PathRows`, or a `BatchMask` of such.

    Args:
        weight_TH: of the heads; None where all count the same.
        state_SW: index keys of all columns, or what keys of pools are made of.
    """
    if isinstance(seen, BatchMask):
        parts = []
        for part in seen.parts:
            rows = slice(part.lo, part.hi)
            own = None if weight_TH is None else weight_TH[rows]
            states = state_SW[part.first : part.last]
            mask = choose(choice, part.mask, query_THK[rows], own, states)
            parts.append(part._replace(mask=mask))
        return BatchMask(tuple(parts))
    seen_TS = _kept(seen, "seen", lambda: _seen(seen, len(state_SW)))
    size = choice.pool.size if choice.pool else 1
    num_keys = int(min(choice.num_keys, _MOST_KEYS.get()))
    if int(seen.walk_TL[:, 0].max()) // size <= num_keys:
        return seen
    if choice.pool is None:
        best = _best(index_scores(query_THK, weight_TH, state_SW), seen_TS, num_keys)
        return replace(seen, chosen_TS=best)
    columns = _kept(seen, size, lambda: _pools(seen, seen_TS, size))
    key_JK = _pooled(choice.pool, state_SW, columns)
    best_TJ = _best(index_scores(query_THK, weight_TH, key_JK), columns.seen_TJ, num_keys)
    return replace(seen, chosen_TS=_tokens_of(best_TJ, columns) | columns.tail_TS)


def index_scores(query_THK: Tensor, weight_TH: Tensor | None, key_JK: Tensor) -> Tensor:
    """Return (T, J) in float32: what the heads of a row find in a key, never less than nothing each,
    by their weights.
    """
    num_rows, num_heads, width = query_THK.shape
    score_TJ = key_JK.new_empty(num_rows, len(key_JK), dtype=torch.float32)
    step = max(1, _TILE_NUMBERS // (num_heads * _SPAN))
    for lo in range(0, len(key_JK), _SPAN):
        own_SK = key_JK[lo : lo + _SPAN].float()
        key_1KS = pad(own_SK, (0, 0, 0, _SPAN - len(own_SK)))[None].transpose(1, 2)
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            query_1AK = query_THK[rows].float().reshape(1, -1, width)
            head_THS = torch.bmm(query_1AK, key_1KS).view(-1, num_heads, _SPAN).relu_()
            if weight_TH is not None:
                head_THS.mul_(weight_TH[rows, :, None].float())
            sum_TS = head_THS[:, 0]
            for head in range(1, num_heads):
                sum_TS = sum_TS + head_THS[:, head]
            score_TJ[rows, lo : lo + _SPAN] = sum_TS[:, : len(own_SK)]
    return score_TJ


def _best(score_TJ: Tensor, seen_TJ: Tensor, num_keys: int) -> Tensor:
    """Return bool (T, J): the best of the keys that a row sees, of equal ones the first."""
    num_rows, num_all = score_TJ.shape
    if num_all <= num_keys:
        return seen_TJ
    best_TJ = torch.empty_like(seen_TJ)
    step = max(1, _TILE_NUMBERS // (2 * num_all))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        own_TJ = score_TJ[rows].masked_fill(~seen_TJ[rows], -torch.inf)
        least_T1 = own_TJ.topk(num_keys, dim=1).values[:, -1:]
        above_TJ = own_TJ > least_T1
        level_TJ = (own_TJ == least_T1) & seen_TJ[rows]
        room_T1 = num_keys - above_TJ.sum(1, keepdim=True)
        best_TJ[rows] = above_TJ | level_TJ & (level_TJ.cumsum(1) <= room_T1)
    return best_TJ


def _kept(rows: PathRows, what: Any, make: Callable[[], Any]) -> Any:
    """Return what is the same for all layers of a pass."""
    kind = ("index", what)
    if kind not in rows.kept:
        rows.kept[kind] = make()
    return rows.kept[kind]


def _seen(rows: PathRows, num_columns: int) -> Tensor:
    """Return bool (T, S): the columns on each row's path."""
    walk_TL, row_E, nth_E = _own(rows)
    base = int(walk_TL[0, 1])
    seen_TS = np.arange(num_columns) < np.minimum(walk_TL[:, 0], base)[:, None]
    seen_TS[row_E, walk_TL[row_E, HEADER + nth_E]] = True
    return torch.from_numpy(seen_TS).to(rows.walk_TL.device)


def _own(rows: PathRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the walks, and which of their columns hold positions: rows, and places behind `base`."""
    walk_TL = rows.walk_TL.cpu().numpy()
    base = int(walk_TL[0, 1])
    position_M = base + np.arange(walk_TL.shape[1] - HEADER)
    row_E, nth_E = np.nonzero(position_M < walk_TL[:, :1])
    return walk_TL, row_E, nth_E


def _pools(rows: PathRows, seen_TS: Tensor, size: int) -> _Columns:
    """Return the pools of so many tokens that are complete on the path of any row."""
    walk_TL, row_E, nth_E = _own(rows)
    base = int(walk_TL[0, 1])
    num_columns = seen_TS.shape[1]
    position_S = np.arange(num_columns)
    position_S[walk_TL[row_E, HEADER + nth_E]] = base + nth_E
    # before `base` the columns of all rows are their positions
    first_J = np.arange(base // size) * size
    token_JR = first_J[:, None] + np.arange(size)
    is_last_E = (base + nth_E + 1) % size == 0
    own_row_E = row_E[is_last_E]
    own_nth_E = nth_E[is_last_E]
    _, once_J = np.unique(walk_TL[own_row_E, HEADER + own_nth_E], return_index=True)
    place_JR = own_nth_E[once_J, None] - size + 1 + np.arange(size)
    on_walk_JR = walk_TL[own_row_E[once_J, None], HEADER + np.maximum(place_JR, 0)]
    own_JR = np.where(place_JR < 0, base + place_JR, on_walk_JR)
    token_JR = np.concatenate([token_JR, own_JR]).astype(np.int64)
    first_J = np.concatenate([first_J, base + place_JR[:, 0]])
    place = seen_TS.device
    tail_TS = position_S >= walk_TL[:, :1] // size * size
    last_J = torch.from_numpy(token_JR[:, -1]).to(place)
    return _Columns(
        seen_TS[:, last_J],
        torch.from_numpy(token_JR).to(place),
        torch.from_numpy(first_J.astype(np.int64)).to(place),
        torch.from_numpy(tail_TS).to(place) & seen_TS,
    )


def _pooled(pool: Pool, state_SW: Tensor, columns: _Columns) -> Tensor:
    """Return the keys (J, K) of all pools."""
    step = max(1, _POOLED_TOKENS // pool.size)
    parts = zip(columns.token_JR.split(step), columns.first_J.split(step), strict=True)
    return torch.cat([pool.keys(state_SW[token_JR], first_J) for token_JR, first_J in parts])


def _tokens_of(best_TJ: Tensor, columns: _Columns) -> Tensor:
    """Return bool (T, S): the tokens of chosen pools, of which several may share their first ones."""
    count_TS = torch.zeros_like(columns.tail_TS, dtype=torch.int8)
    for token_J in columns.token_JR.T:
        count_TS.index_add_(1, token_J, best_TJ.to(torch.int8))
    return count_TS > 0
