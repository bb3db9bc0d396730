"""Decoder layers in the order in which a sweep needs them, each read ahead of its use into one of a few slots.

The order is a cycle: when the last layer of a sweep gives its slot back, the first layers of the next sweep are already
on their way, so the link works while the drafter does. Layers that fit into memory stay; which ones is fixed for the
run, because a cyclic scan through an LRU cache would never hit. Invariant: a slot is refilled only after its layer was
released, and a layer is handed out only when every byte of it has arrived.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

import numpy as np

from offload.checkpoint.layout import SlabLayout
from offload.streaming.disk import HostStore, allocate, drop, finish

_POISON = 0xFF  # NaN in every float format we stream

Record = Callable[[str, int, float, float], None]  # what (copy, wait, compute), layer, start and end of perf_counter


class LayerStream:
    """Slabs of the layers of one checkpoint: some resident, the rest passing through `num_slots` slots.

    `stall_s` is the time that `acquire` has waited for the link. Whoever sets `record` hears of every copy (from the
    moment it is asked for), every wait and every use of a layer; copies are told by the readers' threads.
    """

    def __init__(
        self,
        store: HostStore,
        layouts: Sequence[SlabLayout],
        is_resident: Sequence[bool],
        num_slots: int,
        *,
        poison_released: bool = False,
    ) -> None:
        self.store, self._layouts = store, layouts
        self._streamed = [layer for layer, stays in enumerate(is_resident) if not stays]
        self._resident = {
            layer: allocate(layouts[layer].slab_bytes) for layer, stays in enumerate(is_resident) if stays
        }
        slot_bytes = max((layouts[layer].slab_bytes for layer in self._streamed), default=0)
        self._free = [allocate(slot_bytes) for _ in range(num_slots if self._streamed else 0)]
        self._pending: deque[tuple[int, np.ndarray, list[Future[None]]]] = deque()
        self._held: dict[int, np.ndarray] = {}
        self._next = 0  # index into _streamed of the next layer to read
        self._poison_released = poison_released
        self.stall_s = 0.0
        self.record: Record | None = None
        self._acquired_at = 0.0

    @property
    def bytes_read(self) -> int:
        """Everything that has come over the link so far."""
        return self.store.bytes_read

    @property
    def note(self) -> str | None:
        """A line for the user when the fast way to read is not open."""
        return self.store.note

    def load_resident(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Read the layers that stay, then start reading ahead. `on_bytes` hears of every slab that has landed."""
        reads = [(slab, self.store.read(self._layouts[layer], slab)) for layer, slab in self._resident.items()]
        self._refill()
        for slab, futures in reads:
            finish(futures)
            on_bytes(slab.nbytes)

    def begin_sweep(self) -> None:
        """Make the first layer the next to arrive: an interrupted sweep may have left others queued, or failed."""
        is_at_start = not self._held and (not self._pending or self._pending[0][0] == self._streamed[0])
        if not is_at_start or any(_has_failed(futures) for _, _, futures in self._pending):
            self._rewind()

    def acquire(self, layer: int) -> np.ndarray:
        """The slab of `layer`, complete; it stays valid until `release(layer)`.

        Raises:
            ReadError: the disk failed.
        """
        started = self._acquired_at = time.perf_counter()
        if layer in self._resident:
            return self._resident[layer]
        assert self._pending and self._pending[0][0] == layer, f"layer {layer} acquired out of order"
        finish(self._pending[0][2])
        self._acquired_at = time.perf_counter()
        self.stall_s += self._acquired_at - started
        if self.record is not None:
            self.record("wait", layer, started, self._acquired_at)
        _, slot, _ = self._pending.popleft()
        self._held[layer] = slot
        return slot

    def release(self, layer: int) -> None:
        """Give the slot of `layer` back: whatever still reads from it is a bug."""
        if self.record is not None:
            self.record("compute", layer, self._acquired_at, time.perf_counter())
        slot = self._held.pop(layer, None)
        if slot is None:
            return
        if self._poison_released:
            slot.fill(_POISON)
        self._free.append(slot)
        self._refill()

    def _refill(self) -> None:
        while self._free:
            slot, layer = self._free.pop(), self._streamed[self._next]
            self._next = (self._next + 1) % len(self._streamed)
            asked_s, futures = time.perf_counter(), self.store.read(self._layouts[layer], slot)
            self._pending.append((layer, slot, futures))
            if self.record is not None:
                _tell_copy(self.record, layer, asked_s, futures)

    def _rewind(self) -> None:
        for _, slot, futures in self._pending:
            drop(futures)
            self._free.append(slot)
        self._free.extend(self._held.values())
        self._pending.clear()
        self._held.clear()
        self._next = 0
        self._refill()


def _tell_copy(record: Record, layer: int, asked_s: float, futures: list[Future[None]]) -> None:
    """Report a copy when the last of its reads is over; a dropped one is not reported."""
    num_done = count(1)  # counts in one step, whichever readers meet here

    def one_done(future: Future[None]) -> None:
        if next(num_done) == len(futures) and not future.cancelled():
            record("copy", layer, asked_s, time.perf_counter())

    for future in futures:
        future.add_done_callback(one_done)


def _has_failed(futures: list[Future[None]]) -> bool:
    return any(future.done() and future.exception() is not None for future in futures)
