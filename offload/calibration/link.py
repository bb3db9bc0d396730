"""What the link gives on this machine, measured on the very files that will be streamed.

Layers reach a GPU over its own link, and from the disk behind it where some of them lie there.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, SlabRead, allocate
from offload.errors import ReadError
from offload.memory.plan import MemoryPlan
from offload.streaming.device import Device
from offload.streaming.disk import ByteSource, DiskReader, OpenSource, finish

_CHUNK_BYTES = 16 << 20
_NUM_IN_FLIGHT = 3
_NUM_COPIES = 8
_NUM_WAKING = 2  # of the copies: the link may sleep
_COPY_BYTES = 64 << 20
_LEAST_S = 1e-9
_GOLDEN = 0.6180339887  # the first n multiples, modulo 1, are spread evenly for any n


def link_bytes_per_s(
    shards: Sequence[Path],
    *,
    budget_s: float = 0.3,
    limit_bytes_per_s: float | None = None,
    open_source: OpenSource = DiskReader,
) -> float:
    """Return bytes per second at which slabs arrive from the largest of these files.

    Args:
        budget_s: seconds to read for.
        limit_bytes_per_s: slows the link down on purpose.

    Raises `ReadError` where a file is gone.
    """
    try:
        size_bytes, shard = max((path.stat().st_size, path) for path in shards)
    except OSError as error:
        raise ReadError(
            f"{Path(error.filename).name} cannot be opened any more: {error.strerror}"
        ) from error
    source = open_source([shard], rate_limit_bytes_per_s=limit_bytes_per_s)
    try:
        return _read_bytes_per_s(source, size_bytes, budget_s)
    finally:
        source.close()


def _read_bytes_per_s(source: ByteSource, size_bytes: int, budget_s: float) -> float:
    """Return the rate of reading a file of this size as a pass does, a few chunks in flight.

    Chunks lie all over the file, so that neither a cache nor its beginning speaks for the rest.
    """
    chunk_bytes = min(_CHUNK_BYTES, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    slabs = [allocate(chunk_bytes) for _ in range(_NUM_IN_FLIGHT)]
    for slab in slabs:
        slab.fill(0)  # pages are given on first touch, which is no matter of the link
    in_flight: deque[list[Future[None]]] = deque()
    num_bytes = 0
    started = time.perf_counter()
    for index in count():
        if index and time.perf_counter() - started >= budget_s:
            break
        if len(in_flight) == _NUM_IN_FLIGHT:
            finish(in_flight.popleft())
        at = int(index * _GOLDEN % 1 * max(0, size_bytes - chunk_bytes))
        lo = at // BLOCK_BYTES * BLOCK_BYTES
        piece = SlabRead(0, lo, min(lo + chunk_bytes, size_bytes), 0)
        layout = SlabLayout((piece,), {}, chunk_bytes, is_direct=True)
        in_flight.append(source.read(layout, slabs[index % len(slabs)]))
        num_bytes += piece.hi - piece.lo
    while in_flight:
        finish(in_flight.popleft())
    return num_bytes / (time.perf_counter() - started)


def copy_bytes_per_s(device: Device, array: np.ndarray) -> float:
    """Return bytes per second at which a GPU copies page-locked `array`, by its own clock."""
    import torch  # what measures a disk does without it

    slot = device.allocate(array.nbytes)
    seconds = list[float]()
    # computing may still use the memory that the slot was given
    device.wait(device.copies, device.mark(device.compute))
    for _ in range(_NUM_COPIES):
        before = device.mark(device.copies, is_timed=True)
        device.copy(slot, torch.from_numpy(array), device.copies)
        after = device.mark(device.copies, is_timed=True)
        device.synchronize(after)
        seconds.append(device.elapsed_s(before, after) or 0.0)
    return array.nbytes / max(median(seconds[_NUM_WAKING:]), _LEAST_S)


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
    """Return bytes per second of streamed layers, by the slower of copies to the GPU and of reads.

    Infinite where nothing streams. Experts count as if a pass needed each one that the GPU has no
    room for; host memory keeps as many as it has slots.

    Args:
        limit_bytes_per_s: slows reads down on purpose.
        disk_bytes_per_s: the rate of reads, where it is given instead of measured.
    """
    if not plan.is_streamed:
        return math.inf
    copies_s = plan.pass_bytes / locked_bytes_per_s(device)
    reads_s = 0.0
    if plan.pass_disk_bytes:
        rate = disk_bytes_per_s or link_bytes_per_s(
            shards, limit_bytes_per_s=limit_bytes_per_s, open_source=open_source
        )
        reads_s = plan.pass_disk_bytes / rate
    return plan.pass_bytes / max(copies_s, reads_s)
