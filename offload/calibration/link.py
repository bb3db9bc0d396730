"""What the link gives on this machine, measured on the very files that will be streamed.

Layers reach a GPU over its own link, and from the disk behind it where some of them lie there.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median

import numpy as np

from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, SlabRead
from offload.errors import ReadError
from offload.memory.plan import MemoryPlan
from offload.streaming.device import Device
from offload.streaming.disk import DiskReader, OpenSource, allocate, finish

_CHUNK_BYTES = 16 << 20
_NUM_IN_FLIGHT = 3
# of which the first two wake the link up
_NUM_COPIES = 8
_COPY_BYTES = 64 << 20
_LEAST_S = 1e-9
_GOLDEN = 0.6180339887  # its multiples, modulo 1, are spread evenly however many there are


def link_bytes_per_s(
    shards: Sequence[Path],
    *,
    budget_s: float = 0.3,
    limit_bytes_per_s: float | None = None,
    open_source: OpenSource = DiskReader,
) -> float:
    """Return bytes per second at which slabs arrive from the largest of these files.

    They are read as a pass reads them: chunks from all over the file are kept in flight until the
    time is over, so that neither a cache nor the start of the file speaks for the rest.
    `limit_bytes_per_s` slows the link down on purpose.
    """
    try:
        size_bytes, shard = max((path.stat().st_size, path) for path in shards)
    except OSError as error:
        raise ReadError(
            f"{Path(error.filename).name} cannot be opened any more: {error.strerror}"
        ) from error
    chunk_bytes = min(_CHUNK_BYTES, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    slabs = [allocate(chunk_bytes) for _ in range(_NUM_IN_FLIGHT)]
    for slab in slabs:
        slab.fill(0)  # pages are given on first touch, which is no matter of the link
    source = open_source([shard], rate_limit_bytes_per_s=limit_bytes_per_s)
    in_flight: deque[list[Future[None]]] = deque()
    started = time.perf_counter()
    index = num_bytes = 0
    try:
        while index == 0 or time.perf_counter() - started < budget_s:
            if len(in_flight) == _NUM_IN_FLIGHT:
                finish(in_flight.popleft())
            lo = (
                int(index * _GOLDEN % 1 * max(0, size_bytes - chunk_bytes))
                // BLOCK_BYTES
                * BLOCK_BYTES
            )
            piece = SlabRead(0, lo, min(lo + chunk_bytes, size_bytes), 0)
            layout = SlabLayout((piece,), {}, chunk_bytes, is_direct=True)
            in_flight.append(source.read(layout, slabs[index % len(slabs)]))
            num_bytes += piece.hi - piece.lo
            index += 1
        while in_flight:
            finish(in_flight.popleft())
        return num_bytes / (time.perf_counter() - started)
    finally:
        source.close()


def copy_bytes_per_s(device: Device, array: np.ndarray) -> float:
    """Return bytes per second at which a GPU copies page-locked `array`, by its own clock."""
    import torch  # what measures a disk does without it

    slot = device.allocate(array.nbytes)
    seconds = list[float]()
    # which may still use the memory that the slot was given
    device.wait(device.copies, device.mark(device.compute))
    for _ in range(_NUM_COPIES):
        before = device.mark(device.copies, is_timed=True)
        device.copy(slot, torch.from_numpy(array), device.copies)
        after = device.mark(device.copies, is_timed=True)
        device.synchronize(after)
        seconds.append(device.elapsed_s(before, after) or 0.0)
    return array.nbytes / max(median(seconds[2:]), _LEAST_S)


def locked_bytes_per_s(device: Device) -> float:
    """Return bytes per second from memory that is locked for a while to a GPU."""
    allocator = device.open_allocator()
    try:
        return copy_bytes_per_s(device, allocator.allocate(_COPY_BYTES).array)
    finally:
        allocator.close()


def device_link_bytes_per_s(
    device: Device,
    plan: MemoryPlan,
    shards: Sequence[Path],
    *,
    limit_bytes_per_s: float | None = None,
    disk_bytes_per_s: float | None = None,
    open_source: OpenSource = DiskReader,
) -> float:
    """Return bytes per second of streamed layers: the slower of copies to the GPU and of reads.

    Infinite where nothing streams.

    Experts count as if all that the GPU has no room for were asked for once; host memory keeps as
    many as it has slots. `disk_bytes_per_s` stands for reads that are not to be measured.
    """
    if not plan.is_streamed:
        return math.inf
    moved_bytes = plan.pass_bytes
    disk_bytes = plan.pass_disk_bytes
    seconds = moved_bytes / locked_bytes_per_s(device)
    if disk_bytes:
        read = disk_bytes_per_s or link_bytes_per_s(
            shards, limit_bytes_per_s=limit_bytes_per_s, open_source=open_source
        )
        seconds = max(seconds, disk_bytes / read)
    return moved_bytes / seconds
