"""How bytes get to this device: ways of locking memory, copies at once and in chunks, small uploads behind layers.

Whether a small upload waits for all layers queued before it decides how much of drafting the link can hide; the
remedies are measured beside each other, and which of them a run would take.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch

from offload.bench.harness.promises import failure, row
from offload.bench.harness.row_log import Row, add_row
from offload.calibration.copy_choice import CANDIDATES, STAGING_BYTES, choose_copies, is_right, observe, using
from offload.calibration.link import copy_bytes_per_s
from offload.streaming.copy_policy import AT_ONCE, CopyPolicy
from offload.streaming.device import CudaDevice
from offload.streaming.disk import allocate
from offload.streaming.pinned import PinnedAllocator, Way, open_pinned_allocator

LAYER_BYTES = 1_711_000_000  # of Llama-2-70B
UPLOADS = {"64 B": 64, "40 KB": 40_000, "12 MB": 12_582_912}  # a few positions, a mask, embeddings of 768 rows
_QUEUED_BYTES = 512 << 20  # each; three of them are long enough to be waited for
_CHUNKS = (16 << 20, 32 << 20, 64 << 20)


def measure(card: CudaDevice, arena: PinnedAllocator, layer_bytes: int = LAYER_BYTES) -> Iterator[Row]:
    """All rows; what breaks costs its own."""
    asked: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        ("chosen", lambda: _chosen(card, arena)),
        ("uploads", lambda: uploads(card, arena, min(layer_bytes, _QUEUED_BYTES))),
        ("pinning", lambda: pinning(card, [*arena.ways_open, PageableWay()], layer_bytes)),
    ]
    for name, ask in asked:
        try:
            yield from ask()
        except Exception as error:
            yield failure(name, None, error)


def pinning(card: CudaDevice, ways: list[Way], num_bytes: int) -> Iterator[Row]:
    """How long each way takes to lock a layer, and how fast the device copies from there."""
    for way in ways:
        started = time.perf_counter()
        array = way.allocate(num_bytes)
        locked_s = time.perf_counter() - started
        yield row(f"locking memory, {way.name}", num_bytes / 1e9 / locked_s, None, None, "GB/s")
        yield row(f"copies from memory, {way.name}", copy_bytes_per_s(card, array) / 1e9, None, None, "GB/s")
        way.free(array)


class PageableWay:
    """Memory that is not locked, for comparison."""

    name = "pageable"

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Pages that are there already."""
        array = allocate(num_bytes)
        array.fill(0)
        return array

    def free(self, array: np.ndarray) -> None:
        """They go with the last view."""


def uploads(card: CudaDevice, arena: PinnedAllocator, layer_bytes: int) -> Iterator[Row]:
    """Each size behind three layers, under each policy, beside the same with nothing before it."""
    layer, staging = arena.allocate(layer_bytes).array, arena.allocate(STAGING_BYTES).array
    slot = card.allocate(layer_bytes)
    for policy in (AT_ONCE, *(CopyPolicy(chunk_bytes=size) for size in _CHUNKS), CANDIDATES[-1]):
        for name, has_ticks in ((told(policy), True), *([(told(policy, False), False)] if policy.chunk_bytes else [])):
            with using(card, policy, staging), _ticks(card, has_ticks):
                yield row(f"uploads arrive as sent, {name}", 0.0, None, None, "") | {"is_met": is_right(card)}
                for size, num_bytes in UPLOADS.items():
                    found = observe(card, layer, slot, num_bytes=num_bytes)
                    idle = observe(card, layer[:4096], slot[:4096], num_bytes=num_bytes)
                    about = f"upload of {size} behind three layers, {name}"
                    yield row(about, found.upload_s, idle.upload_s, None, "s")
                yield row(f"layers, {name}", found.copy_bytes_per_s / 1e9, None, None, "GB/s")


def told(policy: CopyPolicy, has_ticks: bool = True) -> str:
    """A policy in words."""
    if policy.chunk_bytes is None:
        return "staged" if policy.stages_uploads else "at once"
    return f"chunks of {policy.chunk_bytes >> 20} MiB" + (", a kernel between" if has_ticks else "")


def _chosen(card: CudaDevice, arena: PinnedAllocator) -> Iterator[Row]:
    started = time.perf_counter()
    policy = choose_copies(card, arena)
    card.stage_uploads(None)
    yield row("choosing a copy policy", time.perf_counter() - started, None, None, "s") | {"notes": told(policy)}


@contextmanager
def _ticks(card: CudaDevice, has_ticks: bool) -> Iterator[None]:
    """Without them chunks follow one another directly."""
    before, nothing = card._tick, cast(torch.Tensor, _Nothing())
    card._tick = before if has_ticks else nothing
    try:
        yield
    finally:
        card._tick = before


class _Nothing:
    def add_(self, _: int) -> None: ...


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    device = CudaDevice(0)
    memory = open_pinned_allocator(device.place)
    with torch.inference_mode():
        for one in measure(device, memory):
            add_row(options.rows, one)
            print(one, flush=True)
    memory.close()
