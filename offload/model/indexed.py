"""Layers that choose by an index which positions a row attends to, over token trees.

An indexer runs as transformers has it, up to where it has a row's queries and the weights of their
heads; its keys go to the cache beside keys and values. From there on the choice is ours: every row
scores every index key of a pass, then chooses among those on its own path alone, in its order. A
key stands for one token, or for a pool of some in a row, which belongs to the token that completes
it: a row that sees that one sees the others. Attention takes the paths with that choice.

Invariants: a row's choice depends on its own path alone; scores are products of one shape, added up
over heads one after another, and of equal scores the earliest count. An indexer of another make is
refused.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from offload.kernels.path_attention import HEADER, PathRows
from offload.memory.sizes import PATH_SCRATCH_BYTES
from offload.model.library import CACHE, cache_in
from offload.model.parts import BatchMask
from offload.model.recurrent import with_functions

_UPDATE = "update_indexer"
_TURN = "apply_rotary_pos_emb"
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
    """How many of the best keys a row sees the tokens of, besides those of an incomplete pool."""

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
        masks = []
        for part, mask in zip(seen.parts, seen.masks, strict=True):
            own = None if weight_TH is None else weight_TH[part.rows]
            masks.append(choose(choice, mask, query_THK[part.rows], own, state_SW[part.columns]))
        return replace(seen, masks=masks)
    seen_TS = seen.once("seen", lambda: _seen(seen, len(state_SW)))
    size = choice.pool.size if choice.pool else 1
    num_keys = int(min(choice.num_keys, _MOST_KEYS.get()))
    if int(seen.walk_TL[:, 0].max()) // size <= num_keys:
        return seen
    if choice.pool is None:
        best = _best(index_scores(query_THK, weight_TH, state_SW), seen_TS, num_keys)
        return replace(seen, chosen_TS=best)
    columns = seen.once(size, lambda: _pools(seen, seen_TS, size))
    step = max(1, _POOLED_TOKENS // size)
    parts_of = zip(columns.token_JR.split(step), columns.first_J.split(step), strict=True)
    keys = choice.pool.keys
    key_JK = torch.cat([keys(state_SW[token_JR], first_J) for token_JR, first_J in parts_of])
    best_TJ = _best(index_scores(query_THK, weight_TH, key_JK), columns.seen_TJ, num_keys)
    # the tokens of chosen pools, of which several may share their first ones
    count_TS = torch.zeros_like(columns.tail_TS, dtype=torch.int8)
    for token_J in columns.token_JR.T:
        count_TS.index_add_(1, token_J, best_TJ.to(torch.int8))
    return replace(seen, chosen_TS=(count_TS > 0) | columns.tail_TS)


def index_scores(query_THK: Tensor, weight_TH: Tensor | None, key_JK: Tensor) -> Tensor:
    """Return (T, J), float32: what a row's heads find in a key, none below 0, by their weights."""
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


class ChoosingMask:
    """What the rows of a pass see in one layer, and what of it the layer has chosen.

    Families hand it on in place of a mask, and what their indexer returns in place of indices or of
    another mask: both are this one. So it answers what they do with masks on the way.

    Attributes:
        seen: `PathRows`, or a `BatchMask` of such.
        chosen: the same with the choice in it, where there is one.
        dtype: of a mask that is added to scores.
    """

    dtype = torch.float32

    def __init__(self, seen: Any, chosen: Any = None) -> None:
        self.seen = seen
        self.chosen = chosen

    def __getitem__(self, _: Any) -> "ChoosingMask":
        return self

    def __invert__(self) -> "ChoosingMask":
        return self

    def masked_fill(self, chosen: "ChoosingMask", _: Any) -> "ChoosingMask":
        """Return itself: it holds its choice."""
        return chosen


class _ReachedError(Exception):
    """The family's own indexer has come to where it would score.

    Attributes:
        queries: (1, T, H, K), what it has made of the rows of a pass.
        weights: (1, T, H), where it has any.
    """

    def __init__(self, queries: Tensor, weights: Tensor | None) -> None:
        self.queries = queries
        self.weights = weights


class _Keys:
    """In place of index keys, whatever view of them a family takes."""

    def _same(self, *_: Any, **__: Any) -> "_Keys":
        return self

    __getitem__ = transpose = float = unsqueeze = bool = _same


class _Scores:
    """In place of the scores of all heads: a factor above zero changes no choice."""

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries

    def __mul__(self, _: float) -> "_Scores":
        return self


class _StandIn:
    """A module with some functions of ours."""

    def __init__(self, module: Any, **own: Callable[..., Any]) -> None:
        self._module = module
        self.__dict__ |= own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _matmul(left: Any, right: Any) -> Any:
    if isinstance(right, _Keys):
        return _Scores(left)
    if isinstance(right, _Scores):
        raise _ReachedError(right.queries, left.squeeze(-2))
    return torch.matmul(left, right)


def _relu(numbers: Any) -> Any:
    return numbers if isinstance(numbers, _Scores) else functional.relu(numbers)


class _CacheOf:
    """In place of the cache that a family's indexer is given."""

    def __init__(self, cache: Any, layer: int, *, is_last: bool) -> None:
        self._cache = cache
        self._layer = layer
        self._is_last = is_last  # nothing behind the update is wanted
        self.keys = torch.empty(1, 1, 0, 0)
        self.states_1SW = torch.empty(0)

    @property
    def layers(self) -> dict[int, "_CacheOf"]:
        return {self._layer: self}

    def get_seq_length(self) -> int:
        """Return 0: what is seen is not asked here."""
        return 0

    def update_indexer(self, states_1TW: Tensor, layer: int) -> _Keys:
        """Keep them, and go on without."""
        self.states_1SW = self._cache.update_indexer(states_1TW, layer)
        if self._is_last:
            raise _ReachedError(_TURNED.get(), None)
        return _Keys()


_TURNED: ContextVar[Tensor] = ContextVar("turned")


class _Make(NamedTuple):
    """One make of indexers, and how it is told from others."""

    names: frozenset[str]  # in its forward pass; those of the first make that has all of its
    in_place: Callable[[dict[str, Any]], dict[str, Any]]  # of what its module has, ours
    choice: Callable[[Any, dict[str, Any], int], Choice]
    ends_at_keys: bool = False  # whether queries are there when keys are kept


def _follow_scores(_: dict[str, Any]) -> dict[str, Any]:
    return {"torch": _StandIn(torch, matmul=_matmul), "F": _StandIn(functional, relu=_relu)}


def _follow_turn(known: dict[str, Any]) -> dict[str, Any]:
    def turn(*args: Any, **kwargs: Any) -> Any:
        turned = known[_TURN](*args, **kwargs)
        _TURNED.set(turned)
        return turned

    return {_TURN: turn}


def _own_class(indexer: Any) -> Any:
    """Return the family's class, of which a follower's is made."""
    return type(indexer).__mro__[1]


def _by_gated_pool(indexer: Any, _: dict[str, Any], __: int) -> Choice:
    def keys(packed_JRW: Tensor, __: Tensor) -> Tensor:
        return _own_class(indexer).get_pooled_states(indexer, packed_JRW)[0][:, 0]

    size = indexer.index_kpool
    return Choice(indexer.index_topk // size, Pool(size, keys))


def _by_mean(indexer: Any, kwargs: dict[str, Any], num_rows: int) -> Choice:
    """Turn keys where their block begins; a family's table has all positions before the rows' ones."""
    turn = inspect.unwrap(_own_class(indexer).forward).__globals__[_TURN]
    cos_PK, sin_PK = (table[0, :-num_rows] for table in kwargs["position_embeddings"])

    def keys(raw_JRW: Tensor, first_J: Tensor) -> Tensor:
        sum_JW = raw_JRW[:, 0].float()
        for place in range(1, raw_JRW.shape[1]):
            sum_JW = sum_JW + raw_JRW[:, place].float()
        mean_JW = indexer.k_layernorm((sum_JW / raw_JRW.shape[1]).to(raw_JRW.dtype))
        return turn(mean_JW[:, None], cos=cos_PK[first_J], sin=sin_PK[first_J])[:, 0]

    size = indexer.compress_ratio
    return Choice(indexer.token_budget // size, Pool(size, keys))


_MAKES = (
    # GLM-5.3-Flash: pools of tokens, by gates that are learned
    _Make(frozenset({"get_pooled_states", "weights_proj"}), _follow_scores, _by_gated_pool),
    # DeepSeek-V3.2 and those that come from it
    _Make(
        frozenset({"weights_proj", "index_topk", "softmax_scale"}),
        _follow_scores,
        lambda indexer, *_: Choice(indexer.index_topk),
    ),
    # Qwen3.8-Flash-Next: means of blocks
    _Make(frozenset({"block_topk", "k_layernorm"}), _follow_turn, _by_mean, ends_at_keys=True),
)


def follow_indices(layers: nn.ModuleList) -> list[bool]:
    """Let indexers of these layers choose along paths; tells which layers choose, by their own or
    by that of an earlier layer.

    Raises `ValueError` where that could not be what the family computes.
    """
    found = [_follow(layer) for layer in layers]
    chooses = [has_own or shares_index(layer) for has_own, layer in zip(found, layers, strict=True)]
    if True in chooses and not found[chooses.index(True)]:
        raise ValueError("its first layers share an index that none has made")
    return chooses


def has_index(layer: nn.Module) -> bool:
    """Return whether a layer chooses what its rows attend to."""
    return shares_index(layer) or any(hasattr(one, "_chooses") for one in layer.modules())


def shares_index(layer: nn.Module) -> bool:
    """Return whether it takes the choice of a layer before it."""
    return bool(getattr(getattr(layer, "self_attn", None), "skip_topk", False))


def _follow(layer: nn.Module) -> bool:
    modules: Iterator[Any] = layer.modules()
    found = [module for module in modules if _follower_of(module.__class__) is not None]
    for module in found:
        if not getattr(module, "index_kpool_always_select_tail", True):
            raise ValueError("an index by which the first tokens of a text see nothing")
        module.__class__ = _follower_of(module.__class__)
    # where attention makes a mask of indices, the choice is one
    attention: Any = getattr(layer, "self_attn", None)
    if hasattr(attention, "build_attention_mask_from_topk"):
        attention.build_attention_mask_from_topk = lambda topk_indices, **_: topk_indices
    return len(found) == 1


@lru_cache(maxsize=64)
def _follower_of(own: Any) -> Any:
    """Return a class like this one that chooses along paths; None for any other."""
    forward = inspect.unwrap(own.forward)
    if not isinstance(forward, FunctionType) or _UPDATE not in forward.__code__.co_names:
        return None
    names = {*forward.__code__.co_names, *inspect.unwrap(own.__init__).__code__.co_names}
    make = next((one for one in _MAKES if one.names <= names), None)
    if make is None:
        return None
    clone = with_functions(forward, make.in_place(forward.__globals__))
    more = {
        "forward": _forward_by(clone, forward, make),
        "get_visible_tokens": lambda *_, **__: None,
        "get_pooled_states": lambda *_, **__: (_Keys(), None, None),
        "__module__": own.__module__,
        "_chooses": True,
    }
    return type(own.__name__, (own,), more)


def _forward_by(
    clone: Callable[..., Any], forward: Callable[..., Any], make: _Make
) -> Callable[..., ChoosingMask]:
    told = inspect.signature(forward)

    def choose_along_paths(self: Any, *args: Any, **kwargs: Any) -> ChoosingMask:
        given = told.bind(self, *args, **kwargs).arguments
        mask = given["attention_mask"]
        hidden_1TD = given["hidden_states"]
        num_rows = hidden_1TD.shape[1]
        cache = _CacheOf(cache_in(given), self.layer_idx, is_last=make.ends_at_keys)
        # those who ask for tokens that are no padding get them
        given |= {
            CACHE: cache,
            "attention_mask": torch.ones(1, num_rows, dtype=torch.bool, device=hidden_1TD.device),
        }
        try:
            clone(**given)
        except _ReachedError as reached:
            query_THK = reached.queries[0]
            weight_TH = None if reached.weights is None else reached.weights[0]
        else:
            raise AssertionError("an indexer scores its keys")
        choice = make.choice(self, given, num_rows)
        if choice.num_keys < 1:
            raise ValueError("an index that chooses nothing")
        chosen = choose(choice, mask.seen, query_THK, weight_TH, cache.states_1SW[0])
        return ChoosingMask(mask.seen, chosen)

    return choose_along_paths
