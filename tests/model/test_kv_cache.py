"""The cache: what a commit keeps, where the length moves, and trees on it against the plain model of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from matrix import matrix
from tiny import FAMILIES, VOCAB_SIZE, build, save
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.build import resident_model
from offload.kernels.jit import HAS_TRITON
from offload.kernels.kv_commit import kv_commit_kernel, kv_commit_reference
from offload.model.kv_cache import KVCache
from offload.model.streamed import StreamedModel
from offload.trees.token_tree import ancestors
from offload.trees.topology import Topology

NUM_LAYERS, NUM_SLOTS, NUM_HEADS, WIDTH = 2, 40, 3, 4
Gather = Callable[..., None]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def rows_of(numbers: Sequence[int], layer: int) -> Tensor:
    """Keys (1, G, T, K) that carry their row's number, another one in each layer and head."""
    row_T = torch.tensor(numbers, dtype=torch.float32)
    return (row_T + 1000 * layer)[None, None, :, None] + 100 * torch.arange(NUM_HEADS)[None, :, None, None].expand(
        1, NUM_HEADS, 1, WIDTH
    )


def write(cache: KVCache, numbers: Sequence[int], num_uncommitted: int = 0) -> None:
    """One forward pass."""
    cache.place(num_uncommitted, len(numbers))
    for layer in range(NUM_LAYERS):
        keys, values = cache.update(rows_of(numbers, layer), -rows_of(numbers, layer), layer)
        assert keys.shape[2] == values.shape[2] == cache.length + num_uncommitted + len(numbers)


def committed(cache: KVCache) -> list[int]:
    """The row numbers that the cache keeps; all layers, heads, keys and values must agree."""
    row_P = cache.layers[0].keys[0, 0, : cache.length, 0]
    for layer in range(NUM_LAYERS):
        wanted = rows_of(row_P.int().tolist(), layer)
        assert torch.equal(cache.layers[layer].keys[:, :, : cache.length], wanted)
        assert torch.equal(cache.layers[layer].values[:, :, : cache.length], -wanted)
    return [int(row) for row in row_P]


@matrix("seed", range(20), always=[0, 1], daily=3)
def test_commit_keeps_the_chosen_rows_in_their_order(seed: int) -> None:
    rng, cache = np.random.default_rng(seed), KVCache(NUM_LAYERS, NUM_SLOTS)
    kept: list[int] = []
    for step in range(4):
        numbers = [10 * step + index for index in range(int(rng.integers(1, 10)))]
        write(cache, numbers)
        assert committed(cache) == kept, "an uncommitted pass must not move the length"
        path = sorted(rng.choice(len(numbers), int(rng.integers(0, len(numbers) + 1)), replace=False).tolist())
        cache.commit(path)
        kept += [numbers[row] for row in path]
        assert committed(cache) == kept and cache.length == cache.get_seq_length() == len(kept)


def rows_behind(cache: KVCache, num_rows: int) -> list[int]:
    """The numbers of the first rows that are not committed."""
    return (-cache.layers[1].values[0, 0, cache.length :, 0] - 1000).int().tolist()[:num_rows]


@matrix("seed", range(20), always=[0, 1], daily=3)
def test_rows_that_are_kept_wait_behind_what_is_committed(seed: int) -> None:
    """Runs in flight: rows come behind those that were kept, and commits keep some of them in any order."""
    rng, cache = np.random.default_rng(seed), KVCache(NUM_LAYERS, 400)
    text, waiting = list[int](), list[int]()
    for step in range(8):
        for run in range(int(rng.integers(0, 3))):
            numbers = [100 * step + 10 * run + index for index in range(int(rng.integers(1, 10)))]
            write(cache, numbers, num_uncommitted=cache.num_uncommitted)
            waiting += numbers
        chosen = rng.permutation(len(waiting))[: int(rng.integers(0, len(waiting) + 1))].tolist()
        num_path = int(rng.integers(0, min(6, len(chosen)) + 1))
        cache.commit(chosen[:num_path], chosen[num_path:])
        text += [waiting[row] for row in chosen[:num_path]]
        waiting = [waiting[row] for row in chosen[num_path:]]
        assert cache.length == len(text) and cache.num_uncommitted == len(waiting)
        if text + waiting:
            assert committed(cache) == text and rows_behind(cache, len(waiting)) == waiting
    assert len(text) > 2


@pytest.mark.parametrize("num_rows", [256, 300])
@pytest.mark.parametrize("gather", [kv_commit_reference, pytest.param(kv_commit_kernel, marks=needs_triton)])
def test_many_rows_are_read_before_any_is_written(num_rows: int, gather: Gather) -> None:
    """Path and kept rows together, backwards: each lies where another one goes."""
    cache = KVCache(NUM_LAYERS, 400, gather)
    write(cache, range(num_rows))
    rows = list(reversed(range(num_rows)))
    cache.commit(rows[:100], rows[100:])
    assert committed(cache) == rows[:100] and rows_behind(cache, num_rows - 100) == rows[100:]


def test_whoever_keeps_nothing_starts_behind_the_committed_rows() -> None:
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2, 3])
    cache.commit([1], [2])
    assert (cache.num_uncommitted, cache.get_seq_length()) == (1, 2)
    write(cache, [8, 9], num_uncommitted=1)
    cache.commit([0, 2])
    assert committed(cache) == [2, 3, 9] and cache.num_uncommitted == 0
    write(cache, [4, 5])
    cache.commit([], [1])
    cache.clear(2)
    assert committed(cache) == [2, 3] and cache.num_uncommitted == 0
    states = [(layer, {name: one.clone() for name, one in held.items()}) for layer, held in cache.states(9).items()]
    write(cache, [6])
    cache.refill(states, 2)
    assert committed(cache) == [2, 3] and cache.num_uncommitted == 0


def test_a_row_that_never_ran_is_counted_and_holds_numbers() -> None:
    """A run that is cancelled: those behind it stand where they would, and no weight times NaN is NaN."""
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    cache.fix()
    cache.place(0, 3)
    cache.commit([], [2, 0, 1])
    assert cache.num_uncommitted == 3, "although no layer has run yet"
    write(cache, [7], num_uncommitted=3)
    cache.place(4, 2)
    write(cache, [8], num_uncommitted=6)
    assert torch.isfinite(cache.layers[0].keys).all()
    cache.commit([3, 6])
    assert committed(cache) == [7, 8]


def test_passes_over_one_tree_stand_behind_each_other() -> None:
    """A drafter runs a tree level by level: each pass sees the rows of those before it."""
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2])
    cache.commit([0, 1])
    write(cache, [10, 11])
    write(cache, [20, 21, 22], num_uncommitted=2)
    cache.commit([1, 4])
    assert committed(cache) == [1, 2, 11, 22]


def test_an_abandoned_pass_leaves_nothing_behind() -> None:
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2, 3])
    cache.commit([0, 1, 2])
    cache.place(0, 2)
    cache.update(rows_of([8, 9], 0), rows_of([8, 9], 0), 0)  # the second layer never ran
    assert committed(cache) == [1, 2, 3]
    write(cache, [4])
    cache.commit([0])
    assert committed(cache) == [1, 2, 3, 4]


def test_clear_forgets_all_but_what_is_kept() -> None:
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2, 3])
    cache.commit([0, 1, 2])
    cache.clear(5)
    assert committed(cache) == [1, 2, 3], "there is no more to keep than there is"
    cache.clear(2)
    assert committed(cache) == [1, 2] and cache.length == cache.get_seq_length() == 2
    cache.clear()
    assert cache.length == cache.get_seq_length() == 0
    write(cache, [7])
    cache.commit([0])
    assert committed(cache) == [7]


def test_buffers_are_allocated_once_and_at_full_size() -> None:
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1])
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    for _ in range(3):
        cache.commit([0])
        write(cache, [2])
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    assert all(layer.keys.shape == (1, NUM_HEADS, NUM_SLOTS, WIDTH) for layer in cache.layers)


def test_more_rows_than_slots_are_our_own_bug() -> None:
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, list(range(30)))
    cache.commit(range(30))
    write(cache, list(range(NUM_SLOTS - 30)))
    with pytest.raises(AssertionError, match="11 rows do not fit behind 30"):
        cache.place(0, NUM_SLOTS - 30 + 1)
    with pytest.raises(AssertionError, match="10 rows do not fit behind 31"):
        cache.place(1, NUM_SLOTS - 30)


PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7]  # siblings at every depth, leaves at several


def plain_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """What transformers computes after the last of `ids`, without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(ids)])).logits[0, -1]


def path_to(topology: Topology, node: int) -> list[int]:
    path = [node]
    while topology.parent_N[path[0]] >= 0:
        path.insert(0, int(topology.parent_N[path[0]]))
    return path


def forward_tree(model: StreamedModel, cache: KVCache, topology: Topology, token_N: Tensor) -> Tensor:
    position_N = torch.from_numpy(topology.depth_N.copy()) + cache.length
    return model.forward(token_N, position_N, ancestors(topology), cache)


def take_in(model: StreamedModel, cache: KVCache, ids: Sequence[int]) -> None:
    """A prompt, in two passes."""
    for chunk in torch.tensor(ids).split(29):
        sees_TT = torch.ones(len(chunk), len(chunk), dtype=torch.bool).tril()
        model.forward(chunk, torch.arange(len(chunk)) + cache.length, sees_TT, cache)
        cache.commit(range(len(chunk)))


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "mistral-sliding", "gemma2"])
def test_trees_and_commits_equal_plain_decoding(family: str, tmp_path: Path) -> None:
    """Every node of three trees in a row, behind a prefix longer than the sliding window of 24."""
    directory = save(build(FAMILIES[family]()), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ours = resident_model(open_checkpoint(directory), "auto")
    if family == "gemma2":
        assert ours.meta_model.config._attn_implementation == "eager", "the soft-capped scores are its own code's"
    rng, topology = np.random.default_rng(3), Topology.from_parents(PARENTS)
    ids = rng.integers(3, VOCAB_SIZE, 40).tolist()
    cache = KVCache(ours.num_layers, 80)
    take_in(ours, cache, ids)
    for _ in range(3):
        token_N = torch.from_numpy(rng.integers(3, VOCAB_SIZE, topology.num_nodes))
        logits_NV = forward_tree(ours, cache, topology, token_N)
        for node in range(topology.num_nodes):
            path = path_to(topology, node)
            wanted_V = plain_logits(theirs, ids + token_N[path].tolist())
            torch.testing.assert_close(logits_NV[node], wanted_V, atol=2e-4, rtol=1e-4)
        path = path_to(topology, int(rng.choice([3, 5, 8, 9, 10])))
        cache.commit(path)
        ids += token_N[path].tolist()
    assert cache.length == len(ids)
