"""Passes over a model that is there: a tree behind what is committed, or a text, at once or in pieces."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from offload.model.tree_model import TreeModel
from offload.streaming.disk import DiskReader


def causal(num_rows: int) -> Tensor:
    """Each row sees itself and those before it."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()


def sees(parents: Sequence[int]) -> Tensor:
    """Each node sees its own path."""
    sees_NN = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees_NN[node] |= sees_NN[parent]
    return sees_NN


def with_weights(model: TreeModel) -> TreeModel:
    """Bind all of them where it computes, layer by layer."""
    with closing(DiskReader(model.checkpoint.shards)) as store:
        model.read_rest(store.fetch)
        for layer, layout in enumerate(model.layer_layouts):
            model.bind_layer(layer, store.fetch(layout))
    return model


def tree_scores(model: TreeModel, cache: Any, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """One pass over a tree behind what is committed."""
    sees_NN = sees(parents)
    return model.forward(torch.tensor(tokens), sees_NN.sum(1) - 1 + cache.length, sees_NN, cache)


def text_scores(
    model: TreeModel, token_T: Tensor, cuts: Sequence[int] = (), begin: Callable[[int], object] = lambda _: None
) -> Tensor:
    """A text that is taken in by passes of these numbers of rows; `begin` is told of each."""
    cache, parts = model.new_cache(len(token_T)), []
    for part_T in token_T.split([*cuts] or len(token_T)):
        num_rows = len(part_T)
        begin(num_rows)
        parts.append(model.forward(part_T, torch.arange(num_rows) + cache.length, causal(num_rows), cache))
        cache.commit(range(num_rows))
    return torch.cat(parts)
