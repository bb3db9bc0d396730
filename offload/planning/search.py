"""The trees to choose from, and those with the most tokens per second on a machine: argmax of G(n,
d) / step time.

Sequoia's hardware-aware optimiser (2402.12374, Eq. 1), with the whole step in the denominator. G(n,
d) is the paper's product form where only an acceptance vector is known. Where traces are, the tree
is made of the paths that were taken most, drawn towards the product form where little was seen, and
its G is counted on traces that it was not made from. No torch, no clock.

Nodes in the order of their chances: the first so many that are no deeper than a bound are the tree
of that size.

One order has the trees of every size and depth. What they yield is read off the order itself, so
that hundreds of them are compared without any being built. No torch, no clock. O nodes of the
order.

How many tokens a sweep yields where this pair of models was not measured: a range, from pairs that
papers measured.

How well a draft knows its target stands in no header; its share of the target's weights is the best
sign of it that does. So large drafts get what large ones have yielded and small ones what small
ones have, each figure beside what the default acceptance expects of its tree, both less the one
token that every sweep yields. Assumed: a draft of the same family. No torch, no clock.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from offload.planning.acceptance import (
    NUM_FOLDS,
    PRODUCT_FORM,
    DynamicYield,
    RankTrie,
    Trace,
    gains,
    tokens_per_sweep,
)
from offload.planning.cost_model import Costs, Prediction, StepTime, Traffic, paced, step_of
from offload.trees.spec import label_of
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    SIZES,
    DynamicShape,
    Floats,
    Ints,
    OrderedNode,
    Topology,
    check_acceptance,
    grow_order,
    in_level_order,
    path_chances,
)


class Outline(NamedTuple):
    """What the time of a tree depends on, which is told before it is built."""

    num_nodes: int
    depth: int
    draft_widths: list[int]  # rows of every draft step, as `cost_model.draft_widths` has them


class TreeOrder:
    """Trees of all sizes and depths; parents and elder siblings come first."""

    def __init__(self, found: Sequence[OrderedNode]) -> None:
        self._found = found
        self._depth_O = np.array([node.depth for node in found])
        self._is_first_O = np.array([node.rank == 0 for node in found])  # of its siblings
        self._score_O = np.array([node.score for node in found])
        self._parent_O = np.array([node.parent for node in found])
        self._place = cache(self._placed)
        self._sums = cache(self._summed)
        # which single look-ups read faster
        self._place_list = cache(lambda depth: self._place(depth).tolist())

    def tree(self, num_nodes: int, depth: int) -> Topology:
        """That of `num_nodes` nodes and at most `depth` draft steps; of fewer nodes where there are
        not as many.
        """
        place_O = self._place(depth)
        kept = np.flatnonzero(place_O < num_nodes)
        return in_level_order([-1, *place_O[self._parent_O[kept[1:]]].tolist()])

    def num_nodes(self, depth: int) -> int:
        """How many there are no deeper than that."""
        return len(self._sums(depth))

    def depth_of(self, num_nodes: int, depth: int) -> int:
        """Of the tree of that size, which may be less deep than it might be."""
        return int(self._depth_O[self._place(depth) < num_nodes].max())

    def outline(self, num_nodes: int, depth: int) -> Outline:
        """Of the tree of that size, of which there are as many nodes; each first child is of one
        that a step runs.
        """
        is_run_O = self._is_first_O & (self._place(depth) < num_nodes)
        widths = np.bincount(self._depth_O[is_run_O])[1:].tolist()
        return Outline(num_nodes, len(widths), widths)

    def expected(self, num_nodes: int, depth: int) -> float:
        """Tokens that a sweep over this tree yields if its nodes have the chances that they are
        ordered by.
        """
        sums = self._sums(depth)
        return float(sums[min(num_nodes, len(sums)) - 1])

    def bursts(self, num_nodes: int, depth: int, trace: Trace) -> list[int]:
        """New tokens of every sweep over this tree of a run that emits this text, as
        `traces.bursts` has them.
        """
        place = self._place_list(depth)
        children = self._children
        yields = list[int]()
        node = 0
        num_accepted = 0
        for rank in trace:
            num_accepted += 1
            child = children[node].get(rank)
            if child is not None and place[child] < num_nodes:
                node = child
            else:
                yields.append(num_accepted)
                node = num_accepted = 0
        return [*yields, num_accepted] if num_accepted else yields

    def _placed(self, depth: int) -> Ints:
        """(O,) which one of those no deeper a node is; of those that are deeper none."""
        is_in_O = self._depth_O <= depth
        return np.where(is_in_O, np.cumsum(is_in_O) - 1, len(is_in_O))

    def _summed(self, depth: int) -> Floats:
        """Chances of nodes no deeper, added up in their order."""
        return np.cumsum(self._score_O[self._depth_O <= depth])

    @cached_property
    def _children(self) -> list[dict[int, int]]:
        """Of every node those below it, by rank."""
        children: list[dict[int, int]] = [{} for _ in self._found]
        for index, node in enumerate(self._found[1:], start=1):
            children[node.parent][node.rank] = index
        return children


DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96)
SMOOTHINGS = (4.0, 16.0, 64.0, 256.0)
_LEAST_GAIN = 1.02  # of traces over the product form on held-out text; less than this is chance
# of the trees that are ordered first: larger ones only where they might be better
_FIRST_NODES = 512
# so many times more nodes are ordered than the largest tree has, since a bound on the depth drops
# some
_SPARE = 3


@dataclass(frozen=True, eq=False)
class TreeSearch:
    """The trees to choose from, one for every size and depth; `known_forest` gives each but once."""

    p_K: Floats  # acceptance vector
    traces: Sequence[Trace] = ()  # accepted ranks, window by window; none leaves the product form
    smoothing: float = 1.0  # how many sightings of a path `p_K` is worth
    max_nodes: int = SIZES[-1]  # of the largest tree
    max_depth: int = DEPTHS[-1]
    # what dynamic trees have yielded; none takes them for as good as static ones
    counted: Sequence[DynamicYield] = ()

    def tree(self, num_nodes: int, depth: int) -> Topology:
        """The tree of `num_nodes` nodes and at most `depth` draft steps; of fewer nodes where there
        are not as many.
        """
        return self._whole.tree(num_nodes, depth)

    def shapes(
        self, num_nodes: int, max_depth: int, *, is_dynamic: bool
    ) -> Iterator[tuple[int, DynamicShape | Outline]]:
        """Each depth that a tree of this size may be bounded by, shallow ones first, with what
        grows within it.

        Of static trees until a larger bound changes nothing. Of a dynamic one the bounds are the
        shape.
        """
        last = -1
        for depth in dict.fromkeys(
            min(bound, max_depth, max(1, num_nodes - 1)) for bound in DEPTHS
        ):
            if self._whole.num_nodes(depth) < num_nodes:
                continue
            if is_dynamic and num_nodes > 1:
                yield depth, DynamicShape(num_nodes, depth)
                continue
            reached = self._whole.depth_of(num_nodes, depth)
            if reached == last:
                return
            last = reached
            yield depth, self._whole.outline(num_nodes, depth)

    def expected(self, num_nodes: int, depth: int) -> float:
        """G(n, d): counted on traces that the tree was not made from, or from the product form
        without traces.
        """
        return (
            self._counted_yield(num_nodes, depth)
            if self._folds
            else self._whole.expected(num_nodes, depth)
        )

    def expected_dynamic(self, num_nodes: int, depth: int) -> float:
        """G of a dynamic tree within these bounds."""
        tokens = self.expected(num_nodes, depth)
        return tokens * self._gain(num_nodes, depth) if self.counted else tokens

    def expected_of(self, topology: Topology) -> float:
        """G of a tree that no trace had a part in making."""
        if self._folds:
            return tokens_per_sweep(topology, self.traces)
        return float(path_chances(topology, self.p_K).sum())

    @cached_property
    def _counted_yield(self) -> Callable[[int, int], float]:
        """By nodes and depth; kept, since walking along all traces takes a while."""

        def mean(num_nodes: int, depth: int) -> float:
            bursts = [order.bursts(num_nodes, depth, trace) for order, trace in self._folds]
            return sum(map(sum, bursts)) / sum(map(len, bursts))

        return cache(mean)

    @cached_property
    def _gain(self) -> Callable[[int, int], float]:
        return gains(self.counted, self.expected)

    @cached_property
    def _whole(self) -> TreeOrder:
        return self._order(self.traces)

    @cached_property
    def _folds(self) -> list[tuple[TreeOrder, Trace]]:
        """Nodes ordered by all traces but every so-many-th, and those as one text."""
        if len(self.traces) < NUM_FOLDS:
            return []
        folds: list[tuple[TreeOrder, Trace]] = []
        for fold in range(NUM_FOLDS):
            kept = [trace for index, trace in enumerate(self.traces) if index % NUM_FOLDS != fold]
            folds.append(
                (
                    self._order(kept),
                    [rank for trace in self.traces[fold::NUM_FOLDS] for rank in trace],
                )
            )
        return folds

    def _order(self, traces: Sequence[Trace]) -> TreeOrder:
        trie = RankTrie(traces, self.max_depth, self.p_K, self.smoothing)
        largest = max([self.max_nodes, *(one.num_nodes for one in self.counted)])
        return TreeOrder(grow_order(_SPARE * largest, self.max_depth, trie.follow, 0))


@lru_cache(maxsize=32)
def known_forest(
    acceptance: tuple[float, ...],
    traces: tuple[tuple[int, ...], ...] = (),
    smoothing: float = 1.0,
    max_nodes: int = SIZES[-1],
    max_depth: int = DEPTHS[-1],
    counted: tuple[DynamicYield, ...] = (),
) -> TreeSearch:
    """The same forest for the same arguments, which are those of `TreeSearch`: ordering its nodes
    takes a while.

    Raises `UserError` for an acceptance vector that is none.
    """
    return TreeSearch(
        check_acceptance(acceptance), traces, smoothing, max_nodes, max_depth, counted
    )


class _Candidate(NamedTuple):
    """One tree of a forest, and what it costs and yields."""

    bound: int  # on its depth
    shape: DynamicShape | Outline
    step: StepTime
    tokens: float  # of all texts together

    @property
    def s_per_token(self) -> float:
        return self.step.total_s / self.tokens

    def built(self, forest: TreeSearch) -> Prediction:
        """With the tree itself."""
        shape = (
            forest.tree(self.shape.num_nodes, self.bound)
            if isinstance(self.shape, Outline)
            else self.shape
        )
        return Prediction(label_of(shape), shape, self.step, (self.tokens,) * 2)


def rank_trees(
    forest: TreeSearch,
    costs: Costs,
    traffic_of: Callable[[int], Traffic | None],
    max_depth: int = DEPTHS[-1],
    *,
    is_dynamic: bool = False,
    num_texts: int = 1,
) -> list[Prediction]:
    """All trees that memory can hold, the one with the most tokens per second first.

    Of several texts in one pass each has such a tree, and a prediction is of what all of them yield
    together.

    Args:
        traffic_of: what a sweep moves when memory is planned for so many nodes; None where that
            does not fit.
        is_dynamic: whether the draft's scores are to shape the trees.
    """
    ranked = _ranked(
        forest, costs, traffic_of, max_depth, is_dynamic=is_dynamic, num_texts=num_texts
    )
    return [one.built(forest) for one in ranked]


def _ranked(
    forest: TreeSearch,
    costs: Costs,
    traffic_of: Callable[[int], Traffic | None],
    max_depth: int,
    *,
    is_dynamic: bool,
    num_texts: int,
) -> list[_Candidate]:
    """The trees of `rank_trees` before they are built."""
    candidates = []
    for size in (size for size in SIZES if size <= forest.max_nodes):
        traffic = traffic_of(num_texts * size)
        if traffic is None:
            continue
        for depth, shape in forest.shapes(size, max_depth, is_dynamic=is_dynamic):
            is_grown = isinstance(shape, DynamicShape)
            tokens = (
                forest.expected_dynamic(size, depth) if is_grown else forest.expected(size, depth)
            )
            if isinstance(shape, DynamicShape):
                shape = paced(replace(shape, num_tokens=tokens), costs)
            widths = [num_texts * width for width in shape.draft_widths]
            step = step_of(costs, traffic, num_texts * size, widths, is_grown=is_grown)
            candidates.append(_Candidate(depth, shape, step, num_texts * tokens))
    return sorted(candidates, key=lambda candidate: candidate.s_per_token)


def search(
    forest_of: Callable[[int], TreeSearch],
    max_nodes: int,
    costs: Costs,
    traffic_of: Callable[[int], Traffic | None],
    max_depth: int = DEPTHS[-1],
    *,
    is_dynamic: bool = False,
    num_texts: int = 1,
    most: int | None = None,
) -> tuple[TreeSearch, list[Prediction]]:
    """The trees of the whole grid as `rank_trees` has them, and the forest that they are of.

    Args:
        forest_of: of trees of so many nodes at most; large ones take long to order.
        most: of static trees, each of which has to be built, so many of the best; None has all of
            them.
    """
    rank = partial(
        _ranked,
        costs=costs,
        traffic_of=traffic_of,
        max_depth=max_depth,
        is_dynamic=is_dynamic,
        num_texts=num_texts,
    )
    forest = forest_of(min(_FIRST_NODES, max_nodes))
    ranked = rank(forest)
    if (
        max_nodes > _FIRST_NODES
        and ranked
        and _may_pay(forest, max_nodes, costs, ranked[0], num_texts)
    ):
        forest = forest_of(max_nodes)
        ranked = rank(forest)
    return forest, [one.built(forest) for one in (ranked if is_dynamic else ranked[:most])]


def _may_pay(
    forest: TreeSearch, max_nodes: int, costs: Costs, best: _Candidate, num_texts: int
) -> bool:
    """Whether a larger tree than this forest has could be quicker than its best one.

    Its nodes are no likelier than the last of those that are ordered, and it computes for as long
    as its rows take.
    """
    most = forest.max_nodes
    fewer = max(size for size in SIZES if size < most)
    tokens, fewer_tokens = (forest.expected_dynamic(size, DEPTHS[-1]) for size in (most, fewer))
    slope = max(0.0, tokens - fewer_tokens) / (most - fewer)
    larger = [size for size in SIZES if most < size <= max_nodes]
    return any(
        costs.compute_s.at(num_texts * size)
        < best.s_per_token * num_texts * (tokens + slope * (size - most))
        for size in larger
    )


def best_smoothing(
    p_K: Floats, traces: Sequence[Trace], num_nodes: int = 128, depth: int = 16
) -> float:
    """How much the product form should count beside the traces: what serves held-out traces best."""

    def held_out(smoothing: float) -> float:
        return TreeSearch(p_K, traces, smoothing, num_nodes).expected(num_nodes, depth)

    best = max(SMOOTHINGS, key=held_out)
    return best if held_out(best) > _LEAST_GAIN * held_out(PRODUCT_FORM) else PRODUCT_FORM


SOURCE = "arXiv 2402.12374"
_LARGE_SHARE = 1 / 16  # between the two groups


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
    """What to make of the tokens that the default acceptance expects."""

    low: float  # times the tokens beyond the first
    high: float
    pairs: tuple[str, ...]  # that it rests on

    def of(self, tokens_per_sweep: float) -> tuple[float, float]:
        """Least and most tokens per sweep."""
        return 1 + self.low * (tokens_per_sweep - 1), 1 + self.high * (tokens_per_sweep - 1)


def range_for(share: float) -> YieldRange:
    """For a draft with this share of the target's weights."""
    return _range(is_large=share >= _LARGE_SHARE)


@cache
def _range(*, is_large: bool) -> YieldRange:
    rows = [one for one in MEASURED if (one.share >= _LARGE_SHARE) == is_large]
    usual = TreeSearch(
        check_acceptance(DEFAULT_ACCEPTANCE), max_nodes=max(one.num_nodes for one in rows)
    )
    expected = [usual.expected(one.num_nodes, one.depth) for one in rows]
    ratios = [
        (one.tokens_per_sweep - 1) / (tokens - 1)
        for one, tokens in zip(rows, expected, strict=True)
    ]
    return YieldRange(min(ratios), max(ratios), tuple(dict.fromkeys(one.pair for one in rows)))
