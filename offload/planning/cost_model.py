"""What a step costs on this machine: measured curves, and the arithmetic that makes seconds of them for any tree.

A step drafts, sweeps and verifies. The sweep takes at least as long as its slower side: computing, which grows with the
tree, or the link, which does not; while drafting goes on the link fills the free slots, so that much of its work is
done before the sweep begins. A few slots cannot smooth every hiccup, and readers share the processor with computing, so
where both sides take about as long the sweep takes longer than either: `overlap penalty` says by how much. Curves are
of this machine, bytes are of the memory plan, hence the same curves serve every budget.

No torch, no clock. Invariant: a prediction is never shorter than either side alone needs.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from offload.memory.plan import MemoryPlan
from offload.tree.topology import DynamicShape, Shape

Limit = Literal["link", "compute"]
_FRICTIONS = tuple(index / 100 for index in range(101))


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds against a size, known at a few sizes: straight between them, and on with the last slope beyond."""

    sizes: tuple[int, ...]  # rising
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.sizes and len(self.sizes) == len(self.seconds), "a curve has a time for every size"
        assert all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False)), "the sizes of a curve must rise"

    def at(self, size: float) -> float:
        """Seconds at `size`, which need not have been measured."""
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return self.seconds[0]
        hi = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[hi - 1 : hi + 1], self.seconds[hi - 1 : hi + 1]
        slope = (y1 - y0) / (x1 - x0)
        return y1 + slope * (size - x1) if size <= x1 else y1 + max(0.0, slope) * (size - x1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The curves of one pair of models on one machine."""

    compute_s: Curve  # of a sweep against its rows: what it takes when nothing has to be waited for
    draft_step_s: Curve  # of one draft step against its rows
    verify_s: float  # of one step
    link_bytes_per_s: float
    friction: float = 0.0  # see `overlapped_s`


class Traffic(NamedTuple):
    """What a memory plan moves."""

    streamed_bytes: int  # by every sweep
    slots_bytes: int  # that can be there before it starts

    @classmethod
    def of(cls, plan: MemoryPlan) -> "Traffic":
        """The traffic of a plan."""
        return cls(plan.streamed_bytes, plan.num_slots * plan.slot_bytes)


class StepTime(NamedTuple):
    """The parts of one step."""

    draft_s: float
    compute_s: float
    link_s: float  # that the link still needs when the sweep begins
    verify_s: float
    friction: float = 0.0

    @property
    def sweep_s(self) -> float:
        """Computing and the link beside each other."""
        return overlapped_s(self.compute_s, self.link_s, self.friction)

    @property
    def total_s(self) -> float:
        """From one step to the next."""
        return self.draft_s + self.sweep_s + self.verify_s

    @property
    def limit(self) -> Limit:
        """The slower side of the sweep."""
        return "link" if self.link_s > self.compute_s else "compute"


def step_time(costs: Costs, traffic: Traffic, shape: Shape) -> StepTime:
    """The time of one step with trees of this shape, or within these bounds."""
    draft_s = sum(costs.draft_step_s.at(width) for width in draft_widths(shape))
    hidden_s = min(draft_s + costs.verify_s, traffic.slots_bytes / costs.link_bytes_per_s)
    link_s = max(0.0, traffic.streamed_bytes / costs.link_bytes_per_s - hidden_s)
    return StepTime(draft_s, costs.compute_s.at(shape.num_nodes), link_s, costs.verify_s, costs.friction)


def overlapped_s(one_s: float, other_s: float, friction: float) -> float:
    """What two things take that run beside each other: the norm of order 1 / overlap penalty.

    Args:
        overlap penalty: 0 where the shorter one costs nothing, 1 where they take turns.
    """
    longer_s = max(one_s, other_s)
    if not friction or not longer_s:
        return longer_s
    return longer_s * (1 + (min(one_s, other_s) / longer_s) ** (1 / friction)) ** friction


def fit_friction(seen: Sequence[tuple[float, float, float]]) -> float:
    """The overlap penalty that explains sweeps best, by least squares of relative errors.

    Args:
        seen: what computing, the link and both beside each other took, in seconds.
    """

    def error(friction: float) -> float:
        return sum((overlapped_s(one_s, other_s, friction) / both_s - 1) ** 2 for one_s, other_s, both_s in seen)

    return min(_FRICTIONS, key=error)


def draft_widths(shape: Shape) -> list[int]:
    """Rows of every draft step: of a static tree the nodes of each level that have children."""
    if isinstance(shape, DynamicShape):
        return shape.draft_widths
    is_run_N = shape.num_children_N > 0
    return [int(np.count_nonzero(is_run_N[level])) for level in shape.levels[:-1]]
