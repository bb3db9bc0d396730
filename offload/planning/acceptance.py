"""Accepted ranks, position after position, and what follows from them: tokens per sweep of any
tree.

A trace holds for every position of a text the rank that the emitted token had among the draft's
candidates, or -1. Decoding walks down the tree along these ranks until one is missing; the next
sweep starts behind that token. So the walk can be repeated for any static tree without a model.
Sequoia's product form (2402.12374, section 3.1) is what the trace says if every position were like
every other.

A dynamic tree has another shape in every step, so it is grown again along a text that the target
has written: draft steps, no sweep. That is done for a few bounds. Between them the gain over the
static tree of the same bounds is interpolated, because it changes more slowly than the yield;
beyond them it stays what it was at the last.

No model, no torch, no clock. K ranks, N nodes in the order in which they were found.

What is assumed of a draft's guesses where nobody has measured this pair: by what kind of draft it
is.

A small draft gets the default acceptance. A copy of the target is right far more often, and what is
known of it was measured on the packaged pair's target: ranks of its argmax on Python source (3000
positions), and tokens per sweep of dynamic trees at temperature 0.7, 3 texts of 220 tokens
(`offload generate --draft self:int4 --tree dynamic:NxD`). At temperature 0 that target repeats
itself, which flatters every draft, so those figures are left out. At 8 bits all but 19 positions
had the first rank and these the second; at 4 bits a tail is assumed behind the sixth. Another
target's
copy may be better or worse: `offload tune` measures it. No torch, no clock.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from offload.checkpoint.safetensors import Checkpoint
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape, Floats, Topology

Trace = Sequence[int]
NUM_RANKS = 32  # candidates that a trace looks at
NUM_FOLDS = 4
PRODUCT_FORM = 1e9  # a smoothing beside which no trace counts
# bounds within which dynamic trees are grown again
COUNTED_SIZES = (16, 64, 256)
COUNTED_DEPTHS = (8, 24)


def bursts(topology: Topology, trace: Trace) -> list[int]:
    """New tokens of every sweep of a run that emits this text; the end of the text cuts the last
    one.
    """
    num_children = topology.num_children_N.tolist()
    first_child = (1 + np.cumsum([0, *num_children])).tolist()  # siblings are consecutive
    yields = []
    node = 0
    num_accepted = 0
    for rank in trace:
        num_accepted += 1
        if 0 <= rank < num_children[node]:
            node = first_child[node] + rank
        else:
            yields.append(num_accepted)
            node = num_accepted = 0
    return [*yields, num_accepted] if num_accepted else yields


def tokens_per_sweep(topology: Topology, traces: Iterable[Trace]) -> float:
    """G of one tree: tokens over sweeps; all traces are one text, or each would end in a sweep that
    is cut short.
    """
    yields = bursts(topology, [rank for trace in traces for rank in trace])
    return sum(yields) / len(yields) if yields else 1.0


def acceptance(traces: Sequence[Trace], num_ranks: int = NUM_RANKS) -> tuple[Floats, Floats]:
    """Frequency of every rank, `p_K`, and the standard error of each entry.

    The error is that between windows, since positions of one window resemble each other; binomial
    where there is one.
    """
    count_WK = np.array(
        [np.bincount([r for r in t if r >= 0], minlength=num_ranks)[:num_ranks] for t in traces]
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

    `p_K` is the chance of a rank behind a path that was never taken, and worth `smoothing`
    sightings behind any other.
    """

    def __init__(
        self, traces: Iterable[Trace], max_depth: int, p_K: Floats, smoothing: float = 1.0
    ) -> None:
        self._p = p_K.tolist()
        self._smoothing = smoothing
        self.children: list[dict[int, int]] = [{}]  # rank -> node; node 0 is the empty path
        self.num_taken: list[int] = [0]
        # times the path was taken and the text went on behind it
        self.num_continued: list[int] = [0]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicYield:
    """What trees within some bounds have yielded."""

    num_nodes: int  # at most
    depth: int  # at most
    tokens_per_sweep: float
    num_sweeps: int  # counted


def bounds_to_count(max_nodes: int) -> tuple[DynamicShape, ...]:
    """For which bounds to grow again, where no tree may be larger than `max_nodes`."""
    sizes = [size for size in COUNTED_SIZES if size <= max_nodes] or [
        size for size in (max_nodes,) if size > 1
    ]
    return tuple(
        dict.fromkeys(
            DynamicShape(size, min(depth, size - 1)) for size in sizes for depth in COUNTED_DEPTHS
        )
    )


def yields_of(
    bounds: Sequence[DynamicShape], bursts_WB: Sequence[Sequence[Sequence[int]]]
) -> tuple[DynamicYield, ...]:
    """Tokens per sweep within each of the bounds, from those of every sweep, by window and bounds."""
    counts_B = [
        [count for window in bursts_WB for count in window[index]] for index in range(len(bounds))
    ]
    return tuple(
        DynamicYield(
            num_nodes=one.num_nodes,
            depth=one.depth,
            tokens_per_sweep=fmean(counts),
            num_sweeps=len(counts),
        )
        for one, counts in zip(bounds, counts_B, strict=True)
        if counts
    )


def gains(
    counted: Sequence[DynamicYield], fixed: Callable[[int, int], float]
) -> Callable[[int, int], float]:
    """By nodes and depth, how many times the tokens of a static tree a dynamic one yields; 1 where
    none was counted.

    `fixed` gives the tokens per sweep of the static tree of so many nodes, so deep.
    """
    curves: dict[int, dict[int, float]] = {1: {1: 1.0}}
    for one in sorted(counted, key=lambda one: (one.num_nodes, one.depth)):
        # Trees of one level are the same grown or fixed: the draft's best children of the root.
        curve = curves.setdefault(one.num_nodes, {1: 1.0})
        curve[one.depth] = one.tokens_per_sweep / fixed(one.num_nodes, one.depth)

    def gain(num_nodes: int, depth: int) -> float:
        at_depth = [
            float(np.interp(depth, list(curve), list(curve.values()))) for curve in curves.values()
        ]
        return float(np.interp(np.log(num_nodes), np.log(list(curves)), at_depth))

    return gain


# assumed, as that of the default is
_TAIL = tuple(round(0.0001 * (6 / k) ** 3.5, 7) for k in range(7, 33))
_NEVER = (0.0,) * 30  # seen in 3000 positions


class AcceptancePrior(NamedTuple):
    """Of one kind of draft."""

    acceptance: tuple[float, ...]  # by rank
    dynamic_yields: tuple[DynamicYield, ...]
    source: str  # in words
    is_copy: bool = False


def _yields(*rows: tuple[int, int, float, int]) -> tuple[DynamicYield, ...]:
    return tuple(
        DynamicYield(num_nodes=nodes, depth=depth, tokens_per_sweep=tokens, num_sweeps=sweeps)
        for nodes, depth, tokens, sweeps in rows
    )


SMALL = AcceptancePrior(DEFAULT_ACCEPTANCE, (), "default acceptance")
COPIES = {
    4: AcceptancePrior(
        (0.9183, 0.0647, 0.0123, 0.0033, 0.0007, 0.0003, *_TAIL),
        _yields(
            (16, 15, 10.55, 63), (32, 31, 12.27, 54), (64, 63, 17.74, 37), (128, 64, 23.46, 28)
        ),
        "as a copy at 4 bits of the packaged target",
        is_copy=True,
    ),
    8: AcceptancePrior(
        (0.9937, 0.0063, *_NEVER),
        _yields(
            (16, 15, 13.06, 51), (32, 31, 18.91, 35), (64, 63, 25.65, 26), (128, 64, 30.42, 22)
        ),
        "as a copy at 8 bits of the packaged target",
        is_copy=True,
    ),
}


def usual_for(draft: Checkpoint | None) -> AcceptancePrior:
    """Of such a draft; rounding a small one changes little."""
    return (
        COPIES[draft.held.bits]
        if draft is not None and draft.held and draft.held.is_copy
        else SMALL
    )
