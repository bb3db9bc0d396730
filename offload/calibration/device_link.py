"""How fast layers reach a GPU: over its own link, and from the disk behind it where some of them lie there."""

from collections.abc import Sequence
from pathlib import Path

from offload.calibration.link import LOCAL_BYTES_PER_S, copy_bytes_per_s, link_bytes_per_s
from offload.memory.plan import MemoryPlan
from offload.streaming.device import Device

_COPY_BYTES = 64 << 20


def device_link_bytes_per_s(
    device: Device, plan: MemoryPlan, shards: Sequence[Path], *,
    limit_bytes_per_s: float | None = None, disk_bytes_per_s: float | None = None,
) -> float:  # fmt: skip
    """Bytes per second at which streamed layers arrive: the slower of copies to the GPU and of reads behind them.

    Experts count as if all that the GPU has no room for were asked for once; host memory keeps as many as it has slots.

    `disk_bytes_per_s` stands for reads that are not to be measured.
    """
    if not plan.is_streamed:
        return LOCAL_BYTES_PER_S
    num_far = max(0, plan.num_experts - plan.num_kept_experts - plan.num_host_expert_slots)
    moved_bytes = plan.streamed_bytes + (plan.num_experts - plan.num_kept_experts) * plan.expert_slot_bytes
    disk_bytes = plan.disk_streamed_bytes + num_far * plan.expert_slot_bytes
    allocator = device.open_allocator()
    try:
        seconds = moved_bytes / copy_bytes_per_s(device, allocator.allocate(_COPY_BYTES).array)
    finally:
        allocator.close()
    if disk_bytes:
        read = disk_bytes_per_s or link_bytes_per_s(shards, limit_bytes_per_s=limit_bytes_per_s)
        seconds = max(seconds, disk_bytes / read)
    return moved_bytes / seconds
