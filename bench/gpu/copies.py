"""How bytes get to this device: page locking, large copies, and small uploads behind layers.

Whether a small upload waits for all layers queued before it decides how much of drafting the link
can hide: staged ones are timed beside copies.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.bench.harness.promises import attempt, keep_rows, row
from offload.bench.harness.record import Row
from offload.calibration.link import copy_bytes_per_s
from offload.streaming.device import CudaDevice
from offload.streaming.disk import allocate
from offload.streaming.pinned import PinnedAllocator, PinningMethod, open_pinned_allocator

# a layer of Llama-2-70B
LAYER_BYTES = 1_711_000_000
# a few positions, a mask, embeddings of 768 rows
UPLOADS = {"64 B": 64, "40 KB": 40_000, "12 MB": 12_582_912}
_QUEUED_BYTES = 512 << 20  # each; three of them are long enough to be waited for
# as a pass leaves the link: every slot has a layer on its way
_NUM_QUEUED = 3
# the first round is not like the others
_NUM_ROUNDS = 4


class Observed(NamedTuple):
    """One way of sending on one device."""

    upload_s: float  # until a small tensor is there that was asked for behind several layers
    # rate of these layers
    copy_bytes_per_s: float


def measure(
    card: CudaDevice, arena: PinnedAllocator, layer_bytes: int = LAYER_BYTES
) -> Iterator[Row]:
    """Yield all rows; what breaks costs its own."""
    yield from attempt("uploads", (), uploads(card, arena, min(layer_bytes, _QUEUED_BYTES)))
    ways = [*arena.ways_open, PageableWay()]
    yield from attempt("pinning", (), pinning(card, ways, layer_bytes))


def pinning(card: CudaDevice, ways: list[PinningMethod], num_bytes: int) -> Iterator[Row]:
    """Time how long each way takes to lock a layer, and how fast the device copies from there."""
    for way in ways:
        started = time.perf_counter()
        array = way.allocate(num_bytes)
        locked = num_bytes / 1e9 / (time.perf_counter() - started)
        yield row(f"locking memory, {way.name}", locked, None, None, "GB/s")
        copied = copy_bytes_per_s(card, array) / 1e9
        yield row(f"copies from memory, {way.name}", copied, None, None, "GB/s")
        way.free(array)


class PageableWay:
    """Memory that is not locked, for comparison."""

    name = "pageable"
    is_seen = False

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return pages that are there already."""
        array = allocate(num_bytes)
        array.fill(0)
        return array

    def free(self, array: np.ndarray) -> None:
        """Do nothing: the pages go with the last view."""


def uploads(card: CudaDevice, arena: PinnedAllocator, layer_bytes: int) -> Iterator[Row]:
    """Time each size behind three layers, as copies and staged, and with nothing before it."""
    layer = arena.allocate(layer_bytes).array
    slot = card.allocate(layer_bytes)
    for name in ("at once", "staged"):
        with ExitStack() as resources:
            refusal = card.stage_uploads(resources) if name == "staged" else None
            arrived = {"is_met": refusal is None and is_right(card), "notes": refusal or ""}
            yield row(f"uploads arrive as sent, {name}", 0.0, None, None, "") | arrived
            for size, num_bytes in UPLOADS.items():
                found = observe(card, layer, slot, num_bytes=num_bytes)
                idle = observe(card, layer[:4096], slot[:4096], num_bytes=num_bytes)
                about = f"upload of {size} behind three layers, {name}"
                yield row(about, found.upload_s, idle.upload_s, None, "s")
            yield row(f"layers, {name}", found.copy_bytes_per_s / 1e9, None, None, "GB/s")


def is_right(device: CudaDevice) -> bool:
    """Return whether uploads of any type and size bring what was sent, one behind the other."""
    sources = [
        torch.arange(size, dtype=dtype) % 2
        for size in (1, 77, 9001)
        for dtype in (torch.int64, torch.float32)
    ]
    sources += [torch.arange(1001) % 3 == 0, torch.tensor(5)]
    sent = [device.upload(source) for source in sources]
    pairs = zip(sent, sources, strict=True)
    return all(torch.equal(there.cpu(), source) for there, source in pairs)


def observe(
    device: CudaDevice,
    layer: np.ndarray,
    slot: Tensor,
    *,
    num_bytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Queue some layers, ask for a small tensor, and wait for it; return medians over rounds."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    upload_s = list[float]()
    rates = list[float]()
    weights = torch.from_numpy(layer)
    # memory of the slot may still be in use there
    device.wait(device.copies, device.record(device.compute))
    for _ in range(_NUM_ROUNDS):
        before = device.record(device.copies, is_timed=True)
        for _ in range(_NUM_QUEUED):
            device.copy(slot, weights, device.copies)
        after = device.record(device.copies, is_timed=True)
        started = clock()
        device.upload(source)
        device.synchronize(device.record(device.compute))
        upload_s.append(clock() - started)
        device.synchronize(after)
        rates.append(_NUM_QUEUED * layer.nbytes / max(device.elapsed_s(before, after) or 0.0, 1e-9))
    return Observed(median(upload_s[1:]), median(rates[1:]))


if __name__ == "__main__":
    opened = CudaDevice(0)
    memory = open_pinned_allocator(opened.place)
    with torch.inference_mode():
        keep_rows(measure(opened, memory))
    memory.close()
