"""What routed experts add to the bytes of a sweep that reads them one by one: a curve over its
rows.

A pass either asks for what its routers chose, layer after layer, or reads all experts that are not
kept in order and
ahead of the routers, as whole layers are streamed: more bytes that nobody waits for. No torch, no
clock. Invariant: on demand no more is read than ahead.

How often a token of a text uses each routed expert, and so how many experts a pass of several rows
needs.

With q the share of a text's tokens that use an expert, n rows need sum 1 - (1 - q)^n of them; of
those that are not among the most popular so many have to be read. Traces of three models lie within
13 % of the first and 25 % of the second, where independent choices (q = k / E for all) would say
twice as many at 16 rows. No torch. Invariant: n rows need no fewer than one row does, and no more
than there are.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.memory.plan import MemoryPlan
from offload.planning.hardware import Hardware

# Before anything is measured: at 8 rows traces have k n^0.66 (Qwen3-30B-A3B) to k n^0.78
# (gpt-oss-120b); where few experts are to be had, rows soon need all of them, so that the
# difference to independent ones shows at fewer rows.
_GROWTH = 0.75
_FITTED_ROWS = (2, 8)
_MOST_SKEW = 8.0
_PRIOR_TOKENS = 8.0  # that what is usual counts for beside counts
_LEAST_Q = 1e-12


class ExpertRouting:
    """The shares, in [0, 1], by layer and expert; those of a layer sum to k."""

    def __init__(self, q_LE: NDArray[Any]) -> None:
        self.q_LE = np.clip(np.asarray(q_LE, dtype=np.float64), _LEAST_Q, 1 - _LEAST_Q)
        by_use = np.sort(self.q_LE, axis=None)[::-1]
        # Layers may be alike, and most experts are as rare as others: each share is looked at once.
        self._log_R, self._count_R = _runs(np.log1p(-by_use))
        self._lo_R = np.concatenate([[0], np.cumsum(self._count_R)[:-1]])
        self._known: dict[tuple[float, int], float] = {}

    @classmethod
    def usual(cls, num_layers: int, num_experts: int, num_chosen: int) -> "ExpertRouting":
        """Of a text that nothing is known of: k of E are chosen for every row."""
        return cls(np.tile(_usual_E(num_experts, num_chosen), (num_layers, 1)))

    @classmethod
    def counted(
        cls, uses_LE: NDArray[Any] | Sequence[Sequence[float]], num_tokens: float
    ) -> "ExpertRouting":
        """By how many of so many tokens have used each; of few tokens what is usual still counts."""
        uses_LE = np.asarray(uses_LE, dtype=np.float64)
        num_chosen = max(1, round(float(uses_LE.sum(1).mean()) / max(num_tokens, 1.0)))
        rank_LE = np.argsort(np.argsort(-uses_LE, axis=1, kind="stable"), axis=1)
        usual_LE = _usual_E(uses_LE.shape[1], min(num_chosen, uses_LE.shape[1]))[rank_LE]
        return cls((uses_LE + _PRIOR_TOKENS * usual_LE) / (num_tokens + _PRIOR_TOKENS))

    @property
    def num_experts(self) -> int:
        """Of all layers."""
        return self.q_LE.size

    def distinct(self, num_rows: float) -> float:
        """Experts that a pass of so many rows is expected to need, over all layers."""
        return self.misses(num_rows, 0)

    def misses(self, num_rows: float, num_kept: int) -> float:
        """Of these, such as are not among the `num_kept` most used of all layers."""
        key = (num_rows, num_kept)
        if key not in self._known:
            left_R = np.clip(self._lo_R + self._count_R - num_kept, 0, self._count_R)
            self._known[key] = float((left_R * -np.expm1(num_rows * self._log_R)).sum())
        return self._known[key]


def _runs(values_C: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Each value of sorted ones, and how often it occurs in a row."""
    starts = np.flatnonzero(np.concatenate([[True], values_C[1:] != values_C[:-1]]))
    return values_C[starts], np.diff(np.append(starts, values_C.size))


@cache
def _usual_E(num_experts: int, num_chosen: int) -> NDArray[Any]:
    """Shares that fall with a power of their rank, the one with which rows need as many experts as
    is usual.
    """
    num_rows = min(max(num_experts / num_chosen / 2, _FITTED_ROWS[0]), _FITTED_ROWS[1])
    wanted = num_chosen * num_rows**_GROWTH
    low = 0.0
    high = _MOST_SKEW
    for _ in range(40):
        middle = (low + high) / 2
        needed = (1 - (1 - _power_E(num_experts, num_chosen, middle)) ** num_rows).sum()
        low, high = (middle, high) if needed > wanted else (low, middle)
    return _power_E(num_experts, num_chosen, low)


def _power_E(num_experts: int, num_chosen: int, skew: float) -> NDArray[Any]:
    """Shares in proportion to rank^-skew, none above 1, that sum to k."""
    weight_E = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    low = 0.0
    high = num_chosen * num_experts**skew + 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.minimum(1, middle * weight_E).sum() < num_chosen else (low, middle)
        )
    return np.minimum(1.0, high * weight_E)


class ExpertTraffic(NamedTuple):
    """Of one memory plan and one kind of text."""

    slot_bytes: int
    num_kept: int  # where layers are computed
    routing: ExpertRouting
    num_near: int  # of all, such as need not come from the disk
    # that the link could carry while a byte comes from the disk; 1 where the disk is the link
    far_bytes: float = 1.0

    @classmethod
    def of(cls, plan: MemoryPlan, hardware: Hardware | None = None) -> "ExpertTraffic | None":
        """That of a plan, for a text that nothing is known of; None where experts come with their
        layers.
        """
        if not plan.has_experts:
            return None
        num_layers = plan.num_expert_layers
        num_near = plan.num_kept_experts + plan.num_host_expert_slots
        routing = ExpertRouting.usual(
            num_layers, plan.num_experts // num_layers, plan.experts_per_token // num_layers
        )
        is_far = hardware is not None and plan.gpu_bytes is not None
        far_bytes = (
            hardware.feed_bytes_per_s / hardware.disk_bytes_per_s
            if hardware is not None and is_far
            else 1.0
        )
        return cls(
            plan.expert_slot_bytes,
            plan.num_kept_experts,
            routing,
            min(num_near, plan.num_experts),
            max(1.0, far_bytes),
        )

    def near_bytes_at(self, num_rows: float) -> float:
        """That a pass of so many rows moves to where layers are computed when it asks for what it
        needs.
        """
        return self.slot_bytes * self.routing.misses(num_rows, self.num_kept)

    def bytes_at(self, num_rows: float) -> float:
        """The same, or what the link could carry while the disk reads its part, if that is more."""
        misses, far = (
            self.routing.misses(num_rows, count) for count in (self.num_kept, self.num_near)
        )
        return self.slot_bytes * max(misses, self.far_bytes * far)

    @property
    def whole_bytes(self) -> float:
        """Of all that are not kept."""
        left, far = (self.routing.num_experts - count for count in (self.num_kept, self.num_near))
        return self.slot_bytes * max(left, self.far_bytes * far)

    @property
    def is_disk_slower(self) -> bool:
        """Whether the disk takes longer than the link."""
        return (
            self.far_bytes * (self.routing.num_experts - self.num_near)
            > self.routing.num_experts - self.num_kept
        )

    def hit_share(self, num_rows: float) -> float:
        """Of the experts that a pass needs, such as are there already."""
        return 1 - self.routing.misses(num_rows, self.num_kept) / self.routing.distinct(num_rows)
