"""Kernels that one layer launches on a GPU, counted on a card that is not there.

Each takes the host some microseconds, whatever it computes. Attention is one of them, for any rows behind any prefix.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import matrix
from strict_place import OnCard, StrictDevice, place
from test_families import HYBRIDS, INDEXED, WORKING
from test_path_rows import checkpoint_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.kernels.path_attention import PathRows, ScoreTerms
from offload.model import invariant as invariance
from offload.model.invariant import InvariantRows
from offload.model.norms import set_norm_kernel
from offload.model.path_attention import path_attention
from offload.model.tree_model import Attend, TreeModel
from offload.trees.token_tree import ancestors
from offload.trees.topology import DEFAULT_ACCEPTANCE, best_first

# Recurrent layers take as many steps as a tree has levels; what goes by an index is attended to by torch.
ATTENDING = tuple(family for family in WORKING if family not in HYBRIDS and family not in INDEXED)
NO_LAUNCH = ("aten::empty", "aten::new_empty")


class Counting(StrictDevice):
    """Also counts what is launched, by name: what writes anything, and what hands out numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name, given = func._schema.name, (args, kwargs or {})
        storages = {one.held.untyped_storage().data_ptr() for one in tree_leaves(given) if isinstance(one, OnCard)}
        made = [one for one in tree_leaves(out) if isinstance(one, OnCard)]
        is_view = not func._schema.is_mutable and all(one.held.untyped_storage().data_ptr() in storages for one in made)
        if made and not is_view and not name.startswith(NO_LAUNCH):
            self.launches[name] += 1
        return out


class Sized(InvariantRows):
    """With what a trial may find on a GPU."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__((1,))
        self._sizes = sizes

    def _sizes_of(self, *_: Any, **__: Any) -> tuple[int, ...]:
        return self._sizes


def launches_of(
    model: TreeModel, card: Counting, num_rows: int, num_prefix: int, slow: Attend | None = None
) -> Counter[str]:
    """The most that a layer launches; with kernels, or with slow attention and the family's own norms."""
    most = Counter[str]()

    def one(name: str, like: Tensor, *shape: int) -> Tensor:
        """What one launch of a kernel writes: numbers, since routers refuse what memory may hold."""
        seen = card.launches.copy()
        out = like.new_zeros(shape)
        card.launches.clear()
        card.launches.update({**seen, name: seen[name] + 1})
        return out

    def attend(query: Tensor, key: Tensor, value: Tensor, rows: PathRows, terms: ScoreTerms) -> Tensor:
        return one("attention", query, query.shape[1], query.shape[0], value.shape[2])

    def begin(*_: Any) -> None:
        card.launches.clear()

    def end(*_: Any) -> None:
        nonlocal most
        most = max(most, card.launches.copy(), key=Counter.total)

    def normalize(rows: Tensor, *_: Any) -> Tensor:
        return one("norm", rows, *rows.shape)

    model.set_attention_kernel(slow or attend)
    set_norm_kernel(model.meta_model, None if slow else normalize)
    hooks = [layer.register_forward_pre_hook(begin) for layer in model._layers]
    hooks += [layer.register_forward_hook(end) for layer in model._layers]
    cache = model.new_cache(num_prefix + num_rows)
    cache.length = num_prefix
    sees = ancestors(best_first(DEFAULT_ACCEPTANCE, num_rows, 24)) if num_rows > 1 else torch.ones(1, 1).bool()
    position_T = sees.sum(1) - 1 + num_prefix
    model.forward(torch.ones(num_rows, dtype=torch.long), position_T, sees, cache, num_logits=1)
    for hook in hooks:
        hook.remove()
    return most


# What a trial may find: that cuBLAS gives a row the same bits in each of these, or in none but the first.
ALL_SIZES, FIRST_SIZE = (256, 512, 1024, 2048), (256,)
CALLS = [(1, 4000), (64, 1024), (768, 128), (2048, 1024)]
MOST = 60
# Layers that are more than attention and a few products: routed experts, one product for each, and gated inputs.
MIXED = re.compile("expert|moe|laurel")
LATENT = ("minicpm3", "youtu")  # has more products
MASKED = ("doge",)  # calculates with its masks
FEW_LAUNCHES = ("llama", "qwen2", "qwen3", "qwen3-sliding", "gemma2", *ATTENDING)


@matrix("family", [one for one in FEW_LAUNCHES if one not in MASKED], always=["llama"], daily=5)
def test_a_layer_launches_few_kernels(family: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its rows and its prefix are, and one of them is attention."""
    monkeypatch.setattr(invariance, "_LEAST_WIDTH", 1)  # nothing of a real model is so narrow that it is padded
    with Counting() as card:
        checkpoint = open_checkpoint(checkpoint_of(family, base))
        model = resident_model(checkpoint, "bfloat16", place())
        is_mixed = any(map(MIXED.search, checkpoint.tensors))
        for sizes in (ALL_SIZES, FIRST_SIZE):
            model.set_batch_invariant(Sized(sizes))
            for num_rows, num_prefix in CALLS:
                found = launches_of(model, card, num_rows, num_prefix)
                assert found["attention"] == 1 + (family == "diffllama"), "which has two a layer"
                is_first = sizes == FIRST_SIZE and num_rows >= (768 if family in LATENT else 2048)
                if not is_mixed and not is_first:
                    assert found.total() <= MOST, (num_rows, num_prefix, sizes, dict(found))


def test_what_eager_operations_launch_is_counted(base: Path) -> None:
    """Planted: attention along paths as a CPU computes it, and norms as transformers does."""
    with Counting() as card:
        model = resident_model(open_checkpoint(checkpoint_of("llama", base)), "bfloat16", place())
        eager = launches_of(model, card, 768, 256, path_attention)
        few = launches_of(model, card, 768, 256)
        assert few.total() <= MOST < eager.total() / 2, dict(eager)
