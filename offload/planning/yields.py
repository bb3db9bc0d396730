"""Tokens per sweep of dynamic trees: counted for a few bounds, and anywhere else by their gain over static trees.

A dynamic tree has another shape in every step, so ranks alone cannot say what it yields. Growing it again along a text
that the target has written can, without a sweep: what is accepted is known. That costs draft steps, hence a few bounds
only. Between them the gain over the static tree of the same bounds is interpolated, because it changes slowly where the
yield itself does not; beyond them it stays what it was at the last. A tree without a node to place gains nothing.

No model, no torch, no clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offload.tree.topology import DynamicShape

SIZES, DEPTHS = (16, 64, 256), (8, 24)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicYield:
    """What trees within some bounds have yielded."""

    num_nodes: int  # at most
    depth: int  # at most
    tokens_per_sweep: float
    num_sweeps: int  # counted


def bounds_to_count(max_nodes: int) -> tuple[DynamicShape, ...]:
    """For which bounds to grow again, where no tree may be larger than `max_nodes`."""
    sizes = [size for size in SIZES if size <= max_nodes] or [size for size in (max_nodes,) if size > 1]
    return tuple(dict.fromkeys(DynamicShape(size, min(depth, size - 1)) for size in sizes for depth in DEPTHS))


def yields_of(bounds: Sequence[DynamicShape], bursts_WB: Sequence[Sequence[Sequence[int]]]) -> tuple[DynamicYield, ...]:
    """Tokens per sweep within each of the bounds, over all windows; none where no sweep was counted.

    Args:
        bursts_WB: tokens of every sweep, by window and bounds.
    """
    found = []
    for index, one in enumerate(bounds):
        bursts = [burst for window in bursts_WB for burst in window[index]]
        if bursts:
            mean, count = sum(bursts) / len(bursts), len(bursts)
            found.append(
                DynamicYield(num_nodes=one.num_nodes, depth=one.depth, tokens_per_sweep=mean, num_sweeps=count)
            )
    return tuple(found)


class Gains:
    """How many times the tokens of a static tree a dynamic one within the same bounds yields.

    Args:
        counted: at some bounds; none leaves a gain of one everywhere.
        fixed: tokens per sweep of the static tree of so many nodes, so deep.
    """

    def __init__(self, counted: Sequence[DynamicYield], fixed: Callable[[int, int], float]) -> None:
        curves: dict[int, dict[int, float]] = {1: {1: 1.0}}
        for one in sorted(counted, key=lambda one: (one.num_nodes, one.depth)):
            # Trees of one level are the same grown or fixed: the draft's best children of the root.
            curve = curves.setdefault(one.num_nodes, {1: 1.0})
            curve[one.depth] = one.tokens_per_sweep / fixed(one.num_nodes, one.depth)
        self._curves = curves

    def at(self, num_nodes: int, depth: int) -> float:
        """The gain within these bounds."""
        gains = [float(np.interp(depth, list(curve), list(curve.values()))) for curve in self._curves.values()]
        return float(np.interp(np.log(num_nodes), np.log(list(self._curves)), gains))
