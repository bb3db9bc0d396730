"""The order in which rows of a tree take their steps, and how many states it holds at a time."""

import math
from collections import Counter

import numpy as np
import pytest

from offload.model.recurrent_rows import BASE, RowTree, previous_inputs


def random_parents(num_rows: int, seed: int) -> list[int]:
    """Chains that branch now and then; rows come in any order behind their parents."""
    chance = np.random.default_rng(seed)
    return [row - 1 if chance.random() < 0.6 else int(chance.integers(BASE, row)) for row in range(num_rows)]


def sees(parents: list[int]) -> np.ndarray:
    """Which rows lie on the path to each."""
    sees_NN = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent != BASE:
            sees_NN[row] |= sees_NN[parent]
    return sees_NN


def tree_of(parents: list[int]) -> RowTree:
    tree = RowTree()
    tree.add(sees(parents))
    return tree


def most_states(parents: list[int], order: list[int]) -> int:
    """That wait for children at one time."""
    left, held, most = Counter(parents), {BASE}, 1
    for row in order:
        parent = parents[row]
        assert parent in held, "a row behind its parent"
        left[parent] -= 1
        held -= set() if left[parent] else {parent}
        held |= {row} if left[row] else set()
        most = max(most, len(held) + 1)  # and what is being made
    return most


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_rows", [1, 2, 64, 256])
def test_branch_by_branch_few_states_are_held(num_rows: int, seed: int) -> None:
    parents = random_parents(num_rows, seed)
    tree = tree_of(parents)
    assert tree.parents == parents
    order = [row for (row,) in tree.steps(tree.with_ancestors(range(num_rows)), is_wide=False)]
    assert sorted(order) == [*range(num_rows)]
    assert most_states(parents, order) <= math.log2(num_rows) + 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_rows", [1, 2, 64, 256])
def test_a_slot_holds_the_parent_of_each_row(num_rows: int, seed: int) -> None:
    parents = random_parents(num_rows, seed)
    tree = tree_of(parents)
    held, most = {BASE: BASE}, 0
    for row, source, target in tree.slots(tree.with_ancestors(range(num_rows))):
        assert held[source] == parents[row] and target != BASE
        held[target], most = row, max(most, target)
    assert most + 1 <= math.log2(num_rows) + 2


def test_the_lightest_branch_last_would_show() -> None:
    """Planted: a comb whose long side comes first holds a state for every tooth."""
    parents = [BASE, *(row - 1 if row % 2 else row - 2 for row in range(1, 256))]
    parents[2::2] = [row - 2 for row in range(2, 256, 2)]
    heavy_first = sorted(range(256), key=lambda row: (row % 2, row))
    assert most_states(parents, heavy_first) > 20


@pytest.mark.parametrize("seed", range(5))
def test_levels_come_whole_and_passes_may_be_many(seed: int) -> None:
    parents, tree = random_parents(60, seed), RowTree()
    sees_NN = sees(parents)
    for lo, hi in ((0, 7), (7, 8), (8, 41), (41, 60)):
        tree.add(sees_NN[lo:hi, :hi])
    assert tree.parents == parents
    needed = tree.with_ancestors(range(41, 60))
    levels = [*tree.steps(needed, is_wide=True)]
    assert sorted(row for level in levels for row in level) == sorted(needed)
    for before, level in zip([[BASE], *levels], levels, strict=False):
        assert {parents[row] for row in level} <= {*before}


@pytest.mark.parametrize("num_taps", [1, 2, 4])
def test_a_convolution_sees_its_path(num_taps: int) -> None:
    parents = random_parents(40, seed=3)
    places = previous_inputs(parents, num_taps)
    for row in range(40):
        path, node = list[int](), row
        while node != BASE:
            path.insert(0, node)
            node = parents[node]
        seen = [*range(num_taps - 1), *(num_taps - 1 + one for one in path)][-num_taps:]
        assert places[row].tolist() == seen


def test_what_is_kept_hangs_behind_the_path() -> None:
    tree = tree_of([BASE, 0, 0, 1, 1, 2, 3])
    tree.check([0, 1, 3])
    tree.keep([0, 1], [3, 4, 6])
    assert tree.parents == [BASE, BASE, 0]
    with pytest.raises(AssertionError, match="a path follows the tree"):
        tree.check([1, 2])
    tree.keep([0], [1])  # which hung elsewhere
    with pytest.raises(AssertionError, match="dropped"):
        tree.with_ancestors([0])
