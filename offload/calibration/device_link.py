"""How fast layers reach a GPU: over its own link, and over the disk behind it where some of them live there.

Measured for a plan, since what a plan keeps on the GPU crosses nothing, and only what it leaves on disk waits for the
disk.
"""

from collections.abc import Sequence
from pathlib import Path

from offload.calibration.link import LOCAL_BYTES_PER_S, copy_bytes_per_s, link_bytes_per_s
from offload.memory.plan import MemoryPlan
from offload.streaming.device import Device

_COPY_BYTES = 64 << 20


def device_link_bytes_per_s(
    device: Device, plan: MemoryPlan, shards: Sequence[Path], *, limit_bytes_per_s: float | None = None
) -> float:
    """Bytes per second at which streamed layers arrive: the slower of copies to the GPU and of reads behind them.

    Args:
        shards: the target's files, of which the largest stands for all.
        limit_bytes_per_s: of the disk, where it is slowed down on purpose.
    """
    if not plan.streamed_bytes:
        return LOCAL_BYTES_PER_S
    allocator = device.open_allocator()
    try:
        seconds = plan.streamed_bytes / copy_bytes_per_s(device, allocator.allocate(_COPY_BYTES).array)
    finally:
        allocator.close()
    if plan.disk_streamed_bytes:
        shard = max(shards, key=lambda path: path.stat().st_size)
        seconds = max(seconds, plan.disk_streamed_bytes / link_bytes_per_s(shard, limit_bytes_per_s=limit_bytes_per_s))
    return plan.streamed_bytes / seconds
