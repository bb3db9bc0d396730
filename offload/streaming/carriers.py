"""Carriers: how a block gets into the slot where it is computed with, for layers and for experts.

On a CPU (`HostCarrier`) a disk fills the slot itself. To a device a layer goes from locked host
memory as soon as its slot is released, or from disk through a stage of locked buffers, which a
thread empties (`DeviceCarrier`). Experts reach a device by way of a second pool in locked host
memory, so that what is used most there is not read again (`DeviceExpertCarrier`). That pool counts
what the device lacked: what stays on the device is not used here, and gives way to what does not
stay, without either pool knowing of the other.

A `Sender` copies to the device: at once from memory that is locked, in pieces through locked
buffers (`Bounces`) from memory that could not be. The copy into a slot waits, on the device, for
the event after which nothing reads the slot; kernels wait for the event after the copy. The host
only enqueues, and waits for a disk alone. Device memory begins at a multiple of 256 bytes or more,
and each copy with the block's first weight (`layout.py`).

Invariants: a host slot or buffer is held from the read of its block until all copies from it are
enqueued, and written again only after the event behind the last of these; a block that is no longer
wanted is not sent.
"""

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.memory.tiers import LayerTier
from offload.streaming.device import Device, Event, Spans
from offload.streaming.disk import ByteSource, drop, finish, read_all, when_all_done
from offload.streaming.expert_cache import ExpertCache
from offload.streaming.pinned import HostBuffer, PinnedAllocator
from offload.streaming.slot_cycle import SlotCycle

_BOUNCE_BYTES = 32 << 20
_NUM_BOUNCES = 3


class Sender:
    """Enqueues copies of blocks on the copy stream of a device.

    Any thread may send what is locked, one thread what is not.

    Attributes:
        last: by place, the event after the last copy of a locked block that lay there.
    """

    def __init__(self, device: Device, pinned: PinnedAllocator, spans: Spans) -> None:
        self.last = dict[int, Event]()
        self._device = device
        self._pinned = pinned
        self._spans = spans
        self._bounces: Bounces | None = None
        # a wait, a copy and an event must stand together on the copy stream
        self._sending = threading.Lock()

    def expect_unlocked(self) -> None:
        """Make the buffers for memory that is not locked, while there is room for them."""
        self._bounces = Bounces(self._device, self._pinned)

    def send(
        self,
        block: int,
        slot: Tensor,
        free: Event,
        weights: Tensor,
        *,
        is_locked: bool,
        place: int | None = None,
    ) -> Event:
        """Enqueue the copy of a block into a slot behind the event `free`; return the event after.

        Memory that is not locked may be written again on return.

        Args:
            weights: of the block in host memory, from the first one on.
            place: a number for that memory, by which the last copy from there is found; None: it is
                never written again.
        """
        device = self._device
        to = slot[: len(weights)]
        with self._sending:
            device.wait(device.copies, free)
            begun = self._spans.mark(device.copies)
            if is_locked:
                device.copy(to, weights, device.copies)
                sent = device.record(device.copies, is_timed=begun is not None)
                if place is not None:
                    self.last[place] = sent
        if not is_locked:
            assert self._bounces is not None, "memory that is not locked was expected"
            sent = self._bounces.send(to, weights, is_timed=begun is not None)
        self._spans.add("copy", block, begun, sent)
        return sent

    def close(self) -> None:
        """Let go of the buffers; nothing moves."""
        self._bounces = None


class Bounces:
    """A ring of locked buffers; one thread uses it, and waits for the device where it has to."""

    def __init__(self, device: Device, pinned: PinnedAllocator) -> None:
        self.buffers = [pinned.allocate(_BOUNCE_BYTES) for _ in range(_NUM_BOUNCES)]
        self._device = device
        self._next = deque[tuple[Tensor, Event]]((_flat(one), None) for one in self.buffers)

    def send(self, to: Tensor, source: Tensor, *, is_timed: bool) -> Event:
        """Enqueue copies of all bytes; return the event behind them. `source` is free on return."""
        device = self._device
        sent = None
        size = len(self._next[0][0])
        for piece, part in zip(source.split(size), to.split(size), strict=True):
            bounce, last = self._next.popleft()
            if last is not None:
                device.synchronize(last)
            device.copy(part, bounce[: len(piece)].copy_(piece), device.copies)
            sent = device.record(device.copies, is_timed=is_timed)
            self._next.append((bounce, sent))
        return sent


class HostCarrier:
    """Brings blocks, layers or experts, to where they are computed with: here, host memory.

    The blocks `resident` stay. Of the others layers are `streamed` through slots in every pass, but
    for those that come `once` for a prompt; events of the `device` that computes order both.
    """

    def __init__(
        self,
        source: ByteSource,
        layouts: Sequence[SlabLayout],
        resident: Iterable[int],
        device: Device,
        once: Container[int] = (),
    ) -> None:
        self.source = source
        self.layouts = layouts
        self.device = device
        self.spans = Spans(device)
        self.resident = {layer: device.allocate(layouts[layer].slab_bytes) for layer in resident}
        passing = [layer for layer in range(len(layouts)) if layer not in self.resident]
        self.streamed = [layer for layer in passing if layer not in once]
        self.once = [layer for layer in passing if layer in once]

    @property
    def note(self) -> str | None:
        """Return a line for the user where blocks come more slowly than they could."""
        return self.source.note

    @property
    def loaded(self) -> list[int]:
        """Return the blocks that `load` reads."""
        return [*self.resident]

    def load(self, on_bytes: Callable[[int], None]) -> None:
        """Read the blocks that stay; `on_bytes` gets the size of every slab that has landed."""
        slabs = [(self.layouts[n], slab.numpy()) for n, slab in self.resident.items()]
        read_all(self.source, slabs, on_bytes)

    def carry(self, layer: int, slot: Tensor, free: Event) -> Sequence[Future[Any]]:
        """Start moving a block into a slot, see `slot_cycle.Carry`."""
        asked = self.spans.mark(self.device.copies)
        reads = self.read(layer, slot, free)

        def has_come(last: Future[None]) -> None:
            if not last.cancelled():
                self.spans.add("copy", layer, asked, self.spans.mark(self.device.copies))

        if asked is not None:
            when_all_done(reads, has_come)
        return reads

    def read(self, layer: int, slot: Tensor, free: Event) -> Sequence[Future[None]]:
        """Start reading a block into host memory, once the event `free` is reached."""
        if free is not None:
            self.device.synchronize(free)
        layout = self.layouts[layer]
        return self.source.read(layout, slot.numpy()[: layout.slab_bytes])

    def weights(self, layer: int, slab: Tensor) -> Tensor:
        """Return the part of a slab, laid out as its file, from the block's first weight on."""
        return slab[self.layouts[layer].sent]

    def begin_pass(self, num_rows: int) -> None:
        """Note that a pass of `num_rows` over experts follows."""

    def use(self, blocks: Sequence[int]) -> None:
        """Note that the pass needs these experts, and that they were not there when it began."""

    def start(self) -> None:
        """Get ready: layers will be asked for, from the first one on."""

    def stop(self) -> None:
        """Stop; on return nothing moves but what futures of cancelled requests still tell of."""

    def close(self) -> None:
        """Let go of the memory; the carrier is stopped."""
        self.resident.clear()


class _FeedingCarrier(HostCarrier):
    """Brings blocks to the memory of a device; its thread sends what has to be waited for.

    Args:
        pinned: gives memory of the host; its opener closes it, after this.
    """

    def __init__(
        self,
        source: ByteSource,
        layouts: Sequence[SlabLayout],
        resident: Iterable[int],
        device: Device,
        pinned: PinnedAllocator,
    ) -> None:
        super().__init__(source, layouts, resident, device)
        self.pinned = pinned
        self.sender = Sender(device, pinned, self.spans)
        self._is_reading = True
        self._feed = ThreadPoolExecutor(1, thread_name_prefix="offload-feed")

    @property
    def note(self) -> str | None:
        notes = (self.pinned.note, self.source.note if self._is_reading else None)
        return "; ".join(note for note in notes if note) or None

    def weights(self, layer: int, slab: Tensor) -> Tensor:
        """Return the slab: copies began with the first weight."""
        return slab


# buffers through which resident layers come in
_NUM_LOADERS = 2


class DeviceCarrier(_FeedingCarrier):
    """Brings layers to the memory of a device.

    Args:
        tiers: where each layer lives; fixed for the run, because a cyclic scan through an LRU cache
            never hits.
        num_host_slots: locked buffers that layers from disk are read ahead into.
    """

    def __init__(
        self,
        source: ByteSource,
        layouts: Sequence[SlabLayout],
        tiers: Sequence[LayerTier],
        *,
        device: Device,
        pinned: PinnedAllocator,
        num_host_slots: int,
    ) -> None:
        super().__init__(source, layouts, _layers_in(tiers, LayerTier.RESIDENT), device, pinned)
        self.host_buffers = dict[int, HostBuffer]()
        self._host_layers = _layers_in(tiers, LayerTier.HOST)
        self._disk_layers = _layers_in(tiers, LayerTier.DISK)
        disk_bytes = max((layouts[n].slab_bytes for n in self._disk_layers), default=0)
        num_buffers = num_host_slots if self._disk_layers else 0
        buffers = [_flat(pinned.allocate(disk_bytes)) for _ in range(num_buffers)]
        assert buffers or not self._disk_layers, "layers on disk need host slots to be read into"
        self.ahead = SlotCycle(self.read, self._disk_layers, buffers)
        self._is_reading = bool(self._disk_layers)

    @property
    def loaded(self) -> list[int]:
        return [*self.resident, *self._host_layers]

    def load(self, on_bytes: Callable[[int], None]) -> None:
        """Read what stays on the device, then what stays on the host: never both in host memory."""
        if self.resident:
            self._load_device(on_bytes)
        # a generator: buffers are made while the ones before are read
        host_buffers = ((self.layouts[n], self._host(n).array) for n in self._host_layers)
        read_all(self.source, host_buffers, on_bytes)
        if not all(buffer.is_pinned for buffer in self.host_buffers.values()):
            self.sender.expect_unlocked()

    def carry(self, layer: int, slot: Tensor, free: Event) -> Sequence[Future[Event]]:
        """Send a layer, or let it be sent when it can be.

        The future gives the event after its copy.
        """
        ready = Future[Event]()
        host_buffer = self.host_buffers.get(layer)
        if host_buffer is not None and host_buffer.is_pinned:
            ready.set_result(self._send(layer, slot, free, _flat(host_buffer)))
        else:
            self._feed.submit(self._send_late, ready, layer, slot, free)
        return [ready]

    def start(self) -> None:
        """Read ahead, from the first layer on."""
        self.ahead.start()

    def stop(self) -> None:
        """Stop; on return nothing moves any more. Waiting `acquire` calls are cancelled before."""
        self.ahead.cancel()
        # returns once the thread has finished what it is doing
        self._feed.submit(int).result()
        self.ahead.stop()
        self.device.synchronize(self.device.record(self.device.copies))

    def close(self) -> None:
        """End the thread and let go of the memory; nothing moves."""
        self._feed.shutdown()
        self.sender.close()
        for memory in (self.resident, self.host_buffers, self.ahead.slots):
            memory.clear()

    def _send_late(self, ready: Future[Event], layer: int, slot: Tensor, free: Event) -> None:
        """Send a layer from where the copy engine cannot take it; in the feeding thread."""
        if not ready.set_running_or_notify_cancel():
            return
        host_buffer = self.host_buffers.get(layer)
        try:
            slab = self.ahead.acquire(layer)[0] if host_buffer is None else _flat(host_buffer)
            sent = self._send(layer, slot, free, slab, is_locked=host_buffer is None)
        # raised where the layer is acquired
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(sent)
        if host_buffer is None:
            self.ahead.release(layer, sent)

    def _send(
        self, layer: int, slot: Tensor, free: Event, slab: Tensor, *, is_locked: bool = True
    ) -> Event:
        """Enqueue the copy of a layer; return the event after it."""
        weights = slab[self.layouts[layer].sent]
        return self.sender.send(layer, slot, free, weights, is_locked=is_locked)

    def _load_device(self, on_bytes: Callable[[int], None]) -> None:
        """Read resident layers, through buffers that later hold other layers if large enough."""
        device = self.device
        # the memory may still be in use by what was enqueued before
        device.wait(device.copies, device.record(device.compute))
        size = max(slab.nbytes for slab in self.resident.values())
        hosts = [_flat(self._host(n)) for n in self._host_layers[:_NUM_LOADERS]]
        fitting = [buffer for buffer in (*self.ahead.slots, *hosts) if len(buffer) >= size]
        own = [] if fitting else [self.pinned.allocate(size) for _ in range(_NUM_LOADERS)]
        buffers = fitting or [*map(_flat, own)]
        loading = SlotCycle(self.read, list(self.resident), buffers, is_cycle=False)
        loading.start()
        try:
            for layer, slab in self.resident.items():
                weights = loading.acquire(layer)[0][self.layouts[layer].sent]
                device.copy(slab[: len(weights)], weights, device.copies)
                loading.release(layer, device.record(device.copies))
                on_bytes(self.layouts[layer].slab_bytes)
        finally:
            loading.stop()
            device.synchronize(device.record(device.copies))
            for buffer in own:
                self.pinned.release(buffer)

    def _host(self, layer: int) -> HostBuffer:
        if layer not in self.host_buffers:
            self.host_buffers[layer] = self.pinned.allocate(self.layouts[layer].slab_bytes)
        return self.host_buffers[layer]


def _flat(buffer: HostBuffer) -> Tensor:
    return torch.from_numpy(buffer.array)


def _layers_in(tiers: Sequence[LayerTier], wanted: LayerTier) -> list[int]:
    return [layer for layer, tier in enumerate(tiers) if tier is wanted]


# host memory that is locked at once; where that is refused, smaller regions may not be
_REGION_BYTES = 1 << 30


class _Delivery(NamedTuple):
    """Where on the device an expert is wanted."""

    slot: Tensor
    # the event after which nothing reads the slot
    free: Event
    # gives the event after the copy
    ready: Future[Event]


class DeviceExpertCarrier(_FeedingCarrier):
    """Brings experts to the memory of a device, by way of slots on the host.

    Args:
        cache: says which expert lies in which of the host's slots.
        num_slots: slots of the host, at least 2.
    """

    def __init__(
        self,
        source: ByteSource,
        records: Sequence[SlabLayout],
        device: Device,
        pinned: PinnedAllocator,
        cache: ExpertCache,
        num_slots: int,
    ) -> None:
        super().__init__(source, records, (), device, pinned)
        self._cache = cache
        slot_bytes = max(record.slab_bytes for record in records)
        self._slots, self._is_pinned = _slots_of(pinned, num_slots, slot_bytes)
        if not all(self._is_pinned):
            self.sender.expect_unlocked()
        # guards the cache and what is wanted
        self._lock = threading.Lock()
        # by block that is not there yet
        self._deliveries: dict[int, list[_Delivery]] = {}
        # blocks of these for which there was no slot
        self._queue = deque[int]()
        # by block
        self._reads: dict[int, Sequence[Future[None]]] = {}

    def begin_pass(self, num_rows: int) -> None:
        """Let earlier uses count for less."""
        with self._lock:
            self._cache.begin_pass(num_rows)

    def use(self, blocks: Sequence[int]) -> None:
        """Count the uses of these blocks, wherever the blocks come from."""
        with self._lock:
            self._cache.use(blocks)

    def carry(self, block: int, slot: Tensor, free: Event) -> Sequence[Future[Event]]:
        """Send an expert, or let it be sent when it can be.

        The future gives the event after its copy.
        """
        delivery = _Delivery(slot, free, Future())
        with self._lock:
            is_coming = block in self._deliveries
            lies_in = None if is_coming else self._cache.hold(block)
            if lies_in is None:
                self._deliveries.setdefault(block, []).append(delivery)
            if lies_in is None and not is_coming:
                self._queue.append(block)
        if lies_in is None:
            self._feed.submit(self._read_on)
        elif self._is_pinned[lies_in]:
            self._deliver(block, lies_in, [delivery])
        else:
            self._feed.submit(self._deliver, block, lies_in, [delivery])
        return [delivery.ready]

    def close(self) -> None:
        """Return once nothing is read or copied any more; what was asked for has been cancelled."""
        with self._lock:
            self._queue.clear()
        # returns once the thread has finished what it is doing
        self._feed.submit(int).result()
        for reads in list(self._reads.values()):
            drop(reads)
        self._feed.shutdown()
        self.device.synchronize(self.device.record(self.device.copies))
        self._slots.clear()

    def _read_on(self) -> None:
        """Read what is wanted, as far as there are slots; in the feeding thread."""
        while (found := self._next_read()) is not None:
            block, slot = found
            try:
                self._start_read(block, slot)
            # raised where the expert is waited for
            except BaseException as error:
                self._fail(block, error)

    def _next_read(self) -> tuple[int, int] | None:
        """Return the next block to read and its slot, which is held from now on."""
        with self._lock:
            while self._queue:
                block = self._queue[0]
                is_wanted = not all(one.ready.cancelled() for one in self._deliveries[block])
                slot = self._cache.place(block) if is_wanted else None
                if is_wanted and slot is None:
                    return None
                self._queue.popleft()
                if slot is not None:
                    return block, slot
                del self._deliveries[block]
        return None

    def _start_read(self, block: int, slot: int) -> None:
        if (sent := self.sender.last.pop(slot, None)) is not None:
            self.device.synchronize(sent)
        record = self.layouts[block]
        reads = self.source.read(record, self._slots[slot].numpy()[: record.slab_bytes])
        self._reads[block] = reads

        def has_come(_: Future[None]) -> None:
            # a closed executor refuses; then the block is not waited for
            with suppress(RuntimeError):
                self._feed.submit(self._arrive, block, slot)

        when_all_done(reads, has_come)

    def _arrive(self, block: int, slot: int) -> None:
        """Send a block whose reads are all over; in the feeding thread."""
        try:
            finish(self._reads.pop(block))
        except BaseException as error:
            self._fail(block, error)
        else:
            with self._lock:
                deliveries = self._deliveries.pop(block)
            self._deliver(block, slot, deliveries)
        self._read_on()

    def _fail(self, block: int, error: BaseException) -> None:
        with self._lock:
            deliveries = self._deliveries.pop(block)
            self._cache.forget(block)
        for delivery in deliveries:
            if delivery.ready.set_running_or_notify_cancel():
                delivery.ready.set_exception(error)

    def _deliver(self, block: int, slot: int, deliveries: Sequence[_Delivery]) -> None:
        """Send a block that is there and held, and release it."""
        weights = self._slots[slot][self.layouts[block].sent]
        is_locked = self._is_pinned[slot]
        for delivery in deliveries:
            if not delivery.ready.set_running_or_notify_cancel():
                continue
            try:
                where = (delivery.slot, delivery.free, weights)
                sent = self.sender.send(block, *where, is_locked=is_locked, place=slot)
            except BaseException as error:
                delivery.ready.set_exception(error)
            else:
                delivery.ready.set_result(sent)
        with self._lock:
            self._cache.release(block)
            is_waited_for = bool(self._queue)
        if is_waited_for:
            self._feed.submit(self._read_on)


def _slots_of(
    pinned: PinnedAllocator, num_slots: int, slot_bytes: int
) -> tuple[list[Tensor], list[bool]]:
    """Return the slots, in a few regions, and whether each of them is locked."""
    slots = list[Tensor]()
    is_pinned = list[bool]()
    per_region = max(1, _REGION_BYTES // slot_bytes)
    while len(slots) < num_slots:
        size = min(per_region, num_slots - len(slots))
        region = pinned.allocate(size * slot_bytes)
        slots += torch.from_numpy(region.array).view(size, slot_bytes).unbind()
        is_pinned += [region.is_pinned] * size
    return slots, is_pinned
