"""The heaviest nodes are those that counting every prefix gives, in one order whatever the order of the rows."""

import brute_force
import numpy as np
import pytest
from brute_force import paths_of

from offload.datastore.index import heaviest


def random_rows(rng: np.random.Generator) -> np.ndarray:
    """Continuations that share prefixes, each ending anywhere; what stands behind an end means nothing."""
    rows_MC = rng.integers(4, size=(rng.integers(30), rng.integers(1, 6)))
    rows_MC = np.array([0, 1, 255, 2**32 - 3])[rows_MC]
    ends_M = rng.integers(rows_MC.shape[1] + 2, size=len(rows_MC))
    for row, end in zip(rows_MC, ends_M, strict=True):
        row[end : end + 1] = -1
    return rows_MC


def cut(rows_MC: np.ndarray) -> list[list[int]]:
    return [row[: next((at for at, token in enumerate(row) if token < 0), None)] for row in rows_MC.tolist()]


@pytest.mark.parametrize("num_nodes", [0, 1, 5, 1000])
def test_nodes_are_those_that_counting_gives(num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    for _ in range(100):
        rows_MC = random_rows(rng)
        trie = heaviest(rows_MC, num_nodes)
        assert paths_of(trie) == brute_force.heaviest(cut(rows_MC), num_nodes)
        assert trie.num_continuations == len(rows_MC)
        shuffled = heaviest(rng.permutation(rows_MC), num_nodes)
        assert all(np.array_equal(one, other) for one, other in zip(trie, shuffled, strict=True))


def test_an_example() -> None:
    trie = heaviest(np.array([[7, 8, 9], [7, 8, -1], [7, 5, 5], [3, -1, -1]]), 5)
    assert paths_of(trie) == [(3, (7,)), (2, (7, 8)), (1, (3,)), (1, (7, 5)), (1, (7, 5, 5))]
    assert trie.parent_R.tolist() == [-1, 0, -1, 0, 3] and trie.num_continuations == 4
