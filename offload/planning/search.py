"""Search for the tree with the most tokens per second on a machine: argmax of G(n, d) / step time.

This is Sequoia's hardware-aware optimiser (2402.12374, Eq. 1), with the whole step in the
denominator. G(n, d), the tokens per pass of the best tree of n nodes and d levels, is the paper's
product form of the acceptance vector; of dynamic trees it is what was counted, where they were.

Nodes are ordered by their chances: the first n that are no deeper than a bound are the tree of that
size. So one order has the trees of every size and depth, and none is built to be compared.

Where a pair was not measured, `range_for` gives a range of yields from pairs that papers measured.
How well a draft knows its target stands in no header; its share of the target's weights is the best
sign that does: each published figure over what the default acceptance expects of its tree, both
less the one token that every sweep yields. Assumed: a draft of the same family.

No torch, no clock. O nodes of the order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from offload.planning.acceptance import DynamicYield, gains
from offload.planning.cost_model import Costs, Prediction, StepTime, Traffic, paced, step_of
from offload.trees.spec import label_of
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    SIZES,
    DynamicShape,
    Floats,
    Ints,
    OrderedNode,
    Shape,
    Topology,
    check_acceptance,
    in_level_order,
    likeliest_nodes,
    path_chances,
)

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96)
SOURCE = "arXiv 2402.12374"
_LARGE_SHARE = 1 / 16  # of the target's weights: from here on a draft counts as large
_FIRST_NODES = 512  # larger trees are ordered only where they might be better
_SPARE = 3  # times the largest tree's nodes are ordered, since a bound on the depth drops some


class Outline(NamedTuple):
    """What the time of a tree depends on, known before it is built."""

    num_nodes: int
    depth: int
    draft_widths: list[int]  # rows of every draft step, as `cost_model.draft_widths` has them


class TreeOrder:
    """Trees of all sizes and depths; parents and elder siblings come first."""

    def __init__(self, nodes: Sequence[OrderedNode]) -> None:
        self._depth_O = np.array([node.depth for node in nodes])
        self._is_first_O = np.array([node.rank == 0 for node in nodes])  # of its siblings
        self._score_O = np.array([node.score for node in nodes])
        self._parent_O = np.array([node.parent for node in nodes])
        self._place = cache(self._placed)
        self._sums = cache(self._summed)

    def tree(self, num_nodes: int, depth: int) -> Topology:
        """Return the tree of `num_nodes` nodes and at most `depth` draft steps.

        It has fewer nodes where there are not as many.
        """
        place_O = self._place(depth)
        kept = np.flatnonzero(place_O < num_nodes)
        return in_level_order([-1, *place_O[self._parent_O[kept[1:]]].tolist()])[0]

    def num_nodes(self, depth: int) -> int:
        """Return the number of nodes that are no deeper than `depth`."""
        return len(self._sums(depth))

    def outline(self, num_nodes: int, depth: int) -> Outline:
        """Return the outline of a tree; a draft step runs one node for each first child."""
        is_run_O = self._is_first_O & (self._place(depth) < num_nodes)
        widths = np.bincount(self._depth_O[is_run_O])[1:].tolist()
        return Outline(num_nodes, len(widths), widths)

    def expected(self, num_nodes: int, depth: int) -> float:
        """Return the tokens per sweep if nodes have the chances that they are ordered by."""
        sums = self._sums(depth)
        return float(sums[min(num_nodes, len(sums)) - 1])

    def _placed(self, depth: int) -> Ints:
        """Return (O,) each node's index among those no deeper than `depth`; deeper ones get O."""
        is_in_O = self._depth_O <= depth
        return np.where(is_in_O, np.cumsum(is_in_O) - 1, len(is_in_O))

    def _summed(self, depth: int) -> Floats:
        """Return the cumulative chances of nodes no deeper than `depth`, in their order."""
        return np.cumsum(self._score_O[self._depth_O <= depth])


@dataclass(frozen=True, eq=False)
class TreeSearch:
    """The trees to choose from, one for every size and depth; `known_trees` caches them."""

    p_K: Floats  # acceptance vector
    max_nodes: int = SIZES[-1]  # of the largest tree
    max_depth: int = DEPTHS[-1]
    # what dynamic trees have yielded; without it they count as static ones
    counted: Sequence[DynamicYield] = ()

    @cached_property
    def whole(self) -> TreeOrder:
        """Return the order of nodes of the largest tree, and of enough others for every depth."""
        largest = max([self.max_nodes, *(counted.num_nodes for counted in self.counted)])
        return TreeOrder(likeliest_nodes(self.p_K, _SPARE * largest, self.max_depth))

    def built(self, shape: DynamicShape | Outline) -> Shape:
        """Return the tree of an outline; bounds stay what they are."""
        if isinstance(shape, DynamicShape):
            return shape
        return self.whole.tree(shape.num_nodes, shape.depth)

    def shapes(
        self, num_nodes: int, max_depth: int, *, is_dynamic: bool
    ) -> Iterator[tuple[int, DynamicShape | Outline]]:
        """Yield each depth bound of trees of this size, shallow ones first, with its shape.

        Static trees end where a larger bound changes nothing. The shape of a dynamic tree is its
        bounds.
        """
        last = -1
        for depth in dict.fromkeys(
            min(bound, max_depth, max(1, num_nodes - 1)) for bound in DEPTHS
        ):
            if self.whole.num_nodes(depth) < num_nodes:
                continue
            if is_dynamic and num_nodes > 1:
                yield depth, DynamicShape(num_nodes, depth)
                continue
            outline = self.whole.outline(num_nodes, depth)
            if outline.depth == last:
                return
            last = outline.depth
            yield depth, outline

    def expected(self, num_nodes: int, depth: int) -> float:
        """Return G(n, d) of the best static tree, by the product form."""
        return self.whole.expected(num_nodes, depth)

    def expected_dynamic(self, num_nodes: int, depth: int) -> float:
        """Return G of a dynamic tree within these bounds."""
        tokens = self.expected(num_nodes, depth)
        return tokens * self._gain(num_nodes, depth) if self.counted else tokens

    def expected_of(self, topology: Topology) -> float:
        """Return G of any static tree, by the product form."""
        return float(path_chances(topology, self.p_K).sum())

    @cached_property
    def _gain(self) -> Callable[[int, int], float]:
        return gains(self.counted, self.expected)


@lru_cache(maxsize=64)
def known_trees(
    acceptance: tuple[float, ...],
    max_nodes: int = SIZES[-1],
    max_depth: int = DEPTHS[-1],
    counted: tuple[DynamicYield, ...] = (),
) -> TreeSearch:
    """Return the cached `TreeSearch`, since ordering takes a while. Raises `UserError`."""
    return TreeSearch(check_acceptance(acceptance), max_nodes, max_depth, counted)


class _Candidate(NamedTuple):
    """One tree, its cost and its yield."""

    s_per_token: float
    shape: DynamicShape | Outline
    step: StepTime
    tokens: float  # per sweep, of all texts together


class SearchTerms(NamedTuple):
    """What trees are ranked by.

    Args:
        traffic_of: what a sweep moves with this many nodes; None where they do not fit.
    """

    costs: Costs
    traffic_of: Callable[[int], Traffic | None]
    max_depth: int = DEPTHS[-1]
    is_dynamic: bool = False
    num_texts: int = 1  # each of which has such a tree


def search(
    trees_of: Callable[[int], TreeSearch],
    max_nodes: int,
    terms: SearchTerms,
    most: int | None = None,
) -> tuple[TreeSearch, list[Prediction]]:
    """Return the trees that memory can hold, the quickest first, and where they come from.

    With several texts a prediction is for all of them together.

    Args:
        trees_of: returns the trees of at most this many nodes; large ones take long to order.
        most: how many of the best static trees are built and returned; None for all of them.
    """
    trees = trees_of(min(_FIRST_NODES, max_nodes))
    best = _ranked(trees, terms)
    is_small = max_nodes > _FIRST_NODES and bool(best)
    if is_small and _may_pay(trees, max_nodes, terms.costs, best[0], terms.num_texts):
        trees = trees_of(max_nodes)
        best = _ranked(trees, terms)
    predictions = []
    for _, shape, step, tokens in best if terms.is_dynamic else best[:most]:
        tree = trees.built(shape)
        predictions.append(Prediction(label_of(tree), tree, step, (tokens, tokens)))
    return trees, predictions


def _ranked(trees: TreeSearch, terms: SearchTerms) -> list[_Candidate]:
    """Return the trees of all sizes and depths that memory can hold, the quickest first."""
    candidates = []
    for size in (size for size in SIZES if size <= trees.max_nodes):
        num_rows = terms.num_texts * size
        traffic = terms.traffic_of(num_rows)
        if traffic is None:
            continue
        for depth, shape in trees.shapes(size, terms.max_depth, is_dynamic=terms.is_dynamic):
            is_grown = isinstance(shape, DynamicShape)
            tokens = (trees.expected_dynamic if is_grown else trees.expected)(size, depth)
            if isinstance(shape, DynamicShape):
                shape = paced(replace(shape, num_tokens=tokens), terms.costs)
            widths = [terms.num_texts * width for width in shape.draft_widths]
            step = step_of(terms.costs, traffic, num_rows, widths, is_grown=is_grown)
            of_all = terms.num_texts * tokens
            candidates.append(_Candidate(step.total_s / of_all, shape, step, of_all))
    return sorted(candidates, key=lambda candidate: candidate.s_per_token)


def _may_pay(
    trees: TreeSearch, max_nodes: int, costs: Costs, best: _Candidate, num_texts: int
) -> bool:
    """Return True if a larger tree than these could be quicker than the best one.

    Its further nodes are no likelier than the last ordered one, and it computes for as long as its
    rows take.
    """
    most = trees.max_nodes
    fewer = max(size for size in SIZES if size < most)
    tokens, fewer_tokens = (trees.expected_dynamic(size, DEPTHS[-1]) for size in (most, fewer))
    slope = max(0.0, tokens - fewer_tokens) / (most - fewer)
    larger = [size for size in SIZES if most < size <= max_nodes]
    return any(
        costs.compute_s.at(num_texts * size)
        < best.s_per_token * num_texts * (tokens + slope * (size - most))
        for size in larger
    )


class MeasuredYield(NamedTuple):
    """One published figure, of a static tree and temperature 0 or 0.6."""

    pair: str
    share: float  # weights of the draft over those of the target
    num_nodes: int
    depth: int
    tokens_per_sweep: float


# Sequoia, Table 5 for the first pair, on C4, OpenWebText and CNN Daily; Tables 4 and 7, on C4, for
# the others.
_TABLE_5 = ((22, 12.18), (23, 10.12), (18, 9.83), (19, 9.05), (17, 10.46), (18, 9.58))
MEASURED = (
    *(
        MeasuredYield("Llama-2 70B with 7B", 0.098, 768, depth, tokens)
        for depth, tokens in _TABLE_5
    ),
    MeasuredYield("Vicuna 33B with 1.3B", 0.039, 64, 6, 4.28),
    MeasuredYield("Llama-2 7B with 68M", 0.010, 128, 10, 5.08),
    MeasuredYield("Llama-2 7B with 68M", 0.010, 64, 10, 4.68),
    MeasuredYield("Llama-2 7B with 68M", 0.010, 128, 7, 3.92),
    MeasuredYield("Llama-2 13B with 68M", 0.005, 64, 9, 4.20),
)


class YieldRange(NamedTuple):
    """The factors by which measured yields differ from the default acceptance's."""

    low: float  # factor on the tokens beyond the first
    high: float
    pairs: tuple[str, ...]  # the measured ones

    def around(self, tokens_per_sweep: float) -> tuple[float, float]:
        """Return the least and most tokens per sweep."""
        return 1 + self.low * (tokens_per_sweep - 1), 1 + self.high * (tokens_per_sweep - 1)


def range_for(share: float) -> YieldRange:
    """Return the range for a draft with this share of the target's weights."""
    is_large = share >= _LARGE_SHARE
    rows = [row for row in MEASURED if (row.share >= _LARGE_SHARE) == is_large]
    usual = known_trees(DEFAULT_ACCEPTANCE, max_nodes=max(row.num_nodes for row in rows))
    ratios = [
        (row.tokens_per_sweep - 1) / (usual.expected(row.num_nodes, row.depth) - 1) for row in rows
    ]
    return YieldRange(min(ratios), max(ratios), tuple(dict.fromkeys(row.pair for row in rows)))
