"""Models whose rows attend along their paths: the same logits and the same tokens as from dense masks.

The reference of the kernel stands in its place here; that the kernel is its reference is shown in
test_path_attention.py.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import Promise, assert_same_bits
from test_families import config_of, tiny_model
from tiny import FAMILIES, save
from torch import Tensor

from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.build import resident_model
from offload.kernels.path_attention import PathRows, ScoreTerms, Window
from offload.model.kv_cache import KVCache
from offload.model.path_attention import path_attention
from offload.model.streamed import Attend, StreamedModel
from offload.trees.token_tree import ancestors
from offload.trees.topology import Topology

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


class Spy:
    """The reference, counting calls."""

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
