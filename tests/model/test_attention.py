"""Masks against their definition, and folded attention against the formula."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from matrix import matrix
from passes import causal
from plans import model_shape
from test_families import tiny_model
from test_logits import Peak
from tiny import FAMILIES, save
from torch import Tensor, nn

from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.kernels.path_attention import AttentionChunk, Window
from offload.model import attention, wide_products
from offload.model.attention import folded_attention, tree_mask
from offload.model.kv_cache import KVCache
from offload.trees.token_tree import ancestors
from offload.trees.topology import Topology

SIZES = (1, 3, 8, 100)
TREES = {"root": [-1], "chain": [-1, 0, 1, 2, 3], "bush": [-1, 0, 0, 0, 1, 1, 3, 4, 4, 6], "star": [-1, 0, 0, 0, 0]}


def is_seen(topology: Topology, row: int, node: int) -> bool:
    """By definition: the node is the row itself or one of its forebears."""
    while row >= 0:
        if row == node:
            return True
        row = int(topology.parent_N[row])
    return False


@matrix("window", [None, *SIZES, *map(AttentionChunk, SIZES)], always=[None, 3], daily=2)
@matrix("num_prefix", [0, 1, 7, 20], always=[7], daily=1)
@pytest.mark.parametrize("name", TREES)
def test_masks_are_what_they_are_defined_to_be(name: str, num_prefix: int, window: Window) -> None:
    topology = Topology.from_parents(TREES[name])
    position_N = torch.from_numpy(topology.depth_N.copy()) + num_prefix
    mask = tree_mask(num_prefix, position_N, ancestors(topology), window, torch.float32)
    assert mask.shape == (1, 1, topology.num_nodes, num_prefix + topology.num_nodes)
    for row, column in product(range(topology.num_nodes), range(num_prefix + topology.num_nodes)):
        is_prefix = column < num_prefix
        key_position = column if is_prefix else int(position_N[column - num_prefix])
        own_position = int(position_N[row])
        if isinstance(window, AttentionChunk):
            is_near = key_position // window.size == own_position // window.size
        else:
            is_near = window is None or own_position - key_position < window
        is_open = is_near and (is_prefix or is_seen(topology, row, column - num_prefix))
        assert mask[0, 0, row, column] == (0 if is_open else torch.finfo(torch.float32).min), f"{row}, {column}"


def test_a_pass_over_the_last_level_masks_those_rows_only_in_the_type_of_the_scores() -> None:
    """T rows of U: a drafter's level sees the levels that earlier passes have left in the cache."""
    topology = Topology.from_parents(TREES["bush"])
    position_N = torch.from_numpy(topology.depth_N.copy()) + 5
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = tree_mask(5, position_N, ancestors(topology), 4, dtype)
        level = tree_mask(5, position_N, ancestors(topology)[-4:], 4, dtype)
        assert torch.equal(level, whole[:, :, -4:])
        assert whole.dtype == dtype and {*whole.unique().tolist()} == {0, torch.finfo(dtype).min}


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """softmax(q k / sqrt(K) + mask) v in float64, each query head with the key/value head of its group."""
    group = query.shape[1] // key.shape[1]
    key, value = (states.double().repeat_interleave(group, dim=1) for states in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    weights = (scores if mask is None else scores + mask.double()).softmax(dim=-1)
    return (weights @ value).transpose(1, 2)


def states(num_heads: int, num_groups: int, num_rows: int, num_keys: int, *, value_width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_heads * 100 + num_keys)
    shapes = [(num_heads, num_rows, 16), (num_groups, num_keys, 16), (num_groups, num_keys, value_width)]
    return [torch.randn(1, *shape, generator=generator) for shape in shapes]


def random_mask(num_heads: int, num_rows: int, num_keys: int) -> Tensor:
    open_ = torch.rand(1, num_heads, num_rows, num_keys, generator=torch.Generator().manual_seed(1)) < 0.6
    open_[..., 0] = True
    return torch.zeros(open_.shape).masked_fill(~open_, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("mask_heads", [None, 1, 4])
@pytest.mark.parametrize("num_groups", [4, 2, 1], ids=lambda g: f"group{4 // g}")
def test_folding_changes_nothing(num_groups: int, mask_heads: int | None, num_rows: int) -> None:
    query, key, value = states(4, num_groups, num_rows, 21)
    mask = None if mask_heads is None else random_mask(mask_heads, num_rows, 21)
    got, weights = folded_attention(nn.Module(), query, key, value, mask, scaling=0.3)
    assert weights is None and got.shape == (1, num_rows, 4, 16)
    torch.testing.assert_close(got, eager(query, key, value, mask, 0.3).float(), atol=1e-6, rtol=1e-5)
    assert got.is_contiguous(), "some families take a view of it"


def test_a_pass_repeats_its_mask_for_grouped_heads_once_for_all_layers(tmp_path: Path) -> None:
    model = resident_model(open_checkpoint(save(tiny_model(FAMILIES["llama"]()), tmp_path)), "float32")
    config = model.meta_model.config
    assert model.num_layers > 1 and config.num_attention_heads > config.num_key_value_heads
    cache = KVCache(model.num_layers, 12)
    before = attention._repeated.cache_info()
    for _ in range(3):
        model.forward_chain(torch.arange(4), cache)
        cache.commit(range(4))
    after = attention._repeated.cache_info()
    assert after.misses - before.misses == 3, "one for each pass, whose mask is its own"
    assert after.hits - before.hits == 3 * (model.num_layers - 1)


def test_keys_and_values_may_differ_in_width_and_the_default_scale_is_the_usual_one() -> None:
    for (query, key, value), scale in ((states(4, 2, 3, 10, value_width=12), 0.25), (states(2, 1, 3, 10), None)):
        got, _ = folded_attention(nn.Module(), query, key, value, None, **({"scaling": scale} if scale else {}))
        wanted = eager(query, key, value, None, scale or 1 / math.sqrt(16)).float()
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("term", ["softcap", "s_aux", "position_bias"])
def test_what_would_change_the_scores_is_refused(term: str) -> None:
    query, key, value = states(2, 1, 1, 4)
    folded_attention(nn.Module(), query, key, value, None, **{term: None, "dropout": 0.0, "sliding_window": 3})
    with pytest.raises(UserError, match=f"do not support attention with {term}"):
        folded_attention(nn.Module(), query, key, value, None, **{term: torch.ones(1)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3", "gemma2"])
def test_what_lies_between_rows_and_positions_was_planned(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mask or two, and where attention is not fused the scores of all heads."""
    monkeypatch.setattr(attention, "_MAX_MASK_BYTES", 0)  # a mask is repeated for heads as far as that is little
    monkeypatch.setattr(wide_products, "_MASK_BYTES", 0)  # and widened within a scratch that is planned elsewhere
    checkpoint = open_checkpoint(save(tiny_model(FAMILIES[family]()), tmp_path))
    model, num_rows, num_prefix = resident_model(checkpoint, dtype), 150, 230
    cache = KVCache(model.num_layers, num_prefix + num_rows)
    for count in (num_prefix, num_rows):
        with Peak(num_prefix + num_rows) as peak:
            position_T = torch.arange(count) + cache.length
            model.forward(torch.zeros(count).long(), position_T, causal(count), cache, num_logits=1)
        cache.commit(range(count))
    planned_bytes = model_shape(checkpoint, dtype).pair_bytes * num_rows * (num_prefix + num_rows)
    key_bytes = 16 * (num_prefix + num_rows)  # their positions, which rows pay for
    share = f"{peak.num_bytes / planned_bytes:.2f} of the plan"
    least_bytes = 0.5 * planned_bytes if dtype == "float32" else -1  # in 16 bits machine code may keep no scores
    assert least_bytes < peak.num_bytes <= planned_bytes + key_bytes, share
