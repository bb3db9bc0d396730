"""Decoder layers through a few slots on a device, in the order in which a sweep needs them, each ahead of its use.

A slot's way round: a released slot has a `free` event on the compute stream; the copy of its next layer waits for that
event and is followed by a `ready` event; the layer's kernels wait for that one. The host only enqueues: layers in
locked memory are sent the moment a slot is released, one copy each, so a whole sweep is on its way before its first
layer has run, and the first layers of the next sweep follow the last of this one. Layers on disk are read ahead into
locked buffers; a thread sends each as soon as it is there, whatever else the copy stream has been given meanwhile.
Which layers stay on the device, in locked memory or on disk is fixed for the run, because a cyclic scan through an LRU
cache never hits.

Device memory begins at a multiple of 256 bytes or more, and each copy with the layer's first weight (`layout.py`).

Invariant: nothing is overwritten before the event that says nobody reads it any more, nor read before the event that
says it is there; and the host waits nowhere but where a disk has not delivered.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.memory.plan import Tier
from offload.streaming.device import Device, Event
from offload.streaming.disk import HostStore
from offload.streaming.layer_stream import Record
from offload.streaming.pinned import HostBuffer, PinnedAllocator
from offload.streaming.read_ahead import ReadAhead
from offload.streaming.timeline import Spans

_POISON = 0xFF  # NaN in every float format we stream
_BOUNCE_BYTES, _NUM_BOUNCES = 32 << 20, 3
_NUM_LOADERS = 2  # buffers through which resident layers come in


@dataclass(slots=True)
class _Arrival:
    """A layer on its way into a slot."""

    layer: int
    slot: Tensor
    free: Event | None  # of the slot: when the layer before is no longer read
    ready: Future[Event] = field(default_factory=Future)  # known once the copy is enqueued, or why it never will be


class _Feed:
    """The thread that sends layers which are not ready to be sent when their slot is."""

    def __init__(self, send: Callable[[_Arrival, ReadAhead | None], None], ahead: ReadAhead | None) -> None:
        self._send, self._ahead = send, ahead
        self.orders: SimpleQueue[_Arrival | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="offload-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; orders that were not carried out fail."""
        if self._ahead is not None:
            self._ahead.close()
        self.orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (arrival := self.orders.get()) is not None:
            try:
                self._send(arrival, self._ahead)
            except BaseException as error:  # whoever acquires the layer hears of it
                arrival.ready.set_exception(error)


class DeviceStream:
    """The layers of one checkpoint for a model on a device; the device's counterpart of `LayerStream`.

    Whoever sets `record` hears of copies, waits and uses of layers when it is set again, to None for example: those
    that are over by then. The device keeps the times meanwhile.

    Args:
        store: reads slabs from disk.
        tiers: where each layer lives.
        num_slots: on the device, for layers that do not stay there.
        num_host_slots: locked buffers that layers from disk are read ahead into.
    """

    def __init__(
        self,
        store: HostStore,
        layouts: Sequence[SlabLayout],
        tiers: Sequence[Tier],
        num_slots: int,
        *,
        device: Device,
        arena: PinnedAllocator,
        num_host_slots: int,
        poison_released: bool = False,
    ) -> None:
        self.store, self.device, self._layouts, self._arena = store, device, layouts, arena
        self._poison_released = poison_released
        self._resident = {n: device.allocate(layouts[n].slab_bytes) for n in _of(tiers, Tier.RESIDENT)}
        self._hosted: dict[int, HostBuffer] = {}
        self._of_host, self._of_disk = _of(tiers, Tier.HOST), _of(tiers, Tier.DISK)
        self._streamed = sorted(self._of_host + self._of_disk)
        slot_bytes = max((layouts[n].slab_bytes for n in self._streamed), default=0)
        self._slots = [device.allocate(slot_bytes) for _ in range(num_slots if self._streamed else 0)]
        disk_bytes = max((layouts[n].slab_bytes for n in self._of_disk), default=0)
        self._buffers = [arena.allocate(disk_bytes) for _ in range(num_host_slots if self._of_disk else 0)]
        assert self._buffers or not self._of_disk, "layers on disk need host slots to be read into"
        self._bounces: deque[tuple[HostBuffer, Event | None]] = deque()
        self._empty: deque[tuple[Tensor, Event | None]] = deque()
        self._pending: deque[_Arrival] = deque()
        self._held: dict[int, Tensor] = {}
        self._spans: Spans | None = None  # while somebody records
        self._arrived: Event = None  # when the layer acquired last could be used; known while somebody records
        self._waits: deque[tuple[Event, Event]] = deque()
        self._sending = threading.Lock()  # a wait, a copy and an event stand together on the copy stream
        self._feed: _Feed | None = None
        self._next, self._stall_s = 0, 0.0
        self.bytes_read = 0  # of layers that were handed out, not of those on their way for the next sweep

    @property
    def note(self) -> str | None:
        """A line for the user where a faster way is closed."""
        notes = (self._arena.note, self.store.note if self._of_disk else None)
        return "; ".join(note for note in notes if note) or None

    @property
    def record(self) -> Record | None:
        """Who hears of copies, waits and uses of layers."""
        return None if self._spans is None else self._spans.tell

    @record.setter
    def record(self, tell: Record | None) -> None:
        if self._spans is not None:
            self._spans.tell_reached()
        self._spans = None if tell is None else Spans(self.device, tell)

    @property
    def stall_s(self) -> float:
        """How long compute has waited for layers, as far as the device has got; nobody is kept waiting to find out."""
        while self._waits and (waited_s := self.device.elapsed_s(*self._waits[0])) is not None:
            self._stall_s += waited_s
            self._waits.popleft()
        return self._stall_s

    def load_resident(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Read what stays on the device or in host memory, then start the stream."""
        self._load_device(on_bytes)
        reads = []
        for layer in self._of_host:
            size = self._layouts[layer].slab_bytes
            self._host(layer)  # while the readers fill the ones before
            reads.append((size, self.store.read(self._layouts[layer], self._hosted[layer].array)))
        for size, futures in reads:
            for future in futures:
                future.result()
            on_bytes(size)
        if not all(buffer.is_pinned for buffer in self._hosted.values()):
            self._bounces.extend((self._arena.allocate(_BOUNCE_BYTES), None) for _ in range(_NUM_BOUNCES))
        self._start()

    def begin_sweep(self) -> None:
        """Make the first layer the next to arrive: an interrupted sweep may have left others queued, or failed."""
        is_whole = len(self._pending) == len(self._slots)
        is_at_start = is_whole and (not self._pending or self._pending[0].layer == self._streamed[0])
        if not is_at_start or any(arrival.ready.done() and arrival.ready.exception() for arrival in self._pending):
            self._stop()
            self._start()

    def acquire(self, layer: int) -> Tensor:
        """The weights of `layer`, its first one first; valid for what is enqueued on the compute stream until
        `release(layer)`.

        Raises:
            ReadError: the disk failed.
        """
        device, spans = self.device, self._spans
        if layer in self._resident:
            self._arrived = device.record(device.compute, is_timed=True) if spans is not None else None
            return self._resident[layer]
        assert self._pending and self._pending[0].layer == layer, f"layer {layer} acquired out of order"
        arrival = self._pending[0]
        before = device.record(device.compute, is_timed=True)
        device.wait(device.compute, arrival.ready.result())
        self._arrived = device.record(device.compute, is_timed=True)
        self._waits.append((before, self._arrived))
        if spans is not None:
            spans.add("wait", layer, before, self._arrived)
        self._pending.popleft()
        self._held[layer] = arrival.slot
        self.bytes_read += self._layouts[layer].slab_bytes
        return arrival.slot

    def release(self, layer: int) -> None:
        """Everything that reads from the slot of `layer` has been enqueued."""
        if self._spans is not None and self._arrived is not None:
            used = self.device.record(self.device.compute, is_timed=True)
            self._spans.add("compute", layer, self._arrived, used)
        slot = self._held.pop(layer, None)
        if slot is None:
            return
        if self._poison_released:
            self.device.fill(slot, _POISON, self.device.compute)
        self._empty.append((slot, self.device.record(self.device.compute)))
        self._refill()

    def close(self) -> None:
        """Stop reading, and let every copy end before its memory goes."""
        self._stop()
        self._empty.clear()
        self._slots.clear()
        self._resident.clear()
        self._hosted.clear()
        self._buffers.clear()
        self._bounces.clear()

    def _start(self) -> None:
        """Begin with the first layer, all slots empty."""
        self._next = 0
        free = self.device.record(self.device.compute)  # what an abandoned sweep has enqueued may still read
        self._empty.extend((slot, free) for slot in self._slots)
        ahead = None
        if self._of_disk:
            ahead = ReadAhead(self.store.read, self._layouts, cycle(self._of_disk), self._buffers, self.device)
        self._feed = _Feed(self._send_late, ahead)
        self._refill()

    def _stop(self) -> None:
        """Forget what is on its way; on return nothing moves any more."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        self.device.synchronize(self.device.record(self.device.copies))
        self._empty.clear()
        self._pending.clear()
        self._held.clear()

    def _refill(self) -> None:
        while self._empty:
            slot, free = self._empty.popleft()
            layer = self._streamed[self._next]
            self._next = (self._next + 1) % len(self._streamed)
            self._pending.append(_Arrival(layer, slot, free))
            hosted = self._hosted.get(layer)
            if hosted is not None and hosted.is_pinned:
                self._send(self._pending[-1], hosted.array)
            else:
                assert self._feed is not None, "slots are filled while the stream runs"
                self._feed.orders.put(self._pending[-1])

    def _send_late(self, arrival: _Arrival, ahead: ReadAhead | None) -> None:
        """Send a layer that the copy engine cannot take from where it lies; in the feeding thread."""
        hosted = self._hosted.get(arrival.layer)
        if hosted is not None:
            self._send_in_pieces(arrival, hosted.array)
            return
        assert ahead is not None, "a layer that is not in host memory is read ahead"
        filled = ahead.next()
        assert filled.layer == arrival.layer, f"layer {filled.layer} was read where {arrival.layer} is wanted"
        ahead.give_back(filled.buffer, self._send(arrival, filled.buffer.array))

    def _send(self, arrival: _Arrival, source: np.ndarray) -> Event:
        """Enqueue the one copy of a layer; returns the event after it."""
        device, spans, weights = self.device, self._spans, source[self._layouts[arrival.layer].sent]
        with self._sending:
            begun = self._when_free(arrival, spans)
            device.copy(arrival.slot[: len(weights)], torch.from_numpy(weights), device.copies)
            ready = device.record(device.copies, is_timed=spans is not None)
        if spans is not None:
            spans.add("copy", arrival.layer, begun, ready)
        arrival.ready.set_result(ready)
        return ready

    def _when_free(self, arrival: _Arrival, spans: Spans | None) -> Event:
        """Let the copies that follow wait for the slot; when they begin, if that is wanted."""
        device = self.device
        if arrival.free is not None:
            device.wait(device.copies, arrival.free)
        return device.record(device.copies, is_timed=True) if spans is not None else None

    def _send_in_pieces(self, arrival: _Arrival, source: np.ndarray) -> None:
        """From memory that is not locked, through the bounce buffers."""
        device, spans, weights = self.device, self._spans, source[self._layouts[arrival.layer].sent]
        with self._sending:
            begun = self._when_free(arrival, spans)
        for lo in range(0, len(weights), _BOUNCE_BYTES):
            piece = weights[lo : lo + _BOUNCE_BYTES]
            bounce, sent = self._bounces.popleft()
            if sent is not None:
                device.synchronize(sent)
            bounce.array[: len(piece)] = piece
            device.copy(arrival.slot[lo : lo + len(piece)], torch.from_numpy(bounce.array[: len(piece)]), device.copies)
            self._bounces.append((bounce, device.record(device.copies, is_timed=spans is not None)))
        if spans is not None:
            spans.add("copy", arrival.layer, begun, self._bounces[-1][1])
        arrival.ready.set_result(self._bounces[-1][1])

    def _load_device(self, on_bytes: Callable[[int], None]) -> None:
        """Resident layers, through buffers that later hold other layers, where there are any large enough."""
        if not self._resident:
            return
        self.device.wait(self.device.copies, self.device.record(self.device.compute))  # memory that was in use before
        size = max(slab.nbytes for slab in self._resident.values())
        later = [*self._buffers, *(self._host(layer) for layer in self._of_host[:_NUM_LOADERS])]
        fitting = [buffer for buffer in later if len(buffer.array) >= size]
        buffers = fitting or [self._arena.allocate(size) for _ in range(_NUM_LOADERS)]
        ahead = ReadAhead(self.store.read, self._layouts, list(self._resident), buffers, self.device)
        try:
            for layer, slab in self._resident.items():
                source = ahead.next().buffer
                weights = source.array[self._layouts[layer].sent]
                self.device.copy(slab[: len(weights)], torch.from_numpy(weights), self.device.copies)
                ahead.give_back(source, self.device.record(self.device.copies))
                on_bytes(self._layouts[layer].slab_bytes)
        finally:
            ahead.close()
            self.device.synchronize(self.device.record(self.device.copies))
            for buffer in [] if fitting else buffers:
                self._arena.release(buffer)

    def _host(self, layer: int) -> HostBuffer:
        """The layer's place in host memory."""
        if layer not in self._hosted:
            self._hosted[layer] = self._arena.allocate(self._layouts[layer].slab_bytes)
        return self._hosted[layer]


def _of(tiers: Sequence[Tier], wanted: Tier) -> list[int]:
    return [layer for layer, tier in enumerate(tiers) if tier is wanted]
