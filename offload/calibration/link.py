"""What the link gives on this machine, measured on the very files that will be streamed."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from offload.checkpoint.layout import BLOCK_BYTES, Piece, SlabLayout
from offload.errors import ReadError
from offload.streaming.disk import DiskReader, allocate
from offload.streaming.source import finish

if TYPE_CHECKING:  # what measures a disk does without torch
    import numpy as np

    from offload.streaming.device import Device

LOCAL_BYTES_PER_S = 1e12  # of a link that nothing passes over
_CHUNK_BYTES, _NUM_IN_FLIGHT = 16 << 20, 3
_NUM_COPIES, _LEAST_S = 8, 1e-9  # of which the first two wake the link up
_GOLDEN = 0.6180339887  # its multiples, modulo 1, are spread evenly however many there are


def link_bytes_per_s(shards: Sequence[Path], *, budget_s: float = 0.3, limit_bytes_per_s: float | None = None) -> float:
    """Bytes per second at which slabs arrive from the largest of these files, the way a sweep reads them.

    Chunks from all over the file are kept in flight until the time is over, so that neither a cache below nor the start
    of the file speaks for the rest. `limit_bytes_per_s` slows the link down on purpose.
    """
    try:
        size_bytes, shard = max((path.stat().st_size, path) for path in shards)
    except OSError as error:
        raise ReadError(f"{Path(error.filename).name} cannot be opened any more: {error.strerror}") from error
    chunk_bytes = min(_CHUNK_BYTES, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    slabs = [allocate(chunk_bytes) for _ in range(_NUM_IN_FLIGHT)]
    for slab in slabs:
        slab.fill(0)  # pages are given on first touch, which is no matter of the link
    store = DiskReader([shard], rate_limit_bytes_per_s=limit_bytes_per_s)
    in_flight: deque[list[Future[None]]] = deque()
    started, index = time.perf_counter(), 0
    try:
        while index == 0 or time.perf_counter() - started < budget_s:
            if len(in_flight) == _NUM_IN_FLIGHT:
                finish(in_flight.popleft())
            lo = int(index * _GOLDEN % 1 * max(0, size_bytes - chunk_bytes)) // BLOCK_BYTES * BLOCK_BYTES
            piece = Piece(0, lo, min(lo + chunk_bytes, size_bytes), 0)
            layout = SlabLayout((piece,), {}, chunk_bytes, is_direct=True)
            in_flight.append(store.read(layout, slabs[index % len(slabs)]))
            index += 1
        while in_flight:
            finish(in_flight.popleft())
        return store.bytes_read / (time.perf_counter() - started)
    finally:
        store.close()


def copy_bytes_per_s(device: "Device", array: "np.ndarray") -> float:
    """Bytes per second at which a GPU copies `array`, which is page-locked memory of the host, by its own clock."""
    import torch

    slot, seconds = device.allocate(array.nbytes), list[float]()
    device.wait(device.copies, device.record(device.compute))  # which may still use the memory that the slot was given
    for _ in range(_NUM_COPIES):
        before = device.record(device.copies, is_timed=True)
        device.copy(slot, torch.from_numpy(array), device.copies)
        after = device.record(device.copies, is_timed=True)
        device.synchronize(after)
        seconds.append(device.elapsed_s(before, after) or 0.0)
    return array.nbytes / max(median(seconds[2:]), _LEAST_S)
