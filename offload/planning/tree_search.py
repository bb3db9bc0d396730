"""The trees to choose from, and those with the most tokens per second on a machine: argmax of G(n, d) / step time.

Sequoia's hardware-aware optimiser (2402.12374, Eq. 1), with the whole step in the denominator. G(n, d) is the paper's
product form where only an acceptance vector is known. Where traces are, the tree is made of the paths that were taken
most, drawn towards the product form where little was seen, and its G is counted on traces that it was not made from.
No torch, no clock.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from offload.planning.cost_model import Costs, Prediction, Traffic, paced, step_time
from offload.planning.traces import (
    NUM_FOLDS,
    PRODUCT_FORM,
    DynamicYield,
    RankTrie,
    Trace,
    gains,
    tokens_per_sweep,
)
from offload.planning.tree_order import TreeOrder
from offload.tree.sizes import SIZES
from offload.tree.spec import label_of
from offload.tree.topology import (
    DynamicShape,
    Floats,
    Shape,
    Topology,
    grow_order,
    path_chances,
)

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96)
SMOOTHINGS = (4.0, 16.0, 64.0, 256.0)
_LEAST_GAIN = 1.02  # of traces over the product form on held-out text; less than this is chance
_FIRST_NODES = 512  # of the trees that are ordered first: larger ones only where they might be better
_SPARE = 3  # so many times more nodes are ordered than the largest tree has, since a bound on the depth drops some


@dataclass(frozen=True)
class Forest:
    """The trees to choose from, one for every size and depth."""

    p_K: Floats  # acceptance vector
    traces: Sequence[Trace] = ()  # accepted ranks, window by window; none leaves the product form
    smoothing: float = 1.0  # how many sightings of a path `p_K` is worth
    max_nodes: int = SIZES[-1]  # of the largest tree
    max_depth: int = DEPTHS[-1]
    counted: Sequence[DynamicYield] = ()  # what dynamic trees have yielded; none takes them for as good as static ones

    def tree(self, num_nodes: int, depth: int) -> Topology:
        """The tree of `num_nodes` nodes and at most `depth` draft steps; of fewer nodes where there are not as many."""
        return self._whole.tree(num_nodes, depth)

    def shapes(self, num_nodes: int, max_depth: int, *, is_dynamic: bool) -> Iterator[tuple[int, Shape]]:
        """Each depth that a tree of this size may be bounded by, shallow ones first, with what grows within it.

        Of static trees until a larger bound changes nothing. Of a dynamic one the bounds are the shape.
        """
        last = -1
        for depth in dict.fromkeys(min(bound, max_depth, max(1, num_nodes - 1)) for bound in DEPTHS):
            if self._whole.num_nodes(depth) < num_nodes:
                continue
            if is_dynamic and num_nodes > 1:
                yield depth, DynamicShape(num_nodes, depth)
                continue
            reached = self._whole.depth_of(num_nodes, depth)
            if reached == last:
                return
            last = reached
            yield depth, self.tree(num_nodes, depth)

    def expected(self, num_nodes: int, depth: int) -> float:
        """G(n, d): counted on traces that the tree was not made from, or from the product form without traces."""
        if not self._folds:
            return self._whole.expected(num_nodes, depth)
        yields: list[int] = []
        for order, trace in self._folds:
            yields += order.bursts(num_nodes, depth, trace)
        return sum(yields) / len(yields)

    def expected_dynamic(self, num_nodes: int, depth: int) -> float:
        """G of a dynamic tree within these bounds."""
        return self.expected(num_nodes, depth) * self._gain(num_nodes, depth)

    def expected_of(self, topology: Topology) -> float:
        """G of a tree that no trace had a part in making."""
        if self._folds:
            return tokens_per_sweep(topology, self.traces)
        return float(path_chances(topology, self.p_K).sum())

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
            folds.append((self._order(kept), [rank for trace in self.traces[fold::NUM_FOLDS] for rank in trace]))
        return folds

    def _order(self, traces: Sequence[Trace]) -> TreeOrder:
        trie = RankTrie(traces, self.max_depth, self.p_K, self.smoothing)
        largest = max([self.max_nodes, *(one.num_nodes for one in self.counted)])
        return TreeOrder(grow_order(_SPARE * largest, self.max_depth, trie.follow, 0))


def rank_trees(
    forest: Forest,
    costs: Costs,
    traffic_of: Callable[[int], Traffic | None],
    max_depth: int = DEPTHS[-1],
    *,
    is_dynamic: bool = False,
    num_texts: int = 1,
) -> list[Prediction]:
    """All trees that memory can hold, the one with the most tokens per second first.

    Of several texts in one pass each has such a tree, and a prediction is of what all of them yield together.

    Args:
        traffic_of: what a sweep moves when memory is planned for so many nodes; None where that does not fit.
        is_dynamic: whether the draft's scores are to shape the trees.
    """
    candidates = []
    for size in (size for size in SIZES if size <= forest.max_nodes):
        traffic = traffic_of(num_texts * size)
        if traffic is None:
            continue
        for depth, shape in forest.shapes(size, max_depth, is_dynamic=is_dynamic):
            tokens = forest.expected(size, depth)
            if isinstance(shape, DynamicShape):
                tokens = forest.expected_dynamic(size, depth)
                shape = paced(replace(shape, num_tokens=tokens), costs)
            step = step_time(costs, traffic, shape, num_texts)
            candidates.append(Prediction(label_of(shape), shape, step, (num_texts * tokens,) * 2))
    return sorted(candidates, key=lambda candidate: candidate.s_per_token)


def search(
    forest_of: Callable[[int], Forest],
    max_nodes: int,
    costs: Costs,
    traffic_of: Callable[[int], Traffic | None],
    max_depth: int = DEPTHS[-1],
    *,
    is_dynamic: bool = False,
    num_texts: int = 1,
) -> tuple[Forest, list[Prediction]]:
    """The trees of the whole grid as `rank_trees` has them, and the forest that they are of.

    Args:
        forest_of: of trees of so many nodes at most; large ones take long to order.
    """
    rank = partial(
        rank_trees, costs=costs, traffic_of=traffic_of, max_depth=max_depth, is_dynamic=is_dynamic, num_texts=num_texts
    )
    forest = forest_of(min(_FIRST_NODES, max_nodes))
    ranked = rank(forest)
    if max_nodes > _FIRST_NODES and ranked and _may_pay(forest, max_nodes, costs, ranked[0], num_texts):
        forest = forest_of(max_nodes)
        ranked = rank(forest)
    return forest, ranked


def _may_pay(forest: Forest, max_nodes: int, costs: Costs, best: Prediction, num_texts: int) -> bool:
    """Whether a larger tree than this forest has could be quicker than its best one.

    Its nodes are no likelier than the last of those that are ordered, and it computes for as long as its rows take.
    """
    most = forest.max_nodes
    fewer = max(size for size in SIZES if size < most)
    tokens, fewer_tokens = (forest.expected_dynamic(size, DEPTHS[-1]) for size in (most, fewer))
    slope = max(0.0, tokens - fewer_tokens) / (most - fewer)
    larger = [size for size in SIZES if most < size <= max_nodes]
    return any(
        costs.compute_s.at(num_texts * size) < best.s_per_token * num_texts * (tokens + slope * (size - most))
        for size in larger
    )


def best_smoothing(p_K: Floats, traces: Sequence[Trace], num_nodes: int = 128, depth: int = 16) -> float:
    """How much the product form should count beside the traces: what serves held-out traces best."""

    def held_out(smoothing: float) -> float:
        return Forest(p_K, traces, smoothing, num_nodes).expected(num_nodes, depth)

    best = max(SMOOTHINGS, key=held_out)
    return best if held_out(best) > _LEAST_GAIN * held_out(PRODUCT_FORM) else PRODUCT_FORM
