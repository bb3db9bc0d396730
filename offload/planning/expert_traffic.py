"""What routed experts add to the bytes of a sweep that reads them one by one: a curve over its rows.

A pass either asks for what its routers chose, layer after layer, or reads all experts that are not kept in order and
ahead of the routers, as whole layers are streamed: more bytes that nobody waits for. No torch, no clock. Invariant: on
demand no more is read than ahead.
"""

from typing import NamedTuple

from offload.memory.plan import MemoryPlan
from offload.planning.hardware import Hardware
from offload.planning.routing import Routing


class ExpertTraffic(NamedTuple):
    """Of one memory plan and one kind of text."""

    slot_bytes: int
    num_kept: int  # where layers are computed
    routing: Routing
    num_near: int  # of all, such as need not come from the disk
    far_bytes: float = 1.0  # that the link could carry while a byte comes from the disk; 1 where the disk is the link

    @classmethod
    def of(cls, plan: MemoryPlan, hardware: Hardware | None = None) -> "ExpertTraffic | None":
        """That of a plan, for a text that nothing is known of; None where experts come with their layers."""
        if not plan.has_experts:
            return None
        num_layers, num_near = plan.num_expert_layers, plan.num_kept_experts + plan.num_host_expert_slots
        routing = Routing.usual(num_layers, plan.num_experts // num_layers, plan.experts_per_token // num_layers)
        is_far = hardware is not None and plan.gpu_bytes is not None
        far_bytes = hardware.feed_bytes_per_s / hardware.disk_bytes_per_s if hardware is not None and is_far else 1.0
        return cls(
            plan.expert_slot_bytes, plan.num_kept_experts, routing, min(num_near, plan.num_experts), max(1.0, far_bytes)
        )

    def near_bytes_at(self, num_rows: float) -> float:
        """That a pass of so many rows moves to where layers are computed when it asks for what it needs."""
        return self.slot_bytes * self.routing.misses(num_rows, self.num_kept)

    def bytes_at(self, num_rows: float) -> float:
        """The same, or what the link could carry while the disk reads its part, if that is more."""
        misses, far = (self.routing.misses(num_rows, count) for count in (self.num_kept, self.num_near))
        return self.slot_bytes * max(misses, self.far_bytes * far)

    @property
    def whole_bytes(self) -> float:
        """Of all that are not kept."""
        left, far = (self.routing.num_experts - count for count in (self.num_kept, self.num_near))
        return self.slot_bytes * max(left, self.far_bytes * far)

    @property
    def is_disk_slower(self) -> bool:
        """Whether the disk takes longer than the link."""
        return self.far_bytes * (self.routing.num_experts - self.num_near) > self.routing.num_experts - self.num_kept

    def hit_share(self, num_rows: float) -> float:
        """Of the experts that a pass needs, such as are there already."""
        return 1 - self.routing.misses(num_rows, self.num_kept) / self.routing.distinct(num_rows)
