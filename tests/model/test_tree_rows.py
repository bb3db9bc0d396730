"""Models that are told in bits what their rows see: the same logits and the same tokens as from dense masks.

The reference of the kernel stands behind the bits here; that the kernel is its reference is shown in
test_tree_attention.py.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_graphs import Calls, passes
from test_families import config_of, tiny_model
from test_tiny import prompts
from tiny import FAMILIES, build, save, save_pair
from torch import Tensor, nn

import offload
from offload.calibration.kernel_selection import KernelChoice
from offload.checkpoint.safetensors import open_checkpoint
from offload.engine import load as loading
from offload.engine.build import resident_model
from offload.kernels.registry import REFERENCES
from offload.kernels.tree_attention import MAX_WIDTH, Sight, Window, tree_attention_reference
from offload.model import cuda_graphs as graphed
from offload.model.attention import Attend, folded_attention, is_for_rows, tree_mask, tree_rows
from offload.model.cuda_graphs import Graphs
from offload.model.kv_cache import KVCache
from offload.model.weights import StreamedModel
from offload.tree.token_tree import ancestors
from offload.tree.topology import Topology

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


class Spy:
    """The reference, counting calls; a test may change what it is told."""

    def __init__(self, **changes: Any) -> None:
        self.num_calls, self.windows, self._changes = 0, set[Window](), changes

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, *, scaling: float) -> Tensor:
        self.num_calls += 1
        self.windows.add(sight.window)
        told = sight._replace(window=self._changes.get("window", sight.window))
        return tree_attention_reference(query, key, value, told, scaling=self._changes.get("scaling", scaling))


def without_an_ancestor(query: Tensor, key: Tensor, value: Tensor, sight: Sight, *, scaling: float) -> Tensor:
    """The first uncommitted row is lost to the last."""
    wrong_TW = sight.seen_TW.clone()
    wrong_TW[-1, 0] &= ~1
    return tree_attention_reference(query, key, value, sight._replace(seen_TW=wrong_TW), scaling=scaling)


def config_named(family: str) -> Any:
    return FAMILIES[family]() if family in FAMILIES else config_of(family)


@cache
def checkpoint_of(family: str, base: Path) -> Path:
    return save(tiny_model(config_named(family)), base / family)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model_of(family: str, base: Path, attend: Attend | None = None) -> StreamedModel:
    model = resident_model(open_checkpoint(checkpoint_of(family, base)), "float32")
    model.attend_with(attend)
    return model


def logits_of_two_trees(model: StreamedModel) -> Tensor:
    """A prompt longer than every window, and two trees behind it; of the second only the last rows are scored."""
    topology = Topology.from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7])
    cache, token_N = KVCache(model.num_layers, 80), torch.arange(10, 21)
    chain_TT = torch.ones(40, 40, dtype=torch.bool).tril()
    model.forward(torch.arange(5, 45), torch.arange(40), chain_TT, cache)
    cache.commit(range(40))
    both = []
    for num_logits in (11, 4):
        position_N = torch.from_numpy(topology.depth_N.copy()) + cache.length
        both.append(model.forward(token_N, position_N, ancestors(topology), cache, num_logits=num_logits))
        cache.commit([0, 1, 4])
    return torch.cat(both)


IN_BITS = ("llama", "qwen3-sliding", "mistral-sliding", "gemma3", "phi3", "diffllama", "deepseek_v3", "gemma3n_text")
CROPPING = "gemma4_text"  # its last layers run on the rows to be scored alone
DENSE = ("gemma2", "gpt_oss", "doge")  # soft-capped scores, sinks, masks that are calculated with


@pytest.mark.parametrize("family", [*IN_BITS, CROPPING])
def test_a_model_computes_the_same_from_bits(family: str, base: Path) -> None:
    spy = Spy()
    wanted, model = logits_of_two_trees(model_of(family, base)), model_of(family, base, spy)
    torch.testing.assert_close(logits_of_two_trees(model), wanted, **CLOSE)
    assert spy.num_calls >= 3 * model.num_layers and spy.windows == model.windows


@pytest.mark.parametrize("family", DENSE)
def test_families_that_bits_would_not_do_for_keep_their_masks(family: str, base: Path) -> None:
    spy = Spy()
    wanted, model = logits_of_two_trees(model_of(family, base)), model_of(family, base, spy)
    assert not is_for_rows(model.meta_model.config)
    assert torch.equal(logits_of_two_trees(model), wanted)
    assert spy.num_calls == 0


def test_a_family_that_calculates_with_its_mask_cannot_go_on_with_bits(base: Path) -> None:
    """Were it not known by its name, it would fail and not compute something else."""
    model = model_of("doge", base)
    model._attend = Spy()
    with pytest.raises((AttributeError, TypeError)):
        logits_of_two_trees(model)


MISTAKES: dict[str, tuple[str, Attend]] = {
    "an ancestor lost": ("llama", without_an_ancestor),
    "no window": ("mistral-sliding", Spy(window=None)),
    "a window one wider": ("qwen3-sliding", Spy(window=25)),
    "another scale": ("gemma3", Spy(scaling=0.1)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_would_show(name: str, base: Path) -> None:
    family, attend = MISTAKES[name]
    wanted, got = (logits_of_two_trees(model_of(family, base, one)) for one in (None, attend))
    assert (got - wanted).abs().max() > 10 * CLOSE["atol"]


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma3"])
def test_decoding_from_bits_writes_the_same_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = save_pair(FAMILIES[family](), tmp_path)
    spy, results = Spy(), []
    for attend in (None, spy):
        kernels = REFERENCES._replace(tree_attention=attend)
        monkeypatch.setattr(loading, "_pick_kernels", lambda *_, kernels=kernels: KernelChoice(kernels, ()))
        with offload.load(target, draft, ram="1GiB", context=128, tree="24x6", threads=1) as decoder:
            for sampling in ({}, {"temperature": 0.8, "seed": 2}):
                results.append(decoder.generate(prompts()[1], max_new_tokens=30, **sampling).token_ids)
    assert results[:2] == results[2:] and results[0] != results[1]
    assert spy.num_calls, "the kernel's place was never asked"


def test_heads_too_wide_for_the_kernel_get_the_mask_that_the_bits_stand_for() -> None:
    generator, spy = torch.Generator().manual_seed(4), Spy()
    topology = Topology.from_parents([-1, 0, 0, 1, 1, 2])
    what = (9, torch.from_numpy(topology.depth_N.copy()) + 9, ancestors(topology), 4)
    mask, rows = tree_mask(*what, torch.float32), tree_rows(*what, spy)
    for width, num_calls in ((MAX_WIDTH, 1), (MAX_WIDTH + 8, 1)):
        query, key, value = (torch.randn(1, n, m, width, generator=generator) for n, m in ((4, 6), (2, 15), (2, 15)))
        for lo in (0, 3):  # or the last rows alone
            want, _ = folded_attention(nn.Module(), query[:, :, lo:], key, value, mask[:, :, lo:], scaling=0.2)
            got, _ = folded_attention(nn.Module(), query[:, :, lo:], key, value, rows, scaling=0.2)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert spy.num_calls == 2 * num_calls, "the widest that the kernel takes, and no wider"


def test_recorded_passes_keep_dense_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording reads its masks anew at each replay, while a prefix's length would be fixed in it."""
    monkeypatch.setattr(graphed, "WIDTHS", (2, 5, 12))
    checkpoint, spy = open_checkpoint(save(build(FAMILIES["qwen3-sliding"]()), tmp_path)), Spy()
    plain, replayed = (resident_model(checkpoint, "float32") for _ in range(2))
    replayed.replay_with(Graphs(replayed, Calls))
    replayed.attend_with(spy)
    wanted, got = (passes(model, KVCache(model.num_layers, 65)) for model in (plain, replayed))
    for theirs, ours in zip(wanted, got, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert spy.num_calls == plain.num_layers, "the prompt alone, which is wider than any recording"
