"""Where the parameters of a meta model hang, and what a slab has of one.

Invariant: a view is as wide as its parameter and lies inside of the slab, for any part of it that
was sent.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from offload.checkpoint.layout import SlabLayout
from offload.encoding.base import STORED

Value = TypeVar("Value")


class ParameterPlace(NamedTuple):
    """The attribute of one parameter or saved buffer, and its value between layers."""

    table: dict[str, Tensor | None]
    key: str
    empty: Tensor
    # the module that it belongs to
    module: nn.Module


def parameter_places(meta_model: nn.Module) -> dict[str, ParameterPlace]:
    """Return the place of every parameter and saved buffer, by its name."""
    places = {}
    for prefix, module in meta_model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                is_saved = key not in module._non_persistent_buffers_set
                if tensor is not None and is_saved:
                    places[f"{dot}{key}"] = ParameterPlace(table, key, tensor, module)
    return places


def tables_around(meta_model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Embedding]:
    """Return the embeddings around the layers: some families have a second one that is larger."""
    inside = {module for layer in layers for module in layer.modules()}
    return [
        module
        for module in meta_model.modules()
        if isinstance(module, nn.Embedding) and module not in inside
    ]


def share(
    theirs: Iterable[tuple[str, ParameterPlace]],
    borrowers: Iterable[tuple[str, ParameterPlace]],
    device: torch.device,
) -> None:
    """Let places, by sources, have another model's tensors, copied to `device` once if need be."""
    tensors: dict[str, Tensor] = {}
    for source, place in theirs:
        tensor = place.table[place.key]
        assert tensor is not None, "theirs are bound"
        if source not in tensors or tensor.device == device:
            tensors[source] = tensor
    tensors = {source: tensor.to(device) for source, tensor in tensors.items()}
    for source, place in borrowers:
        place.table[place.key] = tensors[source]


def below(mapping: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Return the entries whose names have this prefix, by their names without it."""
    under_prefix = {name: value for name, value in mapping.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in under_prefix.items()}


def view_of(sent: Tensor, layout: SlabLayout, name: str) -> Tensor:
    """Return a parameter's numbers in what was sent of a slab."""
    placed = layout.parameters[name]
    return STORED[placed.dtype].decode(sent[layout.within_sent(placed)], placed.shape)
