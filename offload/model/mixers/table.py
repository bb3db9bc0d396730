"""Which mixers there are, and how a library's are found in a model and replaced.

A module is recognised by the names and shapes of its parameters, which are those that a checkpoint
states, and what no parameter tells comes from config.json. A layer whose mixer is of no kind here
is left alone, and refused by `meta.py` where it keeps a state.
"""

from typing import Any

from torch import nn

from offload.model.kv_cache import KVCache
from offload.model.mixers.base import Mixer
from offload.model.mixers.gated_delta import (
    ChannelDelta,
    FusedDelta,
    OlmoDelta,
    PlainChannelDelta,
    SplitDelta,
)
from offload.model.mixers.lightning import Lightning
from offload.model.mixers.mamba import Mamba
from offload.model.mixers.mamba2 import Mamba2
from offload.model.mixers.rg_lru import RgLru
from offload.model.mixers.short_conv import ShortConv
from offload.model.mixers.zamba import ZambaMamba
from offload.model.recurrent_cache import RecurrentCache

MIXERS = (
    SplitDelta,
    FusedDelta,
    OlmoDelta,
    ChannelDelta,
    PlainChannelDelta,
    Mamba2,
    Mamba,
    Lightning,
    RgLru,
    ShortConv,
    ZambaMamba,
)


def replace_mixers(layers: nn.ModuleList, config: Any) -> list[bool]:
    """Put mixers of ours in place of a library's; return which layers have one.

    Raises `KeyError` for what config.json lacks.
    """
    return [_replace(layer, config, index) for index, layer in enumerate(layers)]


def _replace(layer: nn.Module, config: Any, index: int) -> bool:
    """Replace the mixers of a layer; one that has several does not follow trees."""
    num_mixers = 0
    for parent in [*layer.modules()]:
        for name, child in [*parent.named_children()]:
            kind = kind_of(child)
            if kind is not None:
                setattr(parent, name, kind(child, config, index))
                num_mixers += 1
    return num_mixers == 1


def kind_of(module: nn.Module) -> type[Mixer] | None:
    """Return the kind of mixer that a library's module is; None for any other module."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    return next((kind for kind in MIXERS if shapes and kind.fits(shapes)), None)


def mixers_of(layers: nn.ModuleList) -> list[Mixer]:
    """Return the mixers that keep a state, layer by layer."""
    return [module for module in layers.modules() if isinstance(module, Mixer)]


def has_states(layers: nn.ModuleList) -> bool:
    """Return True if any of these layers keeps a state, which only a `RecurrentCache` has."""
    return bool(mixers_of(layers))


def new_cache(layers: nn.ModuleList, num_slots: int, *placement: Any) -> KVCache:
    """Return a cache for a model of these layers, see `KVCache`."""
    return (RecurrentCache if has_states(layers) else KVCache)(len(layers), num_slots, *placement)
