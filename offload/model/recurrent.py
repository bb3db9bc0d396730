"""Recurrent and convolutional layers of a Hugging Face model over token trees.

Such a layer runs as transformers has it, over all rows of a pass at once and as if their text began
there; only two functions that it calls have others in their place, a convolution and a scan that
follow the tree from the committed state. Projections, gates and norms are untouched. Invariant:
what a layer does across rows goes through these two; a layer of another make is refused.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.model.invariant import in_whole_vectors
from offload.model.kv_cache import KVCache
from offload.model.library import ACT2FN, LAYER_CACHES, cache_in
from offload.model.parts import BatchPart, PassCache
from offload.model.recurrences import CONVOLUTION, KINDS, Gated, Lightning, Recurrence
from offload.model.recurrent_cache import RecurrentCache

_MIXING = ("recurrent_state", "get_recurrent_state", "recurrent_states")
# what MiniMax's linear attention derives from its config, and saves
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


class _Running(NamedTuple):
    """The layer that runs in this thread."""

    layer: int
    parts: Sequence[BatchPart]
    recurrence: Recurrence | None


_RUNNING: ContextVar[_Running] = ContextVar("running")


def follow_trees(layers: nn.ModuleList) -> list[bool]:
    """Let recurrent parts of these layers follow trees; tells which layers have any."""
    return [_follow(layer, index) for index, layer in enumerate(layers)]


def has_states(layers: nn.ModuleList) -> bool:
    """Return whether any of these layers keeps a state, which only a `RecurrentCache` has."""
    return any(hasattr(module, "_follows_trees") for module in layers.modules())


def new_cache(layers: nn.ModuleList, num_slots: int, *more: Any) -> KVCache:
    """Return a cache for a model of these layers, see `KVCache`."""
    return (RecurrentCache if has_states(layers) else KVCache)(len(layers), num_slots, *more)


def _follow(layer: nn.Module, index: int) -> bool:
    modules: Iterator[Any] = layer.modules()
    found = [module for module in modules if _follower_of(module.__class__) is not None]
    for module in found:
        module.__class__ = _follower_of(module.__class__)
        # linear attention has its decays in float32, by its config
        if hasattr(module, _DECAYS[0]):
            for name in _DECAYS:
                del module._buffers[name]
            with torch.device("cpu"):
                slope_H11 = module.get_slope_rate().float()
            module.register_buffer("decay_H", torch.exp(-slope_H11)[:, 0, 0], persistent=False)
        if hasattr(module, "rg_lru"):
            module.layer_idx = index  # which it is not told
            module.rg_lru._rnn_scan = _scan_channels
    return len(found) == 1


@lru_cache(maxsize=256)
def _follower_of(own: Any) -> Any:
    """Return a class like this one whose forward pass follows trees; None for any other."""
    forward = inspect.unwrap(own.forward)
    if not isinstance(forward, FunctionType):
        return None
    names = {*forward.__code__.co_names, *forward.__code__.co_varnames}
    if "get_linear_cache" in names and hasattr(own, "get_slope_rate"):
        return _subclass(own, _forward_by(_attend_linearly, Lightning()))
    if {"rg_lru", "conv1d_state"} <= names:
        return _subclass(own, _forward_by(_pass_gated, Gated()))
    if CONVOLUTION not in names:
        return None
    known = forward.__globals__
    kinds = [one for one in KINDS if one.scan in names and one.scan in known and one.step in known]
    is_convolution_alone = not kinds and not any(name in names for name in _MIXING)
    if CONVOLUTION not in known or len(kinds) != (not is_convolution_alone):
        return None
    replaced: dict[str, Any] = {CONVOLUTION: _convolve, "F": _WholeVectors()}
    recurrence = None
    for scan, step, kind in kinds:
        replaced[scan] = _scan
        recurrence = kind(_by_device(known[scan]), _by_device(known[step]))
    return _subclass(own, _forward_by(with_functions(forward, replaced), recurrence))


def with_functions(forward: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    """Return a function like a library's, for which other functions stand under these names."""
    known = {**forward.__globals__, **replaced}
    more = (forward.__name__, forward.__defaults__, forward.__closure__)
    clone = FunctionType(forward.__code__, known, *more)
    clone.__kwdefaults__ = forward.__kwdefaults__
    return clone


class _WholeVectors:
    """torch's functions on numbers, of which one is computed in whole vectors."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(functional, name)
        return partial(in_whole_vectors, function) if name == "softplus" else function


def _subclass(own: Any, forward: Callable[..., Any]) -> type[nn.Module]:
    more = {"forward": forward, "__module__": own.__module__, "_follows_trees": True}
    return type(own.__name__, (own,), more)


def _attend_linearly(self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Do what MiniMax's linear attention does to (1, T, D), whose scan is no function of its own."""
    num_rows = hidden_states.shape[1]
    heads = self.act_fn(self.qkv_proj(hidden_states))
    heads = heads.reshape(1, num_rows, self.num_attention_heads, 3 * self.head_dim)
    out = _scan(*heads.split(self.head_dim, dim=3), decay_H=self.decay_H)
    out = self.norm(out.reshape(1, num_rows, -1))
    out = torch.sigmoid(self.output_gate(hidden_states)) * out
    return self.out_proj(out), None


def _pass_gated(self: Any, hidden_states: Tensor, position_ids: Tensor, **_: Any) -> Any:
    """Do what RecurrentGemma's recurrent block does to (1, T, D), whose state it keeps in itself."""
    weight_CR = self.conv_1d.weight[:, 0]
    inner = _convolve(self.linear_x(hidden_states).transpose(1, 2), weight_CR, self.conv_1d.bias)
    inner = self.rg_lru(inner.transpose(1, 2), position_ids)
    return self.linear_out(inner * self.act_fn(self.linear_y(hidden_states))), None


def _scan_channels(**inputs: Any) -> tuple[Tensor, None]:
    """Stand in for RecurrentGemma's `_rnn_scan`, which would leave its state in the module."""
    inputs.pop("recurrent_states")
    return _scan(**inputs), None


def _by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the library's function; on a CPU its reference, whatever is installed."""
    reference = inspect.unwrap(function)

    @wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        one = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return (reference if one.device.type in ("cpu", "meta") else function)(*args, **kwargs)

    return call


def _forward_by(clone: Callable[..., Any], recurrence: Recurrence | None) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not args, "this family names what it hands on"
        cache = cache_in(kwargs)
        for name in LAYER_CACHES:
            kwargs.pop(name, None)
        kwargs.pop("attention_mask", None)  # which tells of padding, and there is none
        # this family does not hand on what its model was given
        if not isinstance(cache, PassCache):
            raise ValueError("it makes a cache of its own for its layers")
        assert cache.parts[-1].rows.stop == hidden_states.shape[1], "all rows of the pass"
        token = _RUNNING.set(_Running(self.layer_idx, cache.parts, recurrence))
        try:
            return clone(self, hidden_states, **kwargs)
        finally:
            _RUNNING.reset(token)

    return forward


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Stand in for transformers' `causal_conv1d_fn`: (1, C, T)."""
    running = _RUNNING.get()
    rows_TC = hidden_states[0].T
    outs = list[Tensor]()
    for part in running.parts:
        assert isinstance(part.cache, RecurrentCache), "layers with states have no other"
        own_TC = rows_TC[part.rows]
        outs.append(part.cache.convolve(running.layer, part.states, own_TC, weight, bias))
    out_TC = outs[0] if len(outs) == 1 else torch.cat(outs)
    out_TC = out_TC if activation is None else ACT2FN[activation](out_TC)
    return out_TC.to(hidden_states.dtype).T[None]


def _scan(*args: Any, **kwargs: Any) -> Any:
    """Stand in for transformers' function that reads a prompt."""
    running = _RUNNING.get()
    assert running.recurrence is not None, "a layer with a scan"
    inputs = running.recurrence.read(*args, **kwargs)
    outs = list[Tensor]()
    for part in running.parts:
        assert isinstance(part.cache, RecurrentCache), "layers with states have no other"
        own = inputs.part(part.rows)
        outs.append(part.cache.scan(running.layer, part.states, running.recurrence, own))
    return running.recurrence.give(outs[0] if len(outs) == 1 else torch.cat(outs))
