"""Accepted ranks at every position of a text, and what follows: tokens per sweep of any tree.

A trace holds, for every position of a text, the rank of the emitted token among the draft's
candidates, or -1. Decoding walks down the tree along these ranks until one is missing; the next
sweep starts behind that token. So the walk can be repeated for any static tree without a model.
Sequoia's product form (2402.12374, section 3.1) assumes that all positions are alike.

A dynamic tree has another shape in every step, so it is grown again along a text that the target
has written: draft steps, no sweep. That is done for a few bounds. Between them the gain over the
static tree of the same bounds is interpolated, because it changes more slowly than the yield;
beyond them it stays at its last value.

`AcceptancePrior` is what is assumed where this pair was not measured. A small draft gets the
default acceptance. A self draft is right far more often; its figures were measured on the packaged
pair's target: ranks of its argmax on Python source (3000 positions), and tokens per sweep of
dynamic trees at temperature 0.7, 3 texts of 220 tokens (`offload generate --draft self:int4 --tree
dynamic:NxD`). At temperature 0 that target repeats itself, which flatters every draft, so those
figures are left out. At 8 bits all but 19 positions had rank 0 and these rank 1; at 4 bits a tail
is assumed from rank 6 on. Another target's self draft may be better or worse: `offload tune`
measures it.

No model, no torch, no clock. K ranks, N nodes in the order in which they were found.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from offload.checkpoint.checkpoint import ModelFiles
from offload.trees.spec import MAX_TREE_NODES
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape, Floats, Topology

Trace = Sequence[int]
NUM_RANKS = 32  # candidates that a trace looks at
NUM_FOLDS = 4
PRODUCT_FORM = 1e9  # a smoothing beside which no trace counts
# the bounds within which dynamic trees are grown again
COUNTED_SIZES = (16, 64, 256)
COUNTED_DEPTHS = (8, 24)
# of a self draft: assumed, as the tail of the default acceptance is
_TAIL = tuple(round(0.0001 * (6 / k) ** 3.5, 7) for k in range(7, 33))
_NEVER = (0.0,) * 30  # ranks that none of 3000 positions had


def walk(
    children: Sequence[Mapping[int, int]], place: Sequence[int], num_nodes: int, trace: Trace
) -> list[int]:
    """Return the new tokens of every sweep of a run that emits this text.

    The end of the text cuts the last one. The tree has the nodes whose place is below `num_nodes`;
    `children` are by rank.
    """
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


def bursts(topology: Topology, trace: Trace) -> list[int]:
    """Return the new tokens of every sweep of a run that emits this text with one tree."""
    first = 1 + np.cumsum([0, *topology.num_children_N])  # siblings are consecutive
    children = [dict(enumerate(range(lo, hi))) for lo, hi in pairwise(first.tolist())]
    return walk(children, range(topology.num_nodes), topology.num_nodes, trace)


def tokens_per_sweep(topology: Topology, traces: Iterable[Trace]) -> float:
    """Return the tokens per sweep of one tree; all traces count as one text, cut once."""
    yields = bursts(topology, [rank for trace in traces for rank in trace])
    return sum(yields) / len(yields) if yields else 1.0


def measured_acceptance(traces: Sequence[Trace]) -> tuple[Floats, Floats]:
    """Return the frequency of every rank, `p_K`, and the standard error of each entry.

    The error is that between windows, since positions of one window resemble each other; with one
    window it is binomial.
    """
    count_WK = np.array(
        [np.bincount([r for r in t if r >= 0], minlength=NUM_RANKS) for t in traces]
    )
    size_W = np.array([len(trace) for trace in traces])
    p_K = count_WK.sum(0) / size_W.sum()
    num_windows = len(traces)
    if num_windows == 1:
        return p_K, np.sqrt(p_K * (1 - p_K) / size_W.sum())
    excess_WK = count_WK - size_W[:, None] * p_K  # of a ratio of sums
    return p_K, np.sqrt(num_windows / (num_windows - 1) * (excess_WK**2).sum(0)) / size_W.sum()


class RankTrie:
    """How often every path of ranks was taken, from any position of the traces.

    `p_K` is the chance of a rank after a path that was never taken; after any other it counts as
    `smoothing` observations.
    """

    def __init__(
        self, traces: Iterable[Trace], max_depth: int, p_K: Floats, smoothing: float = 1.0
    ) -> None:
        self._p = p_K.tolist()
        self._smoothing = smoothing
        self.children: list[dict[int, int]] = [{}]  # rank -> node; node 0 is the empty path
        self.num_taken: list[int] = [0]
        # how often the path was taken and the text went on after it
        self.num_continued: list[int] = [0]
        for trace in traces:
            for start in range(len(trace)):
                self._add(trace[start : start + max_depth])

    def follow(self, node: int | None, rank: int) -> tuple[float, int | None] | None:
        """Return the chance that `rank` comes next, and its node; None for ranks beyond `p_K`."""
        if rank >= len(self._p) or node is None:
            return (self._p[rank], None) if rank < len(self._p) else None
        child = self.children[node].get(rank)
        num_taken = 0 if child is None else self.num_taken[child]
        prior_weight = self._smoothing
        return (num_taken + prior_weight * self._p[rank]) / (
            self.num_continued[node] + prior_weight
        ), child

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


@dataclass(frozen=True, slots=True)
class DynamicYield:
    """The measured yield of dynamic trees within some bounds."""

    num_nodes: Annotated[int, Meta(le=MAX_TREE_NODES)]  # most nodes
    depth: Annotated[int, Meta(ge=1)]  # most levels
    tokens_per_sweep: Annotated[float, Meta(ge=1)]
    num_sweeps: int  # that were counted


def bounds_to_count(max_nodes: int) -> tuple[DynamicShape, ...]:
    """Return the bounds to grow trees in again, with at most `max_nodes` nodes."""
    largest = [max_nodes] if max_nodes > 1 else []
    sizes = [size for size in COUNTED_SIZES if size <= max_nodes] or largest
    shapes = (
        DynamicShape(size, min(depth, size - 1)) for size in sizes for depth in COUNTED_DEPTHS
    )
    return tuple(dict.fromkeys(shapes))


def yields_of(
    bounds: Sequence[DynamicShape], bursts_WB: Sequence[Sequence[Sequence[int]]]
) -> tuple[DynamicYield, ...]:
    """Return the tokens per sweep within each of the bounds; `bursts_WB` has them by window."""
    counts_B = [
        [count for window in bursts_WB for count in window[index]] for index in range(len(bounds))
    ]
    return tuple(
        DynamicYield(shape.num_nodes, shape.depth, fmean(counts), len(counts))
        for shape, counts in zip(bounds, counts_B, strict=True)
        if counts
    )


def gains(
    counted: Sequence[DynamicYield], fixed: Callable[[int, int], float]
) -> Callable[[int, int], float]:
    """Return by nodes and depth a dynamic tree's tokens over those of the static one, `fixed`."""
    curves: dict[int, dict[int, float]] = {1: {1: 1.0}}
    for dynamic in sorted(counted, key=lambda dynamic: (dynamic.num_nodes, dynamic.depth)):
        # Trees of one level are the same grown or fixed: the draft's best children of the root.
        curve = curves.setdefault(dynamic.num_nodes, {1: 1.0})
        curve[dynamic.depth] = dynamic.tokens_per_sweep / fixed(dynamic.num_nodes, dynamic.depth)

    def gain(num_nodes: int, depth: int) -> float:
        at_depth = [
            float(np.interp(depth, list(curve), list(curve.values()))) for curve in curves.values()
        ]
        return float(np.interp(np.log(num_nodes), np.log(list(curves)), at_depth))

    return gain


class AcceptancePrior(NamedTuple):
    """What is assumed of one kind of draft, in the fields of a profile."""

    acceptance: tuple[float, ...]  # by rank
    dynamic_yields: tuple[DynamicYield, ...]
    source: str  # in words
    is_copy: bool = False
    traces: tuple[tuple[int, ...], ...] = ()
    smoothing: float = 1.0


SMALL = AcceptancePrior(DEFAULT_ACCEPTANCE, (), "default acceptance")
COPIES = {
    4: AcceptancePrior(
        (0.9183, 0.0647, 0.0123, 0.0033, 0.0007, 0.0003, *_TAIL),
        (
            DynamicYield(16, 15, 10.55, 63),
            DynamicYield(32, 31, 12.27, 54),
            DynamicYield(64, 63, 17.74, 37),
            DynamicYield(128, 64, 23.46, 28),
        ),
        "as a copy at 4 bits of the packaged target",
        is_copy=True,
    ),
    8: AcceptancePrior(
        (0.9937, 0.0063, *_NEVER),
        (
            DynamicYield(16, 15, 13.06, 51),
            DynamicYield(32, 31, 18.91, 35),
            DynamicYield(64, 63, 25.65, 26),
            DynamicYield(128, 64, 30.42, 22),
        ),
        "as a copy at 8 bits of the packaged target",
        is_copy=True,
    ),
}


def prior_for(files: ModelFiles) -> AcceptancePrior | None:
    """Return the assumed acceptance of the draft; None where nothing ranks candidates.

    Quantising a small draft changes little.
    """
    if files.draft is None:
        return None
    held = files.draft.held
    return COPIES[held.bits] if held and held.is_copy else SMALL
