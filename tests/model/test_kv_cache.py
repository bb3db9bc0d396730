"""The cache: what a commit keeps, where the length moves, and trees on it against the plain model of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from marks import needs_triton
from matrix import matrix
from test_recurrent import PARENTS, assert_follows_trees
from tiny import FAMILIES, build, save
from torch import Tensor

from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.kernels.kv_commit import kv_commit_kernel, kv_commit_reference
from offload.model.kv_cache import KEYS, VALUES, KVCache
from offload.model.parts import BatchPart, PassCache, causal

NUM_LAYERS, NUM_SLOTS, NUM_HEADS, WIDTH = 2, 40, 3, 4
Gather = Callable[..., None]


def rows_of(numbers: Sequence[int], layer: int) -> Tensor:
    """Keys (1, G, T, K) that carry their row's number, another one in each layer and head."""
    row_T = torch.tensor(numbers, dtype=torch.float32)
    head_1G1K = torch.arange(NUM_HEADS)[None, :, None, None].expand(1, NUM_HEADS, 1, WIDTH)
    return (row_T + 1000 * layer)[None, None, :, None] + 100 * head_1G1K


def placed(cache: KVCache, num_rows: int, num_uncommitted: int = 0) -> PassCache:
    row_T, first = torch.arange(num_rows), cache.reserve(num_uncommitted, num_rows)
    return PassCache([BatchPart(row_T, row_T, causal(num_rows), cache, first=first)])


def write(cache: KVCache, numbers: Sequence[int], num_uncommitted: int = 0) -> None:
    pass_ = placed(cache, len(numbers), num_uncommitted)
    assert pass_.get_seq_length() == cache.length + num_uncommitted
    for layer in range(NUM_LAYERS):
        keys, values = pass_.update(rows_of(numbers, layer), -rows_of(numbers, layer), layer)
        assert keys.shape[2] == values.shape[2] == cache.length + num_uncommitted + len(numbers)


def committed(cache: KVCache) -> list[int]:
    """The row numbers that the cache keeps; all layers, heads, keys and values must agree."""
    row_P = cache.layer_states(0)[KEYS][0, 0, : cache.length, 0]
    for layer in range(NUM_LAYERS):
        wanted = rows_of(row_P.int().tolist(), layer)
        assert torch.equal(cache.layer_states(layer)[KEYS][:, :, : cache.length], wanted)
        assert torch.equal(cache.layer_states(layer)[VALUES][:, :, : cache.length], -wanted)
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
        assert committed(cache) == kept and cache.length == len(kept)


def rows_behind(cache: KVCache, num_rows: int) -> list[int]:
    return (-cache.layer_states(1)[VALUES][0, 0, cache.length :, 0] - 1000).int().tolist()[:num_rows]


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


def test_a_text_that_keeps_nothing_starts_behind_the_committed_rows_and_clear_forgets() -> None:
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2, 3])
    cache.commit([1], [2])
    assert (cache.num_uncommitted, cache.length) == (1, 1)
    write(cache, [8, 9], num_uncommitted=1)
    cache.commit([0, 2])
    assert committed(cache) == [2, 3, 9] and cache.num_uncommitted == 0
    write(cache, [4, 5])
    cache.commit([], [1])
    cache.clear(2)
    assert committed(cache) == [2, 3] and cache.num_uncommitted == 0
    states = [(layer, {name: kept.clone() for name, kept in held.items()}) for layer, held in cache.states(9).items()]
    write(cache, [6])
    cache.refill(states, 2)
    assert committed(cache) == [2, 3] and cache.num_uncommitted == 0
    # Clear forgets all but what is kept.
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2, 3])
    cache.commit([0, 1, 2])
    cache.clear(5)
    assert committed(cache) == [1, 2, 3], "there is no more to keep than there is"
    cache.clear(2)
    assert committed(cache) == [1, 2] and cache.length == 2
    cache.clear()
    assert cache.length == 0
    write(cache, [7])
    cache.commit([0])
    assert committed(cache) == [7]


def test_a_row_that_never_ran_is_counted_and_holds_numbers() -> None:
    """A run that is cancelled: those behind it stand where they would, and no weight times NaN is NaN."""
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    cache.fix()
    cache.reserve(0, 3)
    cache.commit([], [2, 0, 1])
    assert cache.num_uncommitted == 3, "although no layer has run yet"
    write(cache, [7], num_uncommitted=3)
    cache.reserve(4, 2)
    write(cache, [8], num_uncommitted=6)
    assert torch.isfinite(cache.layer_states(0)[KEYS]).all()
    cache.commit([3, 6])
    assert committed(cache) == [7, 8]


def test_passes_over_one_tree_stand_behind_each_other_and_an_abandoned_one_leaves_nothing() -> None:
    """A drafter runs a tree level by level: each pass sees the rows of those before it."""
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2])
    cache.commit([0, 1])
    write(cache, [10, 11])
    write(cache, [20, 21, 22], num_uncommitted=2)
    cache.commit([1, 4])
    assert committed(cache) == [1, 2, 11, 22]
    # An abandoned pass leaves nothing behind.
    cache = KVCache(NUM_LAYERS, NUM_SLOTS)
    write(cache, [1, 2, 3])
    cache.commit([0, 1, 2])
    placed(cache, 2).update(rows_of([8, 9], 0), rows_of([8, 9], 0), 0)  # the second layer never ran
    assert committed(cache) == [1, 2, 3]
    write(cache, [4])
    cache.commit([0])
    assert committed(cache) == [1, 2, 3, 4]


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "mistral-sliding", "gemma2"])
def test_trees_and_commits_equal_plain_decoding(family: str, tmp_path: Path) -> None:
    """Every node of three trees in a row, behind a prefix longer than the sliding window of 24."""
    directory = save(build(FAMILIES[family]()), tmp_path)
    ours = resident_model(open_checkpoint(directory), "auto")
    if family == "gemma2":
        assert ours.meta_model.config._attn_implementation == "eager", "the soft-capped scores are its own code's"
    assert_follows_trees(directory, ends=(8, 10, 5), nodes=range(len(PARENTS)))
