"""The shape of a token tree, chosen so that one weight pass is expected to yield the most tokens.

Sequoia (2402.12374, section 3.1): a verifier accepts the child of rank k with chance p[k], at any
position, so a node is reached with f(v) = product of p[rank] along its path and a pass yields F(T)
= sum of f over the nodes. For a non-increasing p the n best scores *are* the best tree, found by a
heap; a measured p is fitted so that it falls. A `DynamicShape` only bounds a tree whose shape the
draft settles again in every step.

Invariant: the root is node 0, it counts as a node (its row yields the bonus token), and nodes stand
in level order: by depth (edges from the root, the number of draft steps), then by parent, then by
rank.

Shape letters, in this file only: N nodes (or sizes 0..N), D depths 0..D, K ranks (the children one
node may have).
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from offload.errors import UserError, require

_ROOM = 1.25  # rows per node, including those that are run in vain
# the same where a scout guesses below a copy: three of its guesses in four are in vain
_TIER_ROOM = 4
# rows of one draft pass: the most that a device replays from a recording, and no longer free on any
_MOST_ROWS = 128

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
AcceptanceVector = Sequence[float] | Floats
Item = TypeVar("Item")

# The one grid of tree sizes: all code that chooses or compares trees looks at these. A larger tree
# costs rows of a pass, memory for them and draft passes, and yields ever less: costs decide which
# size pays, no caller's bound. The grid ends where rows of Llama-2-70B are still free on an L40 (a
# pass of 2,048 computes for 2.6 s, its link takes 4.7 s) and those of twice as many no longer are.
SIZES = (1, *(size for power in range(10) for size in (2 << power, 3 << power)), 2048)


# The first five were measured at T = 0 on a 16 M target and a 1 M draft distilled from it. The tail
# is assumed, not measured: k^-3.5, so that all 32 sum to .995 and the rest is what such a draft
# never lists.
DEFAULT_ACCEPTANCE: tuple[float, ...] = (
    *(0.80, 0.11, 0.04, 0.02, 0.01),
    *(round(0.01 * (5 / k) ** 3.5, 6) for k in range(6, 33)),
)


class GrowthSchedule(NamedTuple):
    """How many rows each draft pass runs while a dynamic tree of N nodes grows.

    Large passes are few, and run a few more rows in vain. Trees of every pace are worth the same;
    which is fastest depends on what a pass costs, see `planning.cost_model.paced`. Passes and rows
    are as counted on the packaged pair. A draft's cache has room for any pace.
    """

    num_parts: int  # a pass runs at most N / num_parts rows
    # passes beyond the number of binary digits of N; a tree is about as deep as N has digits
    more_passes: int
    rows_share: float  # rows that are run, as a share of N

    def rows_per_pass(self, num_nodes: int) -> int:
        """Return the most rows of one pass for a tree of `num_nodes`."""
        return min(_MOST_ROWS, max(1, num_nodes // self.num_parts))

    def widths(self, num_nodes: int, least_passes: int = 0) -> list[int]:
        """Return the expected rows of every pass behind the root's, at least `least_passes`."""
        num_rows = self.rows_share * num_nodes
        num_passes = max(
            num_nodes.bit_length() + self.more_passes,
            math.ceil(num_rows / self.rows_per_pass(num_nodes)),
        )
        num_passes = max(num_passes, least_passes)
        return [max(1, round(num_rows / num_passes))] * min(num_nodes - 2, num_passes)


# the first is used where costs are not known
PACES = (GrowthSchedule(4, 2, 1.1), GrowthSchedule(8, 4, 1.03))


def most_rows(num_nodes: int) -> int:
    """Return the rows, root included, that growing a tree of `num_nodes` runs at most."""
    return int(_ROOM * num_nodes)


def tier_rows(num_nodes: int) -> int:
    """Return the rows, root included, that a copy or its scout runs at most for such a tree.

    Guesses that the copy did not share are among them.
    """
    return _TIER_ROOM * num_nodes


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """An immutable, hashable tree shape in level order; build it with `from_parents`."""

    parent_N: Ints  # -1 for the root, else smaller than the node's own index
    rank_N: Ints  # index among its siblings; 0 for the root
    depth_N: Ints  # edges from the root

    @classmethod
    def from_parents(cls, parents: Sequence[int] | Ints) -> "Topology":
        """Return the tree in level order whose node i hangs from `parents[i]`, the root from -1."""
        parent_N = np.array(parents, dtype=np.int64)
        assert parent_N[:1].tolist() == [-1] and (np.diff(parent_N) >= 0).all(), (
            "nodes are not in level order"
        )
        depths = [0]
        for parent in parent_N[1:].tolist():
            assert 0 <= parent < len(depths), "a parent must stand before its children"
            depths.append(depths[parent] + 1)
        # distance from the first sibling
        rank_N = np.arange(parent_N.size) - np.searchsorted(parent_N, parent_N)
        arrays = parent_N, rank_N, np.array(depths, dtype=np.int64)
        for array_N in arrays:
            array_N.setflags(write=False)
        return cls(*arrays)

    @property
    def num_nodes(self) -> int:
        """How many rows a weight pass scores, the root included."""
        return self.parent_N.size

    @property
    def depth(self) -> int:
        """Edges on the longest path: the draft steps, and the most drafted tokens of one pass."""
        return int(self.depth_N[-1])

    @property
    def levels(self) -> tuple[slice, ...]:
        """One slice of node ids per depth, from (0, 1) for the root to the deepest level."""
        bounds = np.searchsorted(self.depth_N, np.arange(self.depth + 2)).tolist()
        return tuple(slice(lo, hi) for lo, hi in pairwise(bounds))

    @property
    def num_children_N(self) -> Ints:
        """Children of every node; the ranks below a node are 0 to this number, exclusive."""
        return np.bincount(self.parent_N[1:], minlength=self.num_nodes)

    @property
    def draft_widths(self) -> list[int]:
        """Rows of every draft step: each level's nodes that have children."""
        is_run_N = self.num_children_N > 0
        return [int(np.count_nonzero(is_run_N[level])) for level in self.levels[:-1]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and np.array_equal(self.parent_N, other.parent_N)

    def __hash__(self) -> int:
        return hash(self.parent_N.tobytes())


@dataclass(frozen=True, slots=True)
class DynamicShape:
    """Bounds of a tree whose shape the draft settles again in every step."""

    num_nodes: int  # at most, the root included
    depth: int  # at most, in edges from the root
    # how the tree grows; shapes with the same bounds are equal at any pace
    pace: GrowthSchedule = field(default=PACES[0], compare=False)
    # tokens that a weight pass is expected to yield: each takes a draft pass
    num_tokens: float = field(default=1.0, compare=False)

    @property
    def draft_widths(self) -> list[int]:
        """Rows of every draft step: the root's, then those that its pace is expected to take."""
        if self.depth <= 1:
            return [1] * self.depth
        return [1, *self.pace.widths(self.num_nodes, round(self.num_tokens) - 1)]


Shape = Topology | DynamicShape


def check_acceptance(p: AcceptanceVector) -> Floats:
    """Return `p` as chances of which at most one comes true. Raises `UserError`."""
    try:
        p_K = np.array(p, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"an acceptance vector must be a list of numbers, got {p!r}: measure it again"
        ) from error
    requirement = "an acceptance vector needs one entry per rank"
    require(p_K.ndim == 1 and p_K.size > 0, requirement, p, "give one or more")
    # written so that NaN is outside, too
    outside_K = p_K[~((p_K >= 0) & (p_K <= 1))]
    requirement = "acceptance entries must lie in [0, 1]"
    require(not outside_K.size, requirement, outside_K.tolist(), "measure them again")
    requirement = "acceptance entries must sum to 1 at most, since one child at most is accepted"
    require(
        float(p_K.sum()) <= 1 + 1e-9,
        requirement,
        f"{p_K.sum():.6g}",
        "divide by the sum or measure again",
    )
    return p_K


def isotonic(p: AcceptanceVector) -> Floats:
    """Return the nearest non-increasing vector, by least squares, pooling adjacent violators."""
    # (sum, count) of each flat stretch
    pools: list[tuple[float, int]] = []
    for value in check_acceptance(p).tolist():
        total = value
        count = 1
        while pools and pools[-1][0] / pools[-1][1] < total / count:
            total = total + pools[-1][0]
            count = count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    return np.repeat([total / count for total, count in pools], [count for _, count in pools])


def path_chances(topology: Topology, p_K: Floats) -> Floats:
    """Return (N,) the chance that each node is reached; ranks beyond `p_K` are never accepted."""
    chance_K = np.zeros(max(p_K.size, int(topology.rank_N.max()) + 1))
    chance_K[: p_K.size] = p_K
    score_N = np.ones(topology.num_nodes)
    for level in topology.levels[1:]:
        score_N[level] = score_N[topology.parent_N[level]] * chance_K[topology.rank_N[level]]
    return score_N


class GrownNode(NamedTuple, Generic[Item]):
    """A node of an order with parents and elder siblings first: any first n nodes are a tree."""

    number: int  # index in the order
    parent: int  # index of its parent; -1 for the root
    rank: int
    depth: int
    score: float  # chance that its path is accepted, or another score that never rises along a path
    item: Item  # what the order was grown from knows of it


def grow_best_first(
    root: Item,
    child: Callable[[GrownNode[Item], int], tuple[float, Item] | None],
    score: float = 1.0,
) -> Iterator[GrownNode[Item]]:
    """Yield the root, then always the best child of those that were yielded, until none is left.

    `child` gives the child of a rank below a node, with the score of its whole path, which is not
    above the parent's or an elder sibling's; None where there is none, or bounds end the tree. It
    is asked for rank 0 once for every node, in their order. Ties go to the shallower node, then to
    the elder parent's.
    """
    # -score, depth, parent's number, rank, item, parent; no two agree in number and rank
    heap: list[tuple[float, int, int, int, Item, GrownNode[Item] | None]]
    heap = [(-score, 0, -1, 0, root, None)]
    for number in count():
        if not heap:
            return
        negative, depth, parent, rank, item, above = heap[0]
        node = GrownNode(number, parent, rank, depth, -negative, item)
        yield node
        sibling = None if above is None else child(above, rank + 1)
        if sibling is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-sibling[0], depth, parent, rank + 1, sibling[1], above))
        if (first := child(node, 0)) is not None:
            heapq.heappush(heap, (-first[0], depth + 1, number, 0, first[1], node))


OrderedNode = GrownNode[None]


def likeliest_nodes(p_K: Floats, num_nodes: int, max_depth: int) -> list[OrderedNode]:
    """Return the nodes with the greatest chance to be accepted, in falling order.

    That chance is the product of `p_K` at the ranks of a node's path (Sequoia, section 3.1).
    """
    chances = p_K.tolist()

    def child(node: OrderedNode, rank: int) -> tuple[float, None] | None:
        is_within = node.depth < max_depth and rank < len(chances)
        return (node.score * chances[rank], None) if is_within else None

    return list(islice(grow_best_first(None, child), num_nodes))


def tree_of(order: Sequence[OrderedNode]) -> Topology:
    """Return the tree of all nodes of an order."""
    return in_level_order([node.parent for node in order])[0]


def best_first(p: AcceptanceVector, num_nodes: int, max_depth: int) -> Topology:
    """Return the best tree for a non-increasing `p`, in O(n log n).

    It has `num_nodes` nodes and at most `max_depth` draft steps. Scores rise neither along a path
    nor along siblings, so the n best nodes of the infinite tree make a tree. Where fewer fit under
    `max_depth`, all that fit are taken. Raises `UserError` where `p` rises.
    """
    p_K = check_acceptance(p)
    for k in np.flatnonzero(np.diff(p_K) > 0)[:1].tolist():
        rise = f"p[{k}] = {p_K[k]:.6g} < p[{k + 1}] = {p_K[k + 1]:.6g}"
        raise UserError(
            f"best-first needs a non-increasing acceptance vector, got {rise}: isotonic(p) smooths it"
        )
    _check_sizes(num_nodes, max_depth)
    return tree_of(likeliest_nodes(p_K, num_nodes, max_depth))


def in_level_order(parents: Sequence[int]) -> tuple[Topology, list[int]]:
    """Return the tree of nodes listed with parents before children and siblings by rank, and the
    order in which they stand there.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    order = [0]
    # the list grows while it is read
    for node in order:
        order.extend(children[node])
    node_of = dict(zip(order, range(len(order)), strict=True))
    return Topology.from_parents([-1, *(node_of[parents[node]] for node in order[1:])]), order


def chain(length: int) -> Topology:
    """Return one path of `length` draft tokens, 1 + length nodes; `chain(0)` is the root alone."""
    require(
        length >= 0, "a chain's length must be 0 or more", length, "0 decodes without speculation"
    )
    return Topology.from_parents(range(-1, length))


def sequences(count: int, length: int) -> Topology:
    """Return `count` independent sequences of `length` draft tokens below the root (Table 1)."""
    requirement = "sequences need a count and a length of 1 or more"
    require(min(count, length) >= 1, requirement, (count, length), "try 4, 8")
    return Topology.from_parents([-1, *[0] * count, *range(1, count * (length - 1) + 1)])


def k_ary(k: int, num_nodes: int) -> Topology:
    """Return the complete k-ary tree, filled level by level; k = 2 is Table 1's binary tree."""
    require(k >= 1, "a k-ary tree needs 1 child or more per node", k, "2 is the binary tree")
    _check_sizes(num_nodes, 0)
    return Topology.from_parents((np.arange(num_nodes) - 1) // k)


def _check_sizes(num_nodes: int, max_depth: int) -> None:
    requirement = "num_nodes must be 1 or more"
    require(num_nodes >= 1, requirement, num_nodes, "1 is the root alone, no speculation")
    requirement = "max_depth must be 0 or more"
    require(max_depth >= 0, requirement, max_depth, "0 is the root alone, no speculation")
