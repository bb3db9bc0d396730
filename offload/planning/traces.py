"""Accepted ranks, position after position, and what follows from them: tokens per sweep of any tree.

A trace holds for every position of a text the rank that the emitted token had among the draft's candidates, or -1.
Decoding walks down the tree along these ranks until one is missing; the next sweep starts behind that token. So the
walk can be repeated for any static tree without a model. Sequoia's product form (2402.12374, section 3.1) is what the
trace says if every position were like every other.

A dynamic tree has another shape in every step, so it is grown again along a text that the target has written: draft
steps, no sweep. That is done for a few bounds. Between them the gain over the static tree of the same bounds is
interpolated, because it changes more slowly than the yield; beyond them it stays what it was at the last.

No model, no torch, no clock. K ranks, N nodes in the order in which they were found.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from offload.tree.topology import DynamicShape, Floats, Found, Topology

Trace = Sequence[int]
NUM_RANKS = 32  # candidates that a trace looks at
NUM_FOLDS = 4
PRODUCT_FORM = 1e9  # a smoothing beside which no trace counts
COUNTED_SIZES, COUNTED_DEPTHS = (16, 64, 256), (8, 24)  # bounds within which dynamic trees are grown again


def bursts(topology: Topology, trace: Trace) -> list[int]:
    """New tokens of every sweep of a run that emits this text; the end of the text cuts the last one."""
    num_children = topology.num_children_N.tolist()
    first_child = (1 + np.cumsum([0, *num_children])).tolist()  # siblings are consecutive
    yields, node, num_accepted = [], 0, 0
    for rank in trace:
        num_accepted += 1
        if 0 <= rank < num_children[node]:
            node = first_child[node] + rank
        else:
            yields.append(num_accepted)
            node = num_accepted = 0
    return [*yields, num_accepted] if num_accepted else yields


def tokens_per_sweep(topology: Topology, traces: Iterable[Trace]) -> float:
    """G of one tree: tokens over sweeps; all traces are one text, or each would end in a sweep that is cut short."""
    yields = bursts(topology, [rank for trace in traces for rank in trace])
    return sum(yields) / len(yields) if yields else 1.0


def acceptance(traces: Sequence[Trace], num_ranks: int = NUM_RANKS) -> tuple[Floats, Floats]:
    """Frequency of every rank, `p_K`, and the standard error of each entry.

    The error is that between windows, since positions of one window resemble each other; binomial where there is one.
    """
    count_WK = np.array([np.bincount([r for r in t if r >= 0], minlength=num_ranks)[:num_ranks] for t in traces])
    size_W = np.array([len(trace) for trace in traces])
    p_K, num_windows = count_WK.sum(0) / size_W.sum(), len(traces)
    if num_windows == 1:
        return p_K, np.sqrt(p_K * (1 - p_K) / size_W.sum())
    excess_WK = count_WK - size_W[:, None] * p_K  # of a ratio of sums
    return p_K, np.sqrt(num_windows / (num_windows - 1) * (excess_WK**2).sum(0)) / size_W.sum()


class RankTrie:
    """How often every path of ranks was taken, from any position of the traces.

    `p_K` is the chance of a rank behind a path that was never taken, and worth `smoothing` sightings behind any other.
    """

    def __init__(self, traces: Iterable[Trace], max_depth: int, p_K: Floats, smoothing: float = 1.0) -> None:
        self._p, self._smoothing = p_K.tolist(), smoothing
        self.children: list[dict[int, int]] = [{}]  # rank -> node; node 0 is the empty path
        self.num_taken: list[int] = [0]
        self.num_continued: list[int] = [0]  # times the path was taken and the text went on behind it
        for trace in traces:
            for start in range(len(trace)):
                self._add(trace[start : start + max_depth])

    def follow(self, node: int | None, rank: int) -> tuple[float, int | None] | None:
        """The chance that `rank` comes next, and its node; None for ranks beyond `p_K`."""
        if rank >= len(self._p) or node is None:
            return (self._p[rank], None) if rank < len(self._p) else None
        child = self.children[node].get(rank)
        num_taken = 0 if child is None else self.num_taken[child]
        more = self._smoothing
        return (num_taken + more * self._p[rank]) / (self.num_continued[node] + more), child

    def _add(self, path: Trace) -> None:
        node = 0
        for rank in path:
            self.num_continued[node] += 1
            if rank < 0:
                return
            if rank not in self.children[node]:
                self.children[node][rank] = len(self.children)
                self.children.append({})
                self.num_taken.append(0)
                self.num_continued.append(0)
            node = self.children[node][rank]
            self.num_taken[node] += 1


def cut_order(order: Sequence[Found], num_nodes: int, max_depth: int) -> list[Found]:
    """The first `num_nodes` that are no deeper than `max_depth`, an order again; fewer where there are no more."""
    kept = [index for index, node in enumerate(order) if node.depth <= max_depth][:num_nodes]
    place = dict(zip(kept, range(len(kept)), strict=True)) | {-1: -1}
    return [order[index]._replace(parent=place[order[index].parent]) for index in kept]


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicYield:
    """What trees within some bounds have yielded."""

    num_nodes: int  # at most
    depth: int  # at most
    tokens_per_sweep: float
    num_sweeps: int  # counted


def bounds_to_count(max_nodes: int) -> tuple[DynamicShape, ...]:
    """For which bounds to grow again, where no tree may be larger than `max_nodes`."""
    sizes = [size for size in COUNTED_SIZES if size <= max_nodes] or [size for size in (max_nodes,) if size > 1]
    return tuple(dict.fromkeys(DynamicShape(size, min(depth, size - 1)) for size in sizes for depth in COUNTED_DEPTHS))


def yields_of(bounds: Sequence[DynamicShape], bursts_WB: Sequence[Sequence[Sequence[int]]]) -> tuple[DynamicYield, ...]:
    """Tokens per sweep within each of the bounds, from those of every sweep, by window and bounds."""
    counts_B = [[count for window in bursts_WB for count in window[index]] for index in range(len(bounds))]
    return tuple(
        DynamicYield(num_nodes=one.num_nodes, depth=one.depth, tokens_per_sweep=fmean(counts), num_sweeps=len(counts))
        for one, counts in zip(bounds, counts_B, strict=True)
        if counts
    )


def gains(counted: Sequence[DynamicYield], fixed: Callable[[int, int], float]) -> Callable[[int, int], float]:
    """By nodes and depth, how many times the tokens of a static tree a dynamic one yields; 1 where none was counted.

    `fixed` gives the tokens per sweep of the static tree of so many nodes, so deep.
    """
    curves: dict[int, dict[int, float]] = {1: {1: 1.0}}
    for one in sorted(counted, key=lambda one: (one.num_nodes, one.depth)):
        # Trees of one level are the same grown or fixed: the draft's best children of the root.
        curve = curves.setdefault(one.num_nodes, {1: 1.0})
        curve[one.depth] = one.tokens_per_sweep / fixed(one.num_nodes, one.depth)

    def gain(num_nodes: int, depth: int) -> float:
        at_depth = [float(np.interp(depth, list(curve), list(curve.values()))) for curve in curves.values()]
        return float(np.interp(np.log(num_nodes), np.log(list(curves)), at_depth))

    return gain
