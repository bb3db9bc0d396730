"""How often a draft's candidates come true: measured, counted for dynamic trees, or assumed.

`measured_acceptance` is Sequoia's acceptance vector (2402.12374, section 3.1): the share of positions
at which the target accepts the draft's candidate of rank k. All positions count as alike, so the
tokens of a pass follow for every static tree.

A dynamic tree has another shape in every step. Its tokens per pass are counted for a few bounds;
between them the gain over the static tree of the same bounds is interpolated, because it changes more
slowly than the yield, and beyond them it stays at its last value.

`AcceptancePrior` is what is assumed where a pair was not measured. A small draft gets the default
acceptance, and misses more often where tokens are drawn. A copy of the target is right far more
often; its figures were measured on the packaged pair's target: ranks of its argmax on Python source
(3000 positions), and tokens per pass of dynamic trees at temperature 0.7, 3 texts of 220 tokens
(`offload generate --draft self:int4 --tree dynamic:NxD`). At temperature 0 that target repeats
itself, which flatters every draft, so those figures are left out. At 8 bits all but 19 positions had
rank 0 and these rank 1; at 4 bits a tail is assumed from rank 6 on. Another target's copy may be
better or worse: `offload tune` measures it.

No model, no torch, no clock. K ranks, W windows of text, B bounds of trees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from offload.checkpoint.checkpoint import ModelFiles
from offload.trees.spec import MAX_TREE_NODES
from offload.trees.topology import DEFAULT_ACCEPTANCE, Floats

NUM_RANKS = 32  # candidates of a position that are looked at
# nodes and depths of the trees whose tokens per pass are counted
_COUNTED_SIZES = (16, 64, 256)
_COUNTED_DEPTHS = (8, 24)
# of a copy: assumed, as the tail of the default acceptance is
_TAIL = tuple(round(0.0001 * (6 / k) ** 3.5, 7) for k in range(7, 33))
_NEVER = (0.0,) * 30  # ranks that none of 3000 positions had
# Where tokens are drawn (T = 0.7) the packaged small draft's first guess was wrong at .51 of 768
# positions of code, two and a half times as often as by the default acceptance. Twice is assumed:
# passes soon show the rest.
_DRAWN_MISSES = 2.0


def measured_acceptance(ranks_W: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
    """Return the share of positions with each rank, (K,), and the standard error of each share.

    The error is that between windows, since positions of one window resemble each other; with one
    window it is binomial.

    Args:
        ranks_W: of each window, the accepted rank at every position; -1 where none was accepted.
    """
    count_WK = np.array(
        [
            np.bincount([rank for rank in ranks if rank >= 0], minlength=NUM_RANKS)
            for ranks in ranks_W
        ]
    )
    size_W = np.array([len(ranks) for ranks in ranks_W])
    p_K = count_WK.sum(0) / size_W.sum()
    num_windows = len(ranks_W)
    if num_windows == 1:
        return p_K, np.sqrt(p_K * (1 - p_K) / size_W.sum())
    excess_WK = count_WK - size_W[:, None] * p_K  # of a ratio of sums
    return p_K, np.sqrt(num_windows / (num_windows - 1) * (excess_WK**2).sum(0)) / size_W.sum()


@dataclass(frozen=True, slots=True)
class DynamicYield:
    """The measured yield of dynamic trees within some bounds."""

    num_nodes: Annotated[int, Meta(le=MAX_TREE_NODES)]  # most nodes
    depth: Annotated[int, Meta(ge=1)]  # most levels
    tokens_per_sweep: Annotated[float, Meta(ge=1)]
    num_sweeps: int  # that were counted


def bounds_to_count(most_nodes: int) -> tuple[tuple[int, int], ...]:
    """Return nodes and depth of the trees whose yield is counted, of at most `most_nodes` nodes."""
    largest = [most_nodes] if most_nodes > 1 else []
    sizes = [size for size in _COUNTED_SIZES if size <= most_nodes] or largest
    bounds = ((size, min(depth, size - 1)) for size in sizes for depth in _COUNTED_DEPTHS)
    return tuple(dict.fromkeys(bounds))


def yields_of(
    bounds: Sequence[tuple[int, int]], tokens_WB: Sequence[Sequence[Sequence[int]]]
) -> tuple[DynamicYield, ...]:
    """Return the mean tokens per pass within each of the bounds; bounds without a pass are left out.

    Args:
        bounds: nodes and depth.
        tokens_WB: tokens of every pass, by window and bounds.
    """
    tokens_B = [
        [num for window in tokens_WB for num in window[index]] for index in range(len(bounds))
    ]
    return tuple(
        DynamicYield(*size, fmean(tokens), len(tokens))
        for size, tokens in zip(bounds, tokens_B, strict=True)
        if tokens
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


def with_misses(p_K: Floats, times: float) -> Floats:
    """Return the acceptance with the first guess wrong `times` as often."""
    return np.array([1 - times * (1 - p_K[0]), *(times * p_K[1:])])


class AcceptancePrior(NamedTuple):
    """What is assumed of one kind of draft, in the fields of a profile."""

    acceptance: tuple[float, ...]  # by rank
    dynamic_yields: tuple[DynamicYield, ...]
    source: str  # in words
    is_copy: bool = False


SMALL = AcceptancePrior(DEFAULT_ACCEPTANCE, (), "default acceptance")
DRAWN = AcceptancePrior(
    tuple(with_misses(np.array(DEFAULT_ACCEPTANCE), _DRAWN_MISSES).tolist()),
    (),
    "default acceptance of drawn text",
)
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


def prior_when(prior: AcceptancePrior | None, *, is_greedy: bool) -> AcceptancePrior | None:
    """Return the assumption about the same kind of draft for greedy or for drawn text."""
    if prior not in (SMALL, DRAWN):
        return prior
    return SMALL if is_greedy else DRAWN
