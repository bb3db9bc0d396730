"""Tree shapes: in words, and optimised: best-first = brute force = the dynamic program of the paper; closed forms.

Sequoia's dynamic program (2402.12374, Algorithm 5) finds what the best tree of any vector is worth; the product needs
no more than best-first trees of vectors that fall, and that those are the best ones is what it proves here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from expected import expected_tokens

from offload.errors import UserError
from offload.trees.spec import MAX_CHAIN, TreeSpec, parse_tree
from offload.trees.token_tree import Draw, TokenTree, ancestors, children_of
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    AcceptanceVector,
    DynamicShape,
    Shape,
    Topology,
    best_first,
    chain,
    check_acceptance,
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


def dp_table(p: AcceptanceVector, num_nodes: int, max_depth: int) -> np.ndarray:
    """The best F (N, D) of exactly n nodes within d steps; where n do not exist, of the largest tree.

    Siblings are chosen from the last rank to the first: the best of m nodes below the ranks k, k + 1, ...
    is the maximum over s of p[k] * F[s, d - 1] and the best of m - s below the ranks k + 1, ...
    """
    value_DN = np.full((max_depth + 1, num_nodes + 1), -np.inf)
    value_DN[:, 1] = 1.0
    size_N = np.arange(num_nodes)
    left_NN = np.maximum(size_N[:, None] - size_N, -1)  # m - s; -1 is the entry of what cannot be
    for depth in range(1, max_depth + 1):
        below_N = value_DN[depth - 1, :num_nodes]
        rest_N = np.where(size_N == 0, 0.0, -np.inf)
        for chance in check_acceptance(p)[::-1]:
            own_N = np.where(np.isfinite(below_N), chance * np.nan_to_num(below_N, neginf=0), -np.inf)
            own_N[0] = 0.0
            rest_N = (own_N + np.append(rest_N, -np.inf)[left_NN]).max(1)
        value_DN[depth, 1:] = 1.0 + rest_N
    return np.maximum.accumulate(value_DN, axis=1).T


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_best_first_equals_brute_force(num_ranks: int) -> None:
    """Every ordered tree of up to eight nodes, of each depth."""
    for seed in range(12):
        p = random_p(seed, num_ranks, is_sorted=True)
        largest_ND = np.maximum.accumulate(brute_table(p, BRUTE_NODES), axis=0)
        np.testing.assert_allclose(dp_table(p, BRUTE_NODES, BRUTE_NODES)[1:], largest_ND[1:], rtol=1e-13)
        for num_nodes in range(1, BRUTE_NODES + 1):
            for depth in range(BRUTE_NODES):
                tree = best_first(p, num_nodes, depth)
                assert expected_tokens(tree, p) == pytest.approx(largest_ND[num_nodes, depth], rel=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 9])
def test_best_first_equals_the_dynamic_program(num_ranks: int) -> None:
    for seed in range(6):
        p = random_p(seed, num_ranks, is_sorted=True)
        table_ND = dp_table(p, 80, 14)
        for num_nodes, max_depth in [(1, 3), (5, 0), (6, 2), (33, 5), (80, 3), (80, 14)]:
            tree = best_first(p, num_nodes, max_depth)
            check_invariants(tree)
            assert tree.depth <= max_depth and tree.rank_N.max() < num_ranks
            assert tree.num_nodes == min(num_nodes, sum(num_ranks**level for level in range(max_depth + 1)))
            assert expected_tokens(tree, p) == pytest.approx(table_ND[num_nodes, max_depth], rel=1e-12)


def test_small_trees_by_hand() -> None:
    assert best_first([1.0, 0.0], 3, 5).parent_N.tolist() == [-1, 0, 1]
    assert best_first([0.5, 0.25, 0.25], 5, 9).depth_N.tolist() == [0, 1, 1, 1, 2], "ties go to the shallower tree"
    assert best_first([0.7], 9, 30) == chain(8) and best_first([0.7], 9, 3) == chain(3), (
        "a single rank has chains alone"
    )
    assert best_first([0.9, 0.01], 5, 3).parent_N.tolist() == [-1, 0, 0, 1, 3], (
        "where a chain would be best if it could be deep enough"
    )
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


def test_topologies_are_immutable_and_hashable_and_acceptance_is_copied() -> None:
    tree, p_K = sequences(3, 2), np.array([0.7, 0.2, 0.1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parent_N = tree.rank_N  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        tree.parent_N[1] = 0
    assert {tree: "same"}[sequences(3, 2)] == "same"
    assert tree != chain(6) and tree != "tree"
    assert check_acceptance(p_K) is not p_K and check_acceptance([0.1] * 10).sum() == pytest.approx(1.0)


IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: chain(-1), "got"),
    (lambda: sequences(0, 3), "got"),
    (lambda: sequences(3, 0), "got"),
    (lambda: k_ary(0, 3), "got"),
    (lambda: best_first([0.5], 0, 3), "num_nodes must be 1 or more, got 0"),
    (lambda: best_first([0.5], 3, -1), "max_depth must be 0 or more, got -1"),
    (lambda: best_first([0.3, 0.05, 0.6], 4, 4), r"p\[1\] = 0.05 < p\[2\] = 0.6: isotonic"),
    *((partial(check_acceptance, p), r"must|needs") for p in (
        [], [[0.5]], 0.5, [0.5, -0.1], [1.1], [math.nan], [math.inf], [0.6, 0.5], ["half"], [[0.1], [0.1, 0.2]])),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), IMPOSSIBLE)
def test_impossible_sizes_and_vectors_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()


def test_isotonic_is_the_nearest_falling_vector_and_leaves_falling_ones_alone() -> None:
    assert isotonic([0.3, 0.05, 0.6, 0.05]).tolist() == pytest.approx([0.95 / 3] * 3 + [0.05])
    rng = np.random.default_rng(0)
    for seed in range(40):
        p = random_p(seed, 7, is_sorted=False)
        smooth_K = isotonic(p)
        assert (np.diff(smooth_K) <= 0).all()
        assert smooth_K.mean() == pytest.approx(np.mean(p), rel=1e-13)
        assert isotonic(smooth_K).tolist() == smooth_K.tolist()
        assert isotonic(sorted(p, reverse=True)).tolist() == sorted(p, reverse=True)
        best_first(smooth_K, 20, 5)
        nearest = ((smooth_K - p) ** 2).sum()
        for _ in range(5):  # least squares: no other falling vector nearby is closer
            other_K = np.sort(np.clip(smooth_K + rng.normal(0, 0.02, 7), 0, 1))[::-1]
            assert ((other_K - p) ** 2).sum() >= nearest - 1e-15


def random_topology(seed: int, num_nodes: int = 30) -> Topology:
    """Parents that never fall: level order follows."""
    rng = np.random.default_rng(seed)
    parents = [-1]
    for node in range(1, num_nodes):
        parents.append(int(rng.integers(max(0, parents[-1]), node)))
    return Topology.from_parents(parents)


RANDOM_TREES = [*map(random_topology, range(8)), chain(5), k_ary(3, 13), sequences(3, 4), best_first((0.25,) * 4, 9, 3)]


def path_to_root(topology: Topology, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(topology.parent_N[node])
    return path


@pytest.mark.parametrize("topology", RANDOM_TREES, ids=range(len(RANDOM_TREES)))
def test_ancestors_and_children_are_what_parents_say(topology: Topology) -> None:
    # Ancestors are the nodes on the path to the root.
    ancestor_NN = ancestors(topology)
    assert ancestor_NN.dtype == torch.bool
    for node in range(topology.num_nodes):
        assert sorted(path_to_root(topology, node)) == ancestor_NN[node].nonzero()[:, 0].tolist()
    assert (ancestor_NN.sum(1) - 1).tolist() == topology.depth_N.tolist(), "a path is as long as its depth"
    # Children are listed in the order of their ranks.
    children = children_of(topology)
    assert sorted(child for siblings in children for child in siblings) == list(range(1, topology.num_nodes))
    for node, siblings in enumerate(children):
        assert all(topology.parent_N[child] == node for child in siblings)
        assert [int(topology.rank_N[child]) for child in siblings] == list(range(len(siblings)))
        assert siblings == list(range(siblings[0], siblings[0] + len(siblings))) if siblings else True, (
            "siblings stand together"
        )


def test_the_first_child_with_a_token_is_found() -> None:
    tree = TokenTree(Topology.from_parents([-1, 0, 0, 0, 1, 1]), torch.tensor([9, 4, 7, 4, 7, 7]))
    assert tree.num_nodes == 6 and tree.tokens == [9, 4, 7, 4, 7, 7]
    assert (tree.child(0, 4), tree.child(0, 7), tree.child(0, 9)) == (1, 2, None)
    assert (tree.child(1, 7), tree.child(1, 4), tree.child(3, 7), tree.child(5, 7)) == (4, None, None, None)
    # Children are remembered by shape, tokens must not be.
    shape = k_ary(2, 3)
    first, two = TokenTree(shape, torch.tensor([0, 1, 2])), TokenTree(shape, torch.tensor([0, 2, 1]))
    assert (first.child(0, 1), two.child(0, 1)) == (1, 2)
    # Children without a distribution are point masses.
    tree = TokenTree(k_ary(2, 5), torch.tensor([9, 4, 7, 4, 6]))
    assert [(o.child, o.token, o.draw, o.probs_V) for o in tree.offers(0)] == [
        (1, 4, Draw.POINT_MASS, None),
        (2, 7, Draw.POINT_MASS, None),
    ]
    assert list(tree.offers(4)) == []
    # A tree is what it was built as.
    with pytest.raises(AssertionError, match="one token per node"):
        TokenTree(chain(3), torch.tensor([1, 2, 3]))
    tree = TokenTree(chain(1), torch.tensor([1, 2]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.token_N = torch.tensor([3, 4])  # type: ignore[misc]


FORMS: list[tuple[str, TreeSpec, Shape]] = [
    ("auto", TreeSpec("auto"), best_first(DEFAULT_ACCEPTANCE, 64, 16)),
    ("none", TreeSpec("none"), chain(0)),
    ("48x6", TreeSpec("best", 48, 6), best_first(DEFAULT_ACCEPTANCE, 48, 6)),
    ("8x999", TreeSpec("best", 8, 999), best_first(DEFAULT_ACCEPTANCE, 8, 7)),
    ("chain:5", TreeSpec("chain", 1, 5), chain(5)),
    ("chain:auto", TreeSpec("auto_chain"), chain(MAX_CHAIN)),
    ("sequences:3x7", TreeSpec("sequences", 3, 7), sequences(3, 7)),
    ("dynamic:48x6", TreeSpec("dynamic", 48, 6), DynamicShape(48, 6)),
    ("dynamic:8x999", TreeSpec("dynamic", 8, 999), DynamicShape(8, 7)),
]


@pytest.mark.parametrize(("text", "spec", "tree"), FORMS)
def test_tree_specs(text: str, spec: TreeSpec, tree: Shape) -> None:
    assert parse_tree(text) == spec
    assert spec.build(DEFAULT_ACCEPTANCE) == spec.build() == tree
    assert spec.num_nodes == tree.num_nodes and spec.label == text


def test_old_names_large_trees_and_rising_vectors() -> None:
    old = parse_tree("grown:48x6")
    assert old == parse_tree("dynamic:48x6") and old.label == "dynamic:48x6", "what dynamic trees were called once"
    assert [parse_tree(text).num_nodes for text in ("65536x9", "chain:65535", "sequences:255x257")] == [65536] * 3
    with pytest.raises(UserError, match="non-increasing"):  # refused, not smoothed
        parse_tree("16x4").build([0.1, 0.5])


MALFORMED = ["", "64 x16", "64x16\n", "64y16", "64", "x16", "64x", "-1x3", "64x-3", "AUTO", "chain", "chain:",
             "chain:2x3", "sequences:4", "dynamic:64", "dynamic", "grown:64", "grown", "64x16x2", "1e3x4", "6.4x2",
             "٣x٤", "9999999999x2"]  # fmt: skip
ABSURD = ["0x4", "4x0", "dynamic:0x4", "grown:4x0", "dynamic:65537x4", "chain:0", "sequences:0x3", "sequences:3x0",
          "65537x4", "chain:65536", "sequences:256x256"]  # fmt: skip
RULE = "`tree` must be auto, none, NxD, dynamic:NxD, chain:L, chain:auto or sequences:KxL"
BOUNDS = "`tree` must have numbers of 1 or more and at most 65536 nodes"


@pytest.mark.parametrize(
    ("text", "rule"), [*((text, RULE) for text in MALFORMED), *((text, BOUNDS) for text in ABSURD)]
)
def test_what_is_refused_is_told_the_forms_or_the_bounds(text: str, rule: str) -> None:
    with pytest.raises(UserError) as error:
        parse_tree(text)
    assert str(error.value) == f'{rule}, got {text!r}: try `tree="64x16"`'
