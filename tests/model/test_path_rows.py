"""Models whose rows attend along their paths: the same logits as from dense masks; and one pass over several texts.

The reference of the kernel stands in its place here; that the kernel is its reference is shown in
test_path_attention.py. Each row of a text gets what it gets alone, and no text sees another.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from passes import causal
from rounding import Promise, assert_same_bits
from test_families import config_of, tiny_model
from tiny import FAMILIES, save
from torch import Tensor

import offload
from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.kernels.path_attention import PathRows, ScoreTerms, Window
from offload.model.invariant import BatchInvariantProducts
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.path_attention import path_attention
from offload.model.tree_model import Attend, TreeModel
from offload.trees.token_tree import ancestors
from offload.trees.topology import Topology

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


class Spy:
    def __init__(self) -> None:
        self.num_calls, self.windows = 0, set[Window]()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rows: PathRows, terms: ScoreTerms) -> Tensor:
        self.num_calls += 1
        self.windows.add(rows.window)
        return path_attention(query, key, value, rows, terms)


def config_named(family: str) -> Any:
    return FAMILIES[family]() if family in FAMILIES else config_of(family)


@cache
def checkpoint_of(family: str, base: Path) -> Path:
    return save(tiny_model(config_named(family)), base / family)


def model_of(family: str, base: Path, attend: Attend | None = None) -> TreeModel:
    model = resident_model(open_checkpoint(checkpoint_of(family, base)), "float32")
    model.set_attention_kernel(attend)
    return model


def logits_of_two_trees(model: TreeModel) -> Tensor:
    """A prompt longer than every window, and two trees behind it; of the second only the last rows are scored."""
    topology = Topology.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7])
    cache, token_N = KVCache(model.num_layers, 80), torch.arange(10, 21)
    model.forward(torch.arange(5, 45), torch.arange(40), causal(40), cache)
    cache.commit(range(40))
    both = []
    for num_logits in (11, 4):
        position_N = torch.from_numpy(topology.depth_N.copy()) + cache.length
        both.append(model.forward(token_N, position_N, ancestors(topology), cache, num_logits=num_logits))
        cache.commit([0, 1, 4])
    return torch.cat(both)


BY_PATH = ("llama", "qwen3-sliding", "mistral-sliding", "gemma3", "phi3", "diffllama", "deepseek_v3", "gemma3n_text",
           "gemma2", "gpt_oss")  # the last two with soft-capped scores, and with sinks  # fmt: skip
CROPPING = "gemma4_text"  # its last layers run on the rows to be scored alone


@pytest.mark.parametrize("family", [*BY_PATH, CROPPING])
def test_a_model_computes_the_same_along_paths(family: str, base: Path) -> None:
    spy = Spy()
    wanted, model = logits_of_two_trees(model_of(family, base)), model_of(family, base, spy)
    torch.testing.assert_close(logits_of_two_trees(model), wanted, **CLOSE)
    assert spy.num_calls >= 3 * model.num_layers and spy.windows == model.windows


def test_a_family_that_calculates_with_its_mask_keeps_it(base: Path) -> None:
    spy = Spy()
    wanted, model = logits_of_two_trees(model_of("doge", base)), model_of("doge", base, spy)
    assert model.attend is None
    assert_same_bits(logits_of_two_trees(model), wanted, Promise.INVARIANT)
    assert spy.num_calls == 0


TREE = Topology.from_parents([-1, 0, 0, 1, 1, 3])
TEXTS = [list(range(5, 5 + length)) for length in (41, 3, 70)]
CLOSER = {"rtol": 1e-4, "atol": 2e-5}


def prompt_of(text: list[int], cache: KVCache) -> BatchPart:
    return BatchPart(torch.tensor(text), torch.arange(len(text)), causal(len(text)), cache)


def tree_of(text: list[int], num_pending: int, cache: KVCache) -> BatchPart:
    """A tree behind a text whose last rows come in the same pass."""
    depth_N = torch.from_numpy(TREE.depth_N.copy()) + len(text)
    position_U = torch.cat([torch.arange(len(text) - num_pending, len(text)), depth_N])
    sees_NU = torch.cat([torch.ones(6, num_pending, dtype=torch.bool), ancestors(TREE)], dim=1)
    return BatchPart(torch.arange(20, 26) + len(text), position_U, sees_NU, cache)


def alone(model: TreeModel, text: list[int]) -> Tensor:
    """Logits after every node of a tree behind a text, which comes in a pass of its own."""
    cache = model.new_cache(100)
    model.forward_parts([prompt_of(text, cache)])
    cache.commit(range(len(text)))
    return model.forward_parts([tree_of(text, 0, cache)])


def together(model: TreeModel, lent: list[KVCache]) -> list[Tensor]:
    """Compute all texts in one pass; the first and the last bring their prompts along."""
    KVCache.side_by_side(lent)
    model.forward_parts([prompt_of(TEXTS[1], lent[1])])
    lent[1].commit(range(len(TEXTS[1])))
    prompts = [prompt_of(TEXTS[index], lent[index]) for index in (0, 2)]
    trees = [tree_of(text, 0 if index == 1 else len(text), lent[index]) for index, text in enumerate(TEXTS)]
    return list(model.forward_parts([*prompts, *trees], num_logits=18).split(6))


SHARING = ("llama", "qwen3-sliding", "gemma2", "gemma3", "phi3", "mixtral", "deepseek_v3", "gemma3n_text",
            "gemma4_text", "gpt_oss")  # fmt: skip


@pytest.mark.parametrize("family", SHARING)
def test_rows_of_several_texts_get_what_they_get_alone(family: str, base: Path) -> None:
    model = model_of(family, base)
    wanted = [alone(model, text) for text in TEXTS]
    model.share_passes()
    for got_NV, wanted_NV in zip(together(model, [model.new_cache(100) for _ in TEXTS]), wanted, strict=True):
        torch.testing.assert_close(got_NV, wanted_NV, **CLOSER)


def test_bits_stay_where_rows_are_invariant(base: Path) -> None:
    model = model_of("llama", base)
    model.set_batch_invariant(BatchInvariantProducts((1,)))
    wanted = [alone(model, text) for text in TEXTS]
    got = together(model, [model.new_cache(100) for _ in TEXTS])
    assert all(torch.equal(left, other) for left, other in zip(got, wanted, strict=True))


def test_masks_that_are_calculated_with_are_refused(base: Path) -> None:
    with pytest.raises(offload.UserError, match="`parallel` must be 1 for doge"):
        model_of("doge", base).share_passes()


def test_a_text_is_copied_to_another_place(base: Path) -> None:
    model, lent = model_of("llama", base), []
    lent.extend(model.new_cache(100) for _ in range(3))
    KVCache.side_by_side(lent)
    model.forward_parts([prompt_of(TEXTS[0], lent[2])])
    lent[2].commit(range(41))
    lent[0].copy_from(lent[2], 41)
    got = [model.forward_parts([tree_of(TEXTS[0], 0, cache)]) for cache in (lent[0], lent[2])]
    assert torch.equal(*got) and lent[0].length == 41
