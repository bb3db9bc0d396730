"""Layers that choose by an index which positions a row attends to, over token trees.

An indexer runs as transformers has it, up to where it has a row's queries and the weights of their
heads; its keys go to the cache beside keys and values. From there on the choice is ours
(`index_choice.py`): each row chooses among the positions of its own path, and what attention then
takes are the paths with that choice. Invariant: an indexer of another make is refused.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.model.index_choice import Choice, Pool, choose
from offload.model.recurrent import with_functions

_UPDATE = "update_indexer"
_TURN = "apply_rotary_pos_emb"


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


class _Asked(NamedTuple):
    """What an indexer has made of the rows of a pass: (1, T, H, K) and (1, T, H)."""

    queries: Tensor
    weights: Tensor | None


class _ReachedError(Exception):
    """The family's own indexer has come to where it would score."""

    def __init__(self, asked: _Asked) -> None:
        self.asked = asked


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
        raise _ReachedError(_Asked(right.queries, left.squeeze(-2)))
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
            raise _ReachedError(_Asked(_TURNED.get(), None))
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


def _by_token(indexer: Any, _: dict[str, Any], __: int) -> Choice:
    return Choice(indexer.index_topk)


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
    _Make(frozenset({"weights_proj", "index_topk", "softmax_scale"}), _follow_scores, _by_token),
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
    found = [module for module in layer.modules() if _follower_of(type(module)) is not None]
    for module in found:
        if not getattr(module, "index_kpool_always_select_tail", True):
            raise ValueError("an index by which the first tokens of a text see nothing")
        module.__class__ = _follower_of(type(module))
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
        cache = _CacheOf(given["past_key_values"], self.layer_idx, is_last=make.ends_at_keys)
        # those who ask for tokens that are no padding get them
        given |= {
            "past_key_values": cache,
            "attention_mask": torch.ones(1, num_rows, dtype=torch.bool, device=hidden_1TD.device),
        }
        asked = _asked_of(clone, given)
        choice = make.choice(self, given, num_rows)
        chosen = choose(choice, mask.seen, *_alone(asked), cache.states_1SW[0])
        return ChoosingMask(mask.seen, chosen)

    return choose_along_paths


def _alone(asked: _Asked) -> tuple[Tensor, Tensor | None]:
    """Return the tensor without the batch of one text."""
    return asked.queries[0], None if asked.weights is None else asked.weights[0]


def _asked_of(clone: Callable[..., NoReturn], given: dict[str, Any]) -> _Asked:
    try:
        clone(**given)
    except _ReachedError as reached:
        return reached.asked
    raise AssertionError("an indexer scores its keys")
