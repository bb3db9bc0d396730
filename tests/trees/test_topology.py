"""The optimiser of tree shapes: brute force = dynamic program = best-first, and the closed forms."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from exact_tree import fill_depths, optimal

from offload.errors import UserError
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    AcceptanceVector,
    Topology,
    best_first,
    chain,
    check_acceptance,
    expected_tokens,
    isotonic,
    k_ary,
    sequences,
)

BRUTE_NODES = 8


def random_p(seed: int, num_ranks: int, is_sorted: bool) -> list[float]:
    """Sums to less than 1; every fifth vector has a zero, every seventh a tie."""
    rng = np.random.default_rng(seed)
    p_K = rng.dirichlet(np.full(num_ranks, 0.7)) * rng.uniform(0.3, 1)
    if seed % 5 == 0:
        p_K[rng.integers(num_ranks)] = 0.0
    if seed % 7 == 0:
        p_K[0] = p_K[-1] = min(p_K[0], p_K[-1])
    return sorted(map(float, p_K), reverse=True) if is_sorted else [float(p) for p in p_K]


def grow_all(parents: list[int]) -> Iterator[list[int]]:
    """Every ordered tree of up to BRUTE_NODES nodes, once: its parents in level order are a non-decreasing list."""
    yield parents
    if len(parents) < BRUTE_NODES:
        for parent in range(max(parents[-1], 0), len(parents)):
            yield from grow_all([*parents, parent])


def paths(parents: list[int]) -> list[list[int]]:
    """The ranks from the root to each node, written without the code under test."""
    path_N: list[list[int]] = [[]]
    for node, parent in enumerate(parents[1:], start=1):
        path_N.append([*path_N[parent], parents[:node].count(parent)])
    return path_N


TREES = [paths(parents) for parents in grow_all([-1])]


def brute_table(p: list[float], max_depth: int) -> np.ndarray:
    """The best F over all trees of exactly n nodes, at most d deep; -inf where there is none."""
    G_ND = np.full((BRUTE_NODES + 1, max_depth + 1), -np.inf)
    for path_N in TREES:
        if max(max(path, default=0) for path in path_N) < len(p):
            total, depth = sum(math.prod(p[rank] for rank in path) for path in path_N), max(map(len, path_N))
            G_ND[len(path_N), depth:] = np.maximum(G_ND[len(path_N), depth:], total)
    return G_ND


def greedy(p: list[float], num_nodes: int) -> float:
    """F of best-first without its guard, taking the best node whose parent and previous sibling are in."""
    score_N = [1.0]
    frontier = [(p[0], 0, 0)]  # (score, parent, rank)
    while len(score_N) < num_nodes:
        score, parent, rank = frontier.pop(frontier.index(max(frontier)))
        frontier.append((score * p[0], len(score_N), 0))
        if rank + 1 < len(p):
            frontier.append((score_N[parent] * p[rank + 1], parent, rank + 1))
        score_N.append(score)
    return sum(score_N)


def check_invariants(tree: Topology) -> None:
    order = list(zip(tree.depth_N.tolist(), tree.parent_N.tolist(), tree.rank_N.tolist(), strict=True))
    assert order == sorted(order)
    assert order[0] == (0, -1, 0) and len(set(order)) == tree.num_nodes
    assert tree.depth == tree.depth_N.max() and tree.num_children_N.sum() == tree.num_nodes - 1
    for node in range(tree.num_nodes):
        children = np.flatnonzero(tree.parent_N == node)
        assert len(children) == tree.num_children_N[node]
        assert tree.rank_N[children].tolist() == list(range(len(children)))
        assert np.diff(children).tolist() == [1] * (len(children) - 1)
        assert (tree.depth_N[children] == tree.depth_N[node] + 1).all()
    assert len(tree.levels) == tree.depth + 1
    nodes = np.arange(tree.num_nodes)
    assert np.concatenate([nodes[level] for level in tree.levels]).tolist() == nodes.tolist()
    assert all((tree.depth_N[level] == depth).all() for depth, level in enumerate(tree.levels))


def dp_table(p: list[float], num_nodes: int, max_depth: int) -> np.ndarray:
    """What the dynamic program says that its trees are worth, as `table_ND`; where n do not exist, the largest."""
    value_DN, _ = fill_depths(check_acceptance(p), num_nodes, max_depth)
    return np.maximum.accumulate(value_DN, axis=1).T


# -- optimality


def test_brute_force_visits_every_ordered_tree_once() -> None:
    catalan = [math.comb(2 * n - 2, n - 1) // n for n in range(1, BRUTE_NODES + 1)]
    assert [sum(len(tree) == n for tree in TREES) for n in range(1, BRUTE_NODES + 1)] == catalan


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_dynamic_program_equals_brute_force(num_ranks: int, is_sorted: bool) -> None:
    for seed in range(12):
        p = random_p(seed, num_ranks, is_sorted)
        brute_ND = brute_table(p, BRUTE_NODES)
        table_ND = dp_table(p, BRUTE_NODES, BRUTE_NODES)
        largest_ND = np.maximum.accumulate(brute_ND, axis=0)[1:]  # where n nodes do not exist, the largest tree goes on
        np.testing.assert_allclose(table_ND[1:], largest_ND, rtol=1e-13)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_optimal_rebuilds_the_tree_of_its_value(num_ranks: int, is_sorted: bool) -> None:
    for seed in range(4):
        p = random_p(seed, num_ranks, is_sorted)
        table_ND = dp_table(p, 40, 12)
        for num_nodes, max_depth in [(1, 0), (1, 5), (2, 1), (7, 3), (17, 4), (40, 2), (40, 7), (40, 12), (9, 12)]:
            tree = optimal(p, num_nodes, max_depth)
            check_invariants(tree)
            assert tree.depth <= max_depth and tree.rank_N.max() < num_ranks
            assert tree.num_nodes == min(num_nodes, sum(num_ranks**level for level in range(max_depth + 1)))
            assert expected_tokens(tree, p) == pytest.approx(table_ND[num_nodes, max_depth], rel=1e-13)
        free = optimal(p, 40)
        check_invariants(free)
        assert free.num_nodes == 40
        assert expected_tokens(free, p) == pytest.approx(dp_table(p, 40, 39)[40, 39], rel=1e-13)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 9])
def test_best_first_equals_the_dynamic_program(num_ranks: int) -> None:
    for seed in range(6):
        p = random_p(seed, num_ranks, is_sorted=True)
        table_ND = dp_table(p, 80, 14)
        for num_nodes, max_depth in [(1, 3), (5, 0), (6, 2), (33, 5), (80, 3), (80, 14)]:
            tree = best_first(p, num_nodes, max_depth)
            check_invariants(tree)
            assert tree.depth <= max_depth
            assert tree.num_nodes == optimal(p, num_nodes, max_depth).num_nodes
            assert expected_tokens(tree, p) == pytest.approx(table_ND[num_nodes, max_depth], rel=1e-12)


def test_methods_agree_on_the_default_vector_at_a_working_size() -> None:
    table_ND = dp_table(list(DEFAULT_ACCEPTANCE), 256, 16)
    tree = best_first(DEFAULT_ACCEPTANCE, 256, 16)
    check_invariants(tree)
    assert expected_tokens(tree, DEFAULT_ACCEPTANCE) == pytest.approx(table_ND[256, 16], rel=1e-12)
    assert table_ND[64, 16] > max(
        expected_tokens(t, DEFAULT_ACCEPTANCE) for t in (chain(63), sequences(7, 9), k_ary(2, 64))
    )


def test_dynamic_program_beats_greedy_where_p_rises() -> None:
    """Rank 2 pays for rank 1, which greedy never buys; brute force says by how much at 4 nodes: 1.95 against 1.44."""
    p = [0.3, 0.05, 0.6]
    value, myopic = expected_tokens(optimal(p, 4), p), greedy(p, 4)
    print(f"greedy {myopic:.4f} / optimal {value:.4f} = {myopic / value:.3f}")
    assert value == pytest.approx(1.95) and myopic == pytest.approx(1.44)
    with pytest.raises(UserError, match=r"p\[1\] = 0.05 < p\[2\] = 0.6: isotonic"):
        best_first(p, 4, 4)


def test_greedy_is_best_first_where_p_falls() -> None:
    """So that the test above blames the vector, not the helper."""
    p = [0.61, 0.2, 0.07]
    assert greedy(p, 30) == pytest.approx(expected_tokens(best_first(p, 30, 30), p), rel=1e-13)


def test_ties_go_to_the_shallower_tree() -> None:
    assert best_first([1.0, 0.0], 3, 5).parent_N.tolist() == [-1, 0, 1]
    assert best_first([0.5, 0.25, 0.25], 5, 9).depth_N.tolist() == [0, 1, 1, 1, 2]


# -- shapes


def test_topology_describes_a_small_tree() -> None:
    tree = Topology.from_parents([-1, 0, 0, 1, 2, 2])
    assert tree.rank_N.tolist() == [0, 0, 1, 0, 0, 1]
    assert tree.depth_N.tolist() == [0, 1, 1, 2, 2, 2]
    assert tree.levels == (slice(0, 1), slice(1, 3), slice(3, 6))
    assert tree.num_children_N.tolist() == [2, 1, 2, 0, 0, 0]
    assert (tree.num_nodes, tree.depth) == (6, 2)


@pytest.mark.parametrize("parents", [[], [0], [-1, -1], [-1, 1], [-1, 0, 1, 0], [-1, 2, 0], [-1, 0, -1]])
def test_topology_asserts_on_broken_parents(parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        Topology.from_parents(parents)


def test_topology_is_immutable_and_hashable() -> None:
    tree = sequences(3, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parent_N = tree.rank_N  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        tree.parent_N[1] = 0
    assert {tree: "same"}[sequences(3, 2)] == "same"
    assert tree != chain(6) and tree != "tree"


@pytest.mark.parametrize("tree", [chain(0), chain(9), sequences(1, 1), sequences(5, 4), k_ary(3, 20), k_ary(1, 4)])
def test_references_keep_the_invariants(tree: Topology) -> None:
    check_invariants(tree)


def test_references_have_the_closed_forms() -> None:
    """Table 1 of the paper: finite sums exactly, and the limits that bound every fixed shape."""
    p = (0.6, 0.2, 0.1)
    for length in (1, 2, 7):
        powers = sum(0.6**i for i in range(length))
        assert expected_tokens(chain(length), p) == pytest.approx((1 - 0.6 ** (length + 1)) / (1 - 0.6), rel=1e-14)
        assert expected_tokens(sequences(3, length), p) == pytest.approx(1 + 0.9 * powers, rel=1e-14)
        for k, total in ((2, 0.8), (3, 0.9)):
            tree = k_ary(k, sum(k**level for level in range(length + 1)))
            assert tree.depth == length
            assert expected_tokens(tree, p) == pytest.approx((1 - total ** (length + 1)) / (1 - total), rel=1e-14)
    assert expected_tokens(chain(200), p) == pytest.approx(1 / (1 - 0.6), rel=1e-14)
    assert expected_tokens(sequences(3, 200), p) == pytest.approx(1 + 0.9 / (1 - 0.6), rel=1e-14)
    assert expected_tokens(k_ary(2, 2**15 - 1), p) < 1 / (1 - 0.8)
    assert sequences(1, 6) == chain(6) == k_ary(1, 7) and sequences(4, 1) == k_ary(4, 5)


def test_chain_is_the_best_tree_of_a_single_rank() -> None:
    assert best_first([0.7], 9, 30) == optimal([0.7], 9) == optimal([0.7], 9, 8) == chain(8)
    assert best_first([0.7], 9, 3) == optimal([0.7], 9, 3) == chain(3)


def test_depth_bound_holds_where_a_chain_would_be_best() -> None:
    assert optimal([0.9, 0.01], 5) == chain(4)
    assert optimal([0.9, 0.01], 5, 3).parent_N.tolist() == [-1, 0, 0, 1, 3]
    assert optimal([0.9, 0.01], 5, 3) == best_first([0.9, 0.01], 5, 3)


@pytest.mark.parametrize(
    "call", [lambda: chain(-1), lambda: sequences(0, 3), lambda: sequences(3, 0), lambda: k_ary(0, 3)]
)
def test_references_refuse_impossible_sizes(call: Callable[[], Topology]) -> None:
    with pytest.raises(UserError, match="got"):
        call()


def test_sizes_are_checked() -> None:
    with pytest.raises(UserError, match="num_nodes must be 1 or more, got 0"):
        best_first([0.5], 0, 3)
    with pytest.raises(UserError, match="max_depth must be 0 or more, got -1"):
        best_first([0.5], 3, -1)


# -- acceptance vectors


def test_isotonic_falls_keeps_the_mean_and_leaves_sorted_vectors_alone() -> None:
    assert isotonic([0.3, 0.05, 0.6, 0.05]).tolist() == pytest.approx([0.95 / 3] * 3 + [0.05])
    for seed in range(40):
        p = random_p(seed, 7, is_sorted=False)
        smooth_K = isotonic(p)
        assert (np.diff(smooth_K) <= 0).all()
        assert smooth_K.mean() == pytest.approx(np.mean(p), rel=1e-13)
        assert isotonic(smooth_K).tolist() == smooth_K.tolist()
        assert isotonic(sorted(p, reverse=True)).tolist() == sorted(p, reverse=True)
        best_first(smooth_K, 20, 5)


def test_isotonic_is_the_nearest_falling_vector() -> None:
    """Least squares: no other falling vector, tried at random nearby, is closer."""
    rng = np.random.default_rng(0)
    p_K = np.array(random_p(11, 6, is_sorted=False))
    nearest = ((isotonic(p_K) - p_K) ** 2).sum()
    for _ in range(200):
        other_K = np.sort(np.clip(isotonic(p_K) + rng.normal(0, 0.02, 6), 0, 1))[::-1]
        assert ((other_K - p_K) ** 2).sum() >= nearest - 1e-15


@pytest.mark.parametrize(
    "p", [[], [[0.5]], 0.5, [0.5, -0.1], [1.1], [math.nan], [math.inf], [0.6, 0.5], ["half"], [[0.1], [0.1, 0.2]]]
)
def test_impossible_acceptance_is_refused(p: AcceptanceVector) -> None:
    with pytest.raises(UserError, match=r"must|needs"):
        check_acceptance(p)


def test_acceptance_is_copied_and_may_sum_to_one() -> None:
    p_K = np.array([0.7, 0.2, 0.1])
    assert check_acceptance(p_K) is not p_K
    assert check_acceptance([0.1] * 10).sum() == pytest.approx(1.0)


def test_default_acceptance_falls_and_leaves_some_chance() -> None:
    assert len(DEFAULT_ACCEPTANCE) == 32 and DEFAULT_ACCEPTANCE[:5] == (0.80, 0.11, 0.04, 0.02, 0.01)
    assert 0.98 < check_acceptance(DEFAULT_ACCEPTANCE).sum() < 1
    assert all(np.diff(DEFAULT_ACCEPTANCE) < 0)


def test_a_tree_wider_than_the_vector_is_refused() -> None:
    with pytest.raises(UserError, match="highest rank, 3, got 2 entries"):
        expected_tokens(k_ary(4, 5), [0.5, 0.2])
