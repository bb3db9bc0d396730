"""The bytes that routed experts add to a sweep, from how often each expert is used.

A pass either reads what its routers chose, layer after layer, or reads all experts that are not
kept ahead of the routers, as whole layers are streamed: more bytes, but without waiting. With q the
share of a text's tokens that use an expert, n rows need sum 1 - (1 - q)^n of them, and read those
that are not among the most used, which are kept. Traces of three models lie within 13 % of the
first and 25 % of the second, where independent choices (q = k / E for all) would say twice as many
at 16 rows.

No torch, no clock. Invariant: n rows need no fewer experts than one row, and no more than there
are; on demand no more is read than ahead.
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
_PRIOR_TOKENS = 8.0  # how many counted tokens the usual routing is worth
_LEAST_Q = 1e-12


class ExpertRouting:
    """The shares of tokens, in [0, 1], by layer and expert; those of a layer sum to k."""

    def __init__(self, q_LE: NDArray[Any]) -> None:
        self.q_LE = np.clip(np.asarray(q_LE, dtype=np.float64), _LEAST_Q, 1 - _LEAST_Q)
        by_use = np.sort(self.q_LE, axis=None)[::-1]
        # Layers may be alike, and most experts are as rare as others: each share is looked at once.
        self._log_R, self._count_R = _runs(np.log1p(-by_use))
        self._lo_R = np.concatenate([[0], np.cumsum(self._count_R)[:-1]])
        self._known: dict[tuple[float, int], float] = {}

    @classmethod
    @cache
    def usual(cls, num_layers: int, num_experts: int, num_chosen: int) -> "ExpertRouting":
        """Return the routing assumed of an unknown text: k of E are chosen for every row.

        One for all plans, so that those which move the same bytes are equal.
        """
        return cls(np.tile(_usual_E(num_experts, num_chosen), (num_layers, 1)))

    @classmethod
    def counted(
        cls, uses_LE: NDArray[Any] | Sequence[Sequence[float]], num_tokens: float
    ) -> "ExpertRouting":
        """Return the routing by uses in `num_tokens` tokens, with the usual one as a prior."""
        uses_LE = np.asarray(uses_LE, dtype=np.float64)
        num_chosen = max(1, round(float(uses_LE.sum(1).mean()) / max(num_tokens, 1.0)))
        rank_LE = np.argsort(np.argsort(-uses_LE, axis=1, kind="stable"), axis=1)
        usual_LE = _usual_E(uses_LE.shape[1], min(num_chosen, uses_LE.shape[1]))[rank_LE]
        return cls((uses_LE + _PRIOR_TOKENS * usual_LE) / (num_tokens + _PRIOR_TOKENS))

    @property
    def num_experts(self) -> int:
        return self.q_LE.size

    def distinct(self, num_rows: float) -> float:
        """Return the number of experts, over all layers, that a pass of `num_rows` rows needs."""
        return self.misses(num_rows, 0)

    def misses(self, num_rows: float, num_kept: int) -> float:
        """Return the number of these that are not among the `num_kept` most used of all layers."""
        key = (num_rows, num_kept)
        if key not in self._known:
            left_R = np.clip(self._lo_R + self._count_R - num_kept, 0, self._count_R)
            self._known[key] = float((left_R * -np.expm1(num_rows * self._log_R)).sum())
        return self._known[key]


def _runs(values_C: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return each value of sorted ones, and how often it occurs."""
    starts = np.flatnonzero(np.concatenate([[True], values_C[1:] != values_C[:-1]]))
    return values_C[starts], np.diff(np.append(starts, values_C.size))


@cache
def _usual_E(num_experts: int, num_chosen: int) -> NDArray[Any]:
    """Return shares that fall with a power of their rank.

    The power is the one with which several rows need as many experts as is usual.
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
    """Return shares in proportion to rank^-skew, none above 1, that sum to k."""
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
    """The experts' part of a sweep, for one memory plan and one kind of text."""

    slot_bytes: int
    num_kept: int  # experts kept where layers are computed
    routing: ExpertRouting
    num_in_memory: int  # experts that need not come from the disk, the kept ones included
    link_over_disk: float = 1.0  # the link's rate over the disk's; 1 where the disk is the link

    @classmethod
    def from_plan(cls, plan: MemoryPlan, hardware: Hardware | None = None) -> "ExpertTraffic":
        """Return the traffic of a plan with experts on demand, for an unknown text."""
        num_layers = plan.num_expert_layers
        num_in_memory = plan.num_kept_experts + plan.num_host_expert_slots
        routing = ExpertRouting.usual(
            num_layers, plan.num_experts // num_layers, plan.experts_per_token // num_layers
        )
        return cls(
            plan.expert_slot_bytes,
            plan.num_kept_experts,
            routing,
            min(num_in_memory, plan.num_experts),
            max(1.0, hardware.link_over_disk) if hardware else 1.0,
        )

    @classmethod
    def of_draft(cls, plan: MemoryPlan) -> "ExpertTraffic | None":
        """Return the traffic of a draft whose experts come on demand; None for no such draft."""
        experts = plan.draft_experts
        if experts is None:
            return None
        routing = ExpertRouting.usual(experts.num_layers, experts.num_experts, experts.num_chosen)
        num_kept = plan.num_kept_draft_experts
        return cls(experts.slot_bytes, num_kept, routing, num_kept)

    def link_bytes_at(self, num_rows: float) -> float:
        """Return the bytes that an on-demand pass of `num_rows` rows moves over the link."""
        return self.slot_bytes * self.routing.misses(num_rows, self.num_kept)

    def bytes_at(self, num_rows: float) -> float:
        """Return those bytes, or more: what the link could carry while the disk is read."""
        misses, far = (
            self.routing.misses(num_rows, count) for count in (self.num_kept, self.num_in_memory)
        )
        return self.slot_bytes * max(misses, self.link_over_disk * far)

    @property
    def whole_bytes(self) -> float:
        """Return the bytes of all experts that are not kept."""
        left, far = (
            self.routing.num_experts - count for count in (self.num_kept, self.num_in_memory)
        )
        return self.slot_bytes * max(left, self.link_over_disk * far)

    @property
    def is_disk_slower(self) -> bool:
        return (
            self.link_over_disk * (self.routing.num_experts - self.num_in_memory)
            > self.routing.num_experts - self.num_kept
        )

    def hit_share(self, num_rows: float) -> float:
        """Return the share of needed experts that are there already."""
        return 1 - self.routing.misses(num_rows, self.num_kept) / self.routing.distinct(num_rows)
