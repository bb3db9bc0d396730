"""Which positions a row attends to where its layer selects them by an index, over token trees.

Every row scores every index key of a pass, then selects among those on its own path alone, in the
order of the path. A key stands for one token, or for a pool of consecutive tokens, which belongs to
the last of them: a row that sees that one sees the others. Attention takes the paths with the
selection.

Invariants: the selection of a row depends on its own path alone. Scores are products of one shape,
added up over heads one after another; of equal scores the earliest key counts. A row that sees an
index key which is not a number attends to nothing, so its scores are no numbers either.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels.path_attention import HEADER, PathRows
from offload.memory.sizes import PATH_SCRATCH_BYTES
from offload.model.linear import PLAIN, Products
from offload.model.parts import BatchMask, PassCache

_SPAN = 512  # keys whose scores are one product
_TILE_NUMBERS = PATH_SCRATCH_BYTES // 16
_POOLED_TOKENS = 4096  # at once
# states (J, R, W) of the tokens of pools, and the positions (J,) of their first ones -> keys (J, K)
PoolKeys = Callable[[Tensor, Tensor], Tensor]
_MOST_KEYS: ContextVar[float] = ContextVar("most_keys", default=math.inf)


class Pool(NamedTuple):
    """Consecutive tokens that share one key."""

    size: int
    keys: PoolKeys


class TopK(NamedTuple):
    """The number of best keys whose tokens a row sees, besides those of an incomplete pool."""

    num_keys: int
    pool: Pool | None = None


class TopBlocks(NamedTuple):
    """The number of best blocks of positions that each group of heads sees, the last ones included.

    A block scores what its best key scores.
    """

    num_keys: int
    size: int
    num_last: int


class Selection:
    """What the rows of the running pass see in layers that select; one for all layers of a model.

    Attributes:
        seen: without a selection: `PathRows`, or a `BatchMask` of such.
        selected: the same with the selection of the last indexer that ran; a tuple of such where
            each group of heads has its own.
        cache: of the pass; None outside of passes.
        products: of the model.
    """

    def __init__(self) -> None:
        self.seen: Any = None
        self.selected: Any = None
        self.cache: PassCache | None = None
        self.products: Products = PLAIN

    def begin(self, seen: Any, cache: PassCache) -> None:
        """Begin a pass, in which rows see everything until an indexer has run."""
        self.seen = seen
        self.selected = seen
        self.cache = cache

    def select(
        self,
        top_k: TopK | TopBlocks,
        layer: int,
        query_THK: Tensor,
        weight_TH: Tensor | None,
        state_TW: Tensor,
    ) -> None:
        """Write the index states of the rows to the cache, and select; see `select`."""
        assert self.cache is not None, "a pass has begun"
        state_SW = self.cache.write_index(layer, state_TW)
        scores = partial(index_scores, products=self.products)
        self.selected = select(top_k, self.seen, query_THK, weight_TH, state_SW, scores)


@contextmanager
def selecting_few(num_keys: int) -> Iterator[None]:
    """Let this thread's rows select at most this many keys: a short trial has a selection."""
    token = _MOST_KEYS.set(num_keys)
    try:
        yield
    finally:
        _MOST_KEYS.reset(token)


class _Pools(NamedTuple):
    """The tokens of keys, as columns of one text's cache."""

    seen_TJ: Tensor  # bool; keys on the path of each row
    token_JR: Tensor  # of each key
    first_J: Tensor  # positions of their first tokens
    tail_TS: Tensor  # bool; tokens of each row that no pool of its path has


def select(
    top_k: TopK | TopBlocks,
    seen: Any,
    query_THK: Tensor,
    weight_TH: Tensor | None,
    state_SW: Tensor,
    scores: Callable[..., Tensor] | None = None,
) -> Any:
    """Return `seen` with the selection of its rows, see `Selection.selected`.

    Args:
        weight_TH: of the heads; None where all count the same.
        state_SW: index keys of all columns, or the states that keys of pools are made of.
        scores: computes `index_scores`, which it is by default.
    """
    scores = scores or index_scores
    if isinstance(seen, BatchMask):
        masks = []
        for part, mask in zip(seen.parts, seen.masks, strict=True):
            weight_PH = None if weight_TH is None else weight_TH[part.rows]
            state_CW = state_SW[part.columns]
            masks.append(select(top_k, mask, query_THK[part.rows], weight_PH, state_CW, scores))
        return replace(seen, masks=masks)
    seen_TS = seen.once("seen", lambda: _seen(seen, len(state_SW)))
    if isinstance(top_k, TopBlocks):
        return _select_blocks(top_k, seen, seen_TS, query_THK, state_SW, scores)
    size = top_k.pool.size if top_k.pool else 1
    num_keys = int(min(top_k.num_keys, _MOST_KEYS.get()))
    if int(seen.walk_TL[:, 0].max()) // size <= num_keys:
        return seen
    if top_k.pool is None:
        score_TS = scores(query_THK, weight_TH, state_SW)
        return replace(seen, chosen_TS=_best(score_TS, seen_TS, num_keys))
    pools = seen.once(size, lambda: _pools(seen, seen_TS, size))
    step = max(1, _POOLED_TOKENS // size)
    spans = zip(pools.token_JR.split(step), pools.first_J.split(step), strict=True)
    keys = top_k.pool.keys
    key_JK = torch.cat([keys(state_SW[token_JR], first_J) for token_JR, first_J in spans])
    score_TJ = scores(query_THK, weight_TH, key_JK)
    best_TJ = _best(score_TJ, pools.seen_TJ, num_keys)
    # the tokens of selected pools, of which several may share their first ones
    count_TS = torch.zeros_like(pools.tail_TS, dtype=torch.int8)
    for token_J in pools.token_JR.T:
        count_TS.index_add_(1, token_J, best_TJ.to(torch.int8))
    is_sound_T1 = best_TJ.any(1, keepdim=True) | ~pools.seen_TJ.any(1, keepdim=True)
    return replace(seen, chosen_TS=((count_TS > 0) | pools.tail_TS) & is_sound_T1)


def _select_blocks(
    top: TopBlocks,
    seen: PathRows,
    seen_TS: Tensor,
    query_THK: Tensor,
    key_SK: Tensor,
    scores: Callable[..., Tensor],
) -> Any:
    """Return the rows of each group of heads, whose index heads (H) they are."""
    length_T1 = seen.walk_TL[:, :1].long()
    num_blocks = -(-int(length_T1.max()) // top.size)
    num_keys = max(int(min(top.num_keys, _MOST_KEYS.get())), top.num_last)
    if num_blocks <= num_keys:
        return seen
    walk_TL, row_E, nth_E = _walked(seen)
    position_S = np.arange(seen_TS.shape[1])
    position_S[walk_TL[row_E, HEADER + nth_E]] = int(walk_TL[0, 1]) + nth_E
    # a column of no row's path may have any
    block_S = torch.from_numpy(position_S // top.size).clamp_(max=num_blocks - 1)
    block_TS = block_S.to(seen_TS.device).expand(seen_TS.shape)
    back_L = torch.arange(top.num_last, device=seen_TS.device)
    last_TL = ((length_T1 - 1) // top.size - back_L).clamp(min=0)
    is_block_TB = torch.zeros(len(seen_TS), num_blocks, dtype=torch.bool, device=seen_TS.device)
    is_block_TB |= torch.arange(num_blocks, device=seen_TS.device) * top.size < length_T1
    groups = []
    for query_T1K in query_THK.split(1, dim=1):
        score_TS = scores(query_T1K, None, key_SK, has_floor=False)
        score_TS.masked_fill_(~seen_TS, -torch.inf)
        score_TB = score_TS.new_full(is_block_TB.shape, -torch.inf)
        score_TB.scatter_reduce_(1, block_TS, score_TS, "amax")
        is_sound_T1 = ~score_TB.isnan().any(1, keepdim=True)
        best_TB = _best(score_TB.scatter_(1, last_TL, torch.inf), is_block_TB, num_keys)
        chosen_TS = best_TB.gather(1, block_TS) & seen_TS & is_sound_T1
        groups.append(replace(seen, chosen_TS=chosen_TS))
    return tuple(groups)


def index_scores(
    query_THK: Tensor,
    weight_TH: Tensor | None,
    key_JK: Tensor,
    *,
    has_floor: bool = True,
    products: Products = PLAIN,
) -> Tensor:
    """Return (T, J), float32: products of a row's heads with a key, weighted and summed.

    With a floor none counts below 0.
    """
    num_rows, num_heads, width = query_THK.shape
    score_TJ = key_JK.new_empty(num_rows, len(key_JK), dtype=torch.float32)
    step = max(1, _TILE_NUMBERS // (num_heads * _SPAN))
    for lo in range(0, len(key_JK), _SPAN):
        span_SK = key_JK[lo : lo + _SPAN].float()
        key_1KS = pad(span_SK, (0, 0, 0, _SPAN - len(span_SK)))[None].transpose(1, 2)
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            query_1AK = query_THK[rows].float().reshape(1, -1, width)
            head_1AS = products.multiply(torch.bmm, query_1AK, key_1KS)
            head_THS = head_1AS.view(-1, num_heads, _SPAN)
            if has_floor:
                head_THS.relu_()
            if weight_TH is not None:
                head_THS.mul_(weight_TH[rows, :, None].float())
            sum_TS = head_THS[:, 0]
            for head in range(1, num_heads):
                sum_TS = sum_TS + head_THS[:, head]
            score_TJ[rows, lo : lo + _SPAN] = sum_TS[:, : len(span_SK)]
    return score_TJ


def _best(score_TJ: Tensor, seen_TJ: Tensor, num_keys: int) -> Tensor:
    """Return bool (T, J): the best of the keys that a row sees, of equal ones the first.

    A row that sees a score which is not a number has none.
    """
    num_rows, num_all = score_TJ.shape
    best_TJ = torch.empty_like(seen_TJ)
    step = max(1, _TILE_NUMBERS // (2 * num_all))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        seen_AJ = seen_TJ[rows]
        visible_AJ = score_TJ[rows].masked_fill(~seen_AJ, -torch.inf)
        least_A1 = visible_AJ.topk(min(num_keys, num_all), dim=1).values[:, -1:]
        above_AJ = visible_AJ > least_A1
        level_AJ = (visible_AJ == least_A1) & seen_AJ
        room_A1 = num_keys - above_AJ.sum(1, keepdim=True)
        best_AJ = above_AJ | level_AJ & (level_AJ.cumsum(1) <= room_A1)
        best_TJ[rows] = best_AJ & ~visible_AJ.isnan().any(1, keepdim=True)
    return best_TJ


def _seen(rows: PathRows, num_columns: int) -> Tensor:
    """Return bool (T, S): the columns on each row's path."""
    walk_TL, row_E, nth_E = _walked(rows)
    base = int(walk_TL[0, 1])
    seen_TS = np.arange(num_columns) < np.minimum(walk_TL[:, 0], base)[:, None]
    seen_TS[row_E, walk_TL[row_E, HEADER + nth_E]] = True
    return torch.from_numpy(seen_TS).to(rows.walk_TL.device)


def _walked(rows: PathRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the walks, and the entries in them that hold positions: rows, and places behind `base`."""
    walk_TL = rows.walk_TL.cpu().numpy()
    base = int(walk_TL[0, 1])
    position_M = base + np.arange(walk_TL.shape[1] - HEADER)
    row_E, nth_E = np.nonzero(position_M < walk_TL[:, :1])
    return walk_TL, row_E, nth_E


def _pools(rows: PathRows, seen_TS: Tensor, size: int) -> _Pools:
    """Return the pools of this many tokens that are complete on the path of any row."""
    walk_TL, row_E, nth_E = _walked(rows)
    base = int(walk_TL[0, 1])
    num_columns = seen_TS.shape[1]
    position_S = np.arange(num_columns)
    position_S[walk_TL[row_E, HEADER + nth_E]] = base + nth_E
    # before `base` the columns of all rows are their positions
    shared_first_J = np.arange(base // size) * size
    shared_token_JR = shared_first_J[:, None] + np.arange(size)
    is_last_E = (base + nth_E + 1) % size == 0
    last_row_E = row_E[is_last_E]
    last_nth_E = nth_E[is_last_E]
    _, once_J = np.unique(walk_TL[last_row_E, HEADER + last_nth_E], return_index=True)
    place_JR = last_nth_E[once_J, None] - size + 1 + np.arange(size)
    walked_JR = walk_TL[last_row_E[once_J, None], HEADER + np.maximum(place_JR, 0)]
    branch_token_JR = np.where(place_JR < 0, base + place_JR, walked_JR)
    token_JR = np.concatenate([shared_token_JR, branch_token_JR]).astype(np.int64)
    first_J = np.concatenate([shared_first_J, base + place_JR[:, 0]])
    place = seen_TS.device
    tail_TS = position_S >= walk_TL[:, :1] // size * size
    last_J = torch.from_numpy(token_JR[:, -1]).to(place)
    return _Pools(
        seen_TS[:, last_J],
        torch.from_numpy(token_JR).to(place),
        torch.from_numpy(first_J.astype(np.int64)).to(place),
        torch.from_numpy(tail_TS).to(place) & seen_TS,
    )
