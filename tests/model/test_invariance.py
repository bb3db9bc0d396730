"""Bit for bit: a row's logits are those of plain decoding, whatever tree, cut of the prompt or number of threads.

On this processor: how many rows a product needs is found by the same check that loading makes, and a family that it
refuses is skipped with its reason.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import matrix
from rounding import Promise, assert_same_bits
from test_families import WORKING
from test_invariance_check import invariance_of
from test_path_rows import checkpoint_of
from tiny import FAMILIES, VOCAB_SIZE
from torch import Tensor

from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.model import path_attention
from offload.model.invariant import BatchInvariantProducts
from offload.model.kv_cache import KVCache
from offload.model.row_sizes import find_sizes
from offload.model.tree_model import TreeModel
from offload.trees.token_tree import ancestors
from offload.trees.topology import Topology, chain

NUM_TOKENS = 84  # beyond one block of keys and three windows
TEXT = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
CUTS = ((NUM_TOKENS,), (13, 51, 20))


def invariant_model(family: str, dtype: str, base: Path) -> TreeModel:
    """Resident, with what the check at load finds for its first layer."""
    folder = checkpoint_of(family, base)
    invariance = invariance_of(folder, dtype=dtype, context=NUM_TOKENS)
    if not invariance.holds:
        pytest.skip(f"this processor: {invariance.reason}")
    model = resident_model(open_checkpoint(folder), dtype)
    model.set_batch_invariant(BatchInvariantProducts(invariance.thread_counts))
    return model


def score(model: TreeModel, cache: KVCache, tokens: list[int], topology: Topology) -> Tensor:
    position_N = torch.from_numpy(topology.depth_N.copy()) + cache.length
    return model.forward(torch.tensor(tokens), position_N, ancestors(topology), cache)


def taken_in(model: TreeModel, cut: tuple[int, ...]) -> Tensor:
    cache, parts, lo = model.new_cache(2 * NUM_TOKENS), [], 0
    for size in cut:
        parts.append(score(model, cache, TEXT[lo : lo + size], chain(size - 1)))
        cache.commit(range(size))
        lo += size
    return torch.cat(parts)


def scattered(num_prefix: int) -> tuple[Topology, list[int], list[int]]:
    """A tree behind `num_prefix` tokens with the rest of the text as one of its paths, at any place of its levels."""
    chance = torch.Generator().manual_seed(num_prefix)
    parents, tokens, path, level = [-1], [TEXT[num_prefix]], [0], [0]
    for token in TEXT[num_prefix + 1 : num_prefix + 24]:
        width = int(torch.randint(1, 5, (1,), generator=chance))
        others = [(level[int(torch.randint(len(level), (1,), generator=chance))], -1) for _ in range(width - 1)]
        children = sorted([(path[-1], token), *others])
        level = list(range(len(tokens), len(tokens) + width))
        path.append(level[next(i for i, child in enumerate(children) if child[1] == token)])
        parents += [parent for parent, _ in children]
        tokens += [3 + len(tokens) if token < 0 else token for _, token in children]
    return Topology.from_parents(parents), tokens, path


def on_path(model: TreeModel, num_prefix: int) -> Tensor:
    cache = model.new_cache(3 * NUM_TOKENS)
    score(model, cache, TEXT[:num_prefix], chain(num_prefix - 1))
    cache.commit(range(num_prefix))
    topology, tokens, path = scattered(num_prefix)
    return score(model, cache, tokens, topology)[path]


CASES = [(family, "bfloat16") for family in (*FAMILIES, *WORKING)]
CASES += [(family, "float32") for family in ("llama", "qwen3-sliding", "gemma2", "gpt_oss", "mixtral")]


ALWAYS = [("llama", "bfloat16"), ("llama", "float32"), ("gemma2", "bfloat16"), ("gpt_oss", "bfloat16")]


@matrix("family, dtype", CASES, always=ALWAYS, daily=6)
def test_logits_do_not_depend_on_the_rows_beside(family: str, dtype: str, base: Path) -> None:
    model = invariant_model(family, dtype, base)
    plain = taken_in(model, (1,) * NUM_TOKENS)
    assert [int((taken_in(model, cut) != plain).sum()) for cut in CUTS] == [0] * len(CUTS)
    assert_paths_are(plain, model)


def assert_paths_are(plain: Tensor, model: TreeModel) -> None:
    for num_prefix in (1, 40, 58):  # with paths before, across and beyond the end of the first block
        got = on_path(model, num_prefix)
        wanted = plain[num_prefix : num_prefix + len(got)]
        assert_same_bits(got, wanted, Promise.INVARIANT, f"behind {num_prefix} tokens")


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_float16_and_other_numbers_of_threads(family: str, base: Path) -> None:
    model = invariant_model(family, "float16", base)
    plain = taken_in(model, (1,) * NUM_TOKENS)
    assert_same_bits(on_path(model, 40), plain[40:64], Promise.INVARIANT)
    torch.set_num_threads(2)
    assert_same_bits(on_path(model, 40), plain[40:64], Promise.INVARIANT)


def test_attention_by_products_of_torch_has_the_same_bits(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no machine code can be, and on a GPU without a kernel."""
    monkeypatch.setattr(path_attention, "can_attend", lambda *_: False)
    model = invariant_model("llama", "float32", base)
    assert_paths_are(taken_in(model, (1,) * NUM_TOKENS), model)


def test_values_that_no_row_sees_do_no_harm(base: Path) -> None:
    """What an abandoned pass left behind may be no number."""
    model = invariant_model("llama", "float32", base)
    cache = model.new_cache(3 * NUM_TOKENS)
    score(model, cache, TEXT[:50], chain(49))
    with torch.inference_mode():
        for layer in range(cache.num_layers):
            for states in cache.layer_states(layer).values():
                states[:, :, 20:] = torch.nan
    cache.commit(range(20))
    assert_same_bits(score(model, cache, TEXT[20:40], chain(19)), taken_in(model, (20, 20))[20:], Promise.INVARIANT)


def test_products_of_attention_are_tried_bare(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model's own pass: a trial of what the mode makes would find that everything is the same."""
    begun, ended = [], []

    def noting(multiply: Any, factor: Tensor, *args: Any, **options: Any) -> tuple[int, ...]:
        assert len(begun) == len(ended), "a trial within a trial"
        begun.append(factor.ndim)
        sizes = find_sizes(multiply, factor, *args, **options)
        ended.append(factor.ndim)
        return sizes

    monkeypatch.setattr("offload.model.invariant.find_sizes", noting)
    monkeypatch.setattr(path_attention, "can_attend", lambda *_: False)
    model = resident_model(open_checkpoint(checkpoint_of("llama", base)), "float32")
    model.set_batch_invariant(BatchInvariantProducts([1]))
    taken_in(model, CUTS[0])
    assert set(begun) == {2, 3}


@pytest.mark.always
def test_layers_that_a_trial_has_cut_off_become_invariant_as_well(base: Path) -> None:
    model = resident_model(open_checkpoint(checkpoint_of("llama", base)), "bfloat16")
    invariant = BatchInvariantProducts([1])
    with model.cut_to(slice(0, 1)):
        model.set_batch_invariant(invariant)
    multiply = [module for module in model.meta_model.modules() if hasattr(module, "products")]
    assert len(multiply) > 1
    assert all(module.products is invariant for module in multiply)


def test_rows_that_are_widened_lie_apart() -> None:
    """Where the next row does not share a vector of numbers with it, each is computed alone on any processor."""
    row_TK = torch.randn(3, 13, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide_TK = BatchInvariantProducts((1,)).widen(row_TK)
    assert torch.equal(wide_TK, row_TK.float()) and wide_TK.stride(0) == 64
