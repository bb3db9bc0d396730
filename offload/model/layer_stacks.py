"""The stacks of layers in a meta model, and models cut to some of their layers."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.cuts import Section
from offload.errors import UserError
from offload.families.types import INSEPARABLE
from offload.model.library import PreTrainedModel


def layer_stacks(meta_model: PreTrainedModel) -> list[nn.ModuleList]:
    """Return the decoder's layers, and an encoder's if there is one."""
    parts = [meta_model.get_decoder()]
    if meta_model.config.is_encoder_decoder:
        parts.append(meta_model.get_encoder())
    return [getattr(part, _stack_name(meta_model)) for part in parts]


def _stack_name(meta_model: PreTrainedModel) -> str:
    return "block" if meta_model.config.is_encoder_decoder else "layers"


@contextmanager
def cut_stack(meta_model: PreTrainedModel, kept: slice) -> Iterator[None]:
    """Within the body the decoder has only these layers; its config has their kinds."""
    decoder = meta_model.get_decoder()
    name = _stack_name(meta_model)
    layers = getattr(decoder, name)
    config = decoder.config
    kinds = getattr(config, "layer_types", None)
    try:
        setattr(decoder, name, layers[kept])
        _tell_kinds(config, kinds and kinds[kept])
        yield
    finally:
        setattr(decoder, name, layers)
        _tell_kinds(config, kinds)


def keep_section(checkpoint: Checkpoint, meta_model: PreTrainedModel, section: Section) -> None:
    """Leave the decoder only these layers, permanently, numbered from 0. Raises `UserError`."""
    config = meta_model.config
    decoder = meta_model.get_decoder()
    for name, reason in INSEPARABLE.items():
        if getattr(config, name, None):
            kind = f"{checkpoint.name}: model type {config.model_type}"
            requirement = f"cannot be divided by layers ({reason})"
            raise UserError(f"{kind} {requirement}: let one rank have all of it")
    kept = slice(section.first, section.last)
    layers = decoder.layers[kept]
    kinds = getattr(config, "layer_types", None)
    for module in layers.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= section.first
    decoder.layers = layers
    config.num_hidden_layers = len(layers)
    _tell_kinds(config, kinds and kinds[kept])


def _tell_kinds(config: Any, kinds: list[str] | None) -> None:
    """Set the config's kinds of layers; families that compute them otherwise ask their layers."""
    if kinds:
        with suppress(AttributeError):
            config.layer_types = kinds


class _Given(nn.Module):
    """Stands in for a decoder that has run: returns the given output."""

    def __init__(self, decoder: nn.Module, out: Any) -> None:
        super().__init__()
        self.__dict__.update(_decoder=decoder, _out=out)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_decoder"], name)


def head_alone(meta_model: PreTrainedModel, out: Any) -> PreTrainedModel:
    """Return a model that computes scores from a decoder's output; it shares all other modules."""
    decoder = meta_model.get_decoder()
    path = next(name for name, module in meta_model.named_modules() if module is decoder)
    if not path:
        return meta_model
    whole = _shallow(meta_model)
    above: nn.Module = whole
    *outer, last = path.split(".")
    for name in outer:
        inner = _shallow(above._modules[name])
        above._modules[name] = inner
        above = inner
    above._modules[last] = _Given(decoder, out)
    return whole


def _shallow(module: Any) -> Any:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
