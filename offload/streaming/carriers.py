"""Carriers move a block into the slot from which it is computed.

On a CPU a disk fills the slot itself (`Carrier`). To a device a layer goes from locked host
memory as soon as its slot is released, or from disk through a cycle of locked buffers, which a
thread empties (`DeviceCarrier`); experts have a carrier of their own (`expert_carrier`). Device
memory begins at a multiple of 256 bytes or more, and each copy with the block's first weight
(`layout.py`).

Invariants: a host slot or buffer is lent from the read of its block until all copies from it are
enqueued, and written again only after the event of the last copy. A block that is no longer wanted
is not sent.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.memory.tiers import NUM_LOADERS, LayerTier
from offload.streaming.device import Device, Event
from offload.streaming.disk import ByteSource, read_all
from offload.streaming.pinned import HostBuffer, PinnedAllocator
from offload.streaming.sender import Sender
from offload.streaming.slot_cycle import SlotCycle


class Carrier:
    """Moves blocks, layers or experts, into slots. This one is the host's: it reads a disk into the
    slots. Others send to a device what they read this way.

    The blocks `resident` stay. Other layers are `streamed` through slots in every pass, except
    those that pass `once` for a prompt. Events of the `device` that computes order both.
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
        self.resident = {block: device.allocate(layouts[block].slab_bytes) for block in resident}
        passing = [block for block in range(len(layouts)) if block not in self.resident]
        self.streamed = [block for block in passing if block not in once]
        self.once = [block for block in passing if block in once]

    @property
    def note(self) -> str | None:
        """Return a line for the user if blocks arrive more slowly than they could."""
        return self.source.note

    @property
    def loaded(self) -> list[int]:
        """Return the blocks that `load` reads."""
        return [*self.resident]

    def load(self, on_bytes: Callable[[int], None]) -> None:
        """Read the blocks that stay; `on_bytes` is called with each slab's size."""
        slabs = [(self.layouts[n], slab.numpy()) for n, slab in self.resident.items()]
        read_all(self.source, slabs, on_bytes)

    def carry(self, block: int, slot: Tensor, free: Event) -> Sequence[Future[Any]]:
        """Start moving a block into a slot, see `slot_cycle.Carry`."""
        return self.read(block, slot, free)

    def read(self, block: int, slot: Tensor, free: Event) -> Sequence[Future[None]]:
        """Start reading a block into host memory, the first step of every `Carry`."""
        if free is not None:
            self.device.synchronize(free)
        layout = self.layouts[block]
        return self.source.read(layout, slot.numpy()[: layout.slab_bytes])

    def weights(self, block: int, slab: Tensor) -> Tensor:
        """Return the part of a slab, laid out as its file, from the block's first weight on."""
        return slab[self.layouts[block].sent]

    def begin_pass(self, num_rows: int) -> None:
        """Note that a pass of `num_rows` over experts follows."""

    def use(self, blocks: Sequence[int]) -> None:
        """Note that the pass needs these experts, and that they were missing when it began."""

    def start(self) -> None:
        """Get ready: layers will be requested from the first one on."""

    def stop(self) -> None:
        """Stop; on return nothing moves except what futures of cancelled requests report."""

    def close(self) -> None:
        """Free the memory; the carrier is stopped."""
        self.resident.clear()


class FeedingCarrier(Carrier):
    """Sends blocks to the memory of a device; a thread sends those that have to be waited for.

    Args:
        pinned: allocates host memory; its opener closes it, after this.
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
        self.sender = Sender(device, pinned)
        self._is_reading = True
        self._feed = ThreadPoolExecutor(1, thread_name_prefix="offload-feed")

    @property
    def note(self) -> str | None:
        notes = (self.pinned.note, self.source.note if self._is_reading else None)
        return "; ".join(note for note in notes if note) or None

    def weights(self, block: int, slab: Tensor) -> Tensor:
        """Return the slab: copies began with the first weight."""
        return slab


class DeviceCarrier(FeedingCarrier):
    """Sends layers to the memory of a device.

    Args:
        tiers: each layer's place; fixed for the run, because a cyclic scan never hits an LRU cache.
        num_host_slots: locked buffers for layers read ahead from disk.
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
        self._host_layers = _layers_in(tiers, LayerTier.PINNED)
        self._disk_layers = _layers_in(tiers, LayerTier.DISK)
        disk_bytes = max((layouts[n].slab_bytes for n in self._disk_layers), default=0)
        num_buffers = num_host_slots if self._disk_layers else 0
        buffers = [pinned.allocate(disk_bytes) for _ in range(num_buffers)]
        assert buffers or not self._disk_layers, "layers on disk need host slots to be read into"
        self.ahead = SlotCycle(self.read, self._disk_layers, [buffer.tensor for buffer in buffers])
        self._is_ahead_locked = all(buffer.is_pinned for buffer in buffers)
        self._is_reading = bool(self._disk_layers)

    @property
    def loaded(self) -> list[int]:
        return [*self.resident, *self._host_layers]

    def load(self, on_bytes: Callable[[int], None]) -> None:
        """Read what stays on the device, then what stays on the host, never both at the same time."""
        if self.resident:
            self._load_device(on_bytes)
        # a generator: each buffer is allocated while the ones before are read
        host_buffers = ((self.layouts[n], self._host(n).array) for n in self._host_layers)
        read_all(self.source, host_buffers, on_bytes)
        are_locked = all(buffer.is_pinned for buffer in self.host_buffers.values())
        if not (are_locked and self._is_ahead_locked):
            self.sender.expect_unlocked()

    def carry(self, layer: int, slot: Tensor, free: Event) -> Sequence[Future[Event]]:
        """Send a layer, or have it sent once it can be.

        The future returns the event after its copy.
        """
        ready = Future[Event]()
        host_buffer = self.host_buffers.get(layer)
        if host_buffer is not None and host_buffer.is_pinned:
            ready.set_result(self._send(layer, slot, free, host_buffer.tensor))
        else:
            self._feed.submit(self._send_late, ready, layer, slot, free)
        return [ready]

    def start(self) -> None:
        """Read ahead, from the first layer on."""
        self.ahead.start()

    def stop(self) -> None:
        """Stop; on return nothing moves. Waiting `acquire` calls were cancelled before."""
        self.ahead.cancel()
        # returns once the thread has finished its work
        self._feed.submit(int).result()
        self.ahead.stop()
        self.device.synchronize(self.device.mark(self.device.copies))

    def close(self) -> None:
        """Stop the thread and free the memory; nothing moves."""
        self._feed.shutdown()
        self.sender.close()
        for memory in (self.resident, self.host_buffers, self.ahead.slots):
            memory.clear()

    def _send_late(self, ready: Future[Event], layer: int, slot: Tensor, free: Event) -> None:
        """Send a layer from memory that the copy engine cannot read; in the feeding thread."""
        if not ready.set_running_or_notify_cancel():
            return
        host_buffer = self.host_buffers.get(layer)
        try:
            slab = self.ahead.acquire(layer)[0] if host_buffer is None else host_buffer.tensor
            is_locked = host_buffer is None and self._is_ahead_locked
            sent = self._send(layer, slot, free, slab, is_locked=is_locked)
        # raised again where the layer is acquired
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
        return self.sender.send(slot, free, weights, is_locked=is_locked)

    def _load_device(self, on_bytes: Callable[[int], None]) -> None:
        """Read resident layers, through buffers that later hold other layers if large enough."""
        device = self.device
        # enqueued work may still use the memory
        device.wait(device.copies, device.mark(device.compute))
        size = max(slab.nbytes for slab in self.resident.values())
        hosts = [self._host(n).tensor for n in self._host_layers[:NUM_LOADERS]]
        fitting = [buffer for buffer in (*self.ahead.slots, *hosts) if len(buffer) >= size]
        bounce_buffers = [] if fitting else [self.pinned.allocate(size) for _ in range(NUM_LOADERS)]
        buffers = fitting or [buffer.tensor for buffer in bounce_buffers]
        loading = SlotCycle(self.read, list(self.resident), buffers, is_cycle=False)
        loading.start()
        try:
            for layer, slab in self.resident.items():
                weights = loading.acquire(layer)[0][self.layouts[layer].sent]
                device.copy(slab[: len(weights)], weights, device.copies)
                loading.release(layer, device.mark(device.copies))
                on_bytes(self.layouts[layer].slab_bytes)
        finally:
            loading.stop()
            device.synchronize(device.mark(device.copies))
            for buffer in bounce_buffers:
                self.pinned.release(buffer)

    def _host(self, layer: int) -> HostBuffer:
        if layer not in self.host_buffers:
            self.host_buffers[layer] = self.pinned.allocate(self.layouts[layer].slab_bytes)
        return self.host_buffers[layer]


def _layers_in(tiers: Sequence[LayerTier], wanted: LayerTier) -> list[int]:
    return [layer for layer, tier in enumerate(tiers) if tier is wanted]
