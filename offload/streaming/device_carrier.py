"""Layers to a device: from locked host memory the moment their slot is released, from elsewhere by a thread.

The copy of a layer waits, on the device, for the event after which nobody reads its slot; the layer's kernels wait for
the event after the copy. The host only enqueues. Layers on disk come through a stage of locked buffers: a thread sends
each as soon as it is there, and it alone waits until the device has copied from a buffer.

Device memory begins at a multiple of 256 bytes or more, and each copy with the layer's first weight (`layout.py`).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.memory.plan import Tier
from offload.streaming.bounces import Bounces
from offload.streaming.device import Device, Event
from offload.streaming.host_carrier import HostCarrier
from offload.streaming.pinned import HostBuffer, PinnedAllocator
from offload.streaming.source import ByteSource, read_all
from offload.streaming.stage import Stage

_NUM_LOADERS = 2  # buffers through which resident layers come in


class DeviceCarrier(HostCarrier):
    """The layers of a model that is computed on a device.

    Args:
        tiers: where each layer lives; fixed for the run, because a cyclic scan through an LRU cache never hits.
        pinned: gives the memory of layers that live on the host; closed by whoever opened it, after this.
        num_host_slots: locked buffers that layers from disk are read ahead into.
    """

    def __init__(
        self,
        source: ByteSource,
        layouts: Sequence[SlabLayout],
        tiers: Sequence[Tier],
        *,
        device: Device,
        pinned: PinnedAllocator,
        num_host_slots: int,
    ) -> None:
        super().__init__(source, layouts, _of(tiers, Tier.RESIDENT), device)
        self.pinned, self.hosted = pinned, dict[int, HostBuffer]()
        self._of_host, self._of_disk = _of(tiers, Tier.HOST), _of(tiers, Tier.DISK)
        disk_bytes = max((layouts[n].slab_bytes for n in self._of_disk), default=0)
        buffers = [_flat(pinned.allocate(disk_bytes)) for _ in range(num_host_slots if self._of_disk else 0)]
        assert buffers or not self._of_disk, "layers on disk need host slots to be read into"
        self.ahead = Stage(self.read, self._of_disk, buffers)
        self._bounces: Bounces | None = None
        self._sending = threading.Lock()  # a wait, a copy and an event stand together on the copy stream
        self._feed = ThreadPoolExecutor(1, thread_name_prefix="offload-feed")

    @property
    def note(self) -> str | None:
        notes = (self.pinned.note, self.source.note if self._of_disk else None)
        return "; ".join(note for note in notes if note) or None

    def load(self, on_bytes: Callable[[int], None]) -> None:
        """Read what stays on the device, then what stays in host memory: both never lie in host memory at once."""
        if self.resident:
            self._load_device(on_bytes)
        hosted = ((self.layouts[n], self._host(n).array) for n in self._of_host)  # made while the ones before are read
        read_all(self.source, hosted, on_bytes)
        if not all(buffer.is_pinned for buffer in self.hosted.values()):
            self._bounces = Bounces(self.device, self.pinned)

    def carry(self, layer: int, slot: Tensor, free: Event) -> Sequence[Future[Event]]:
        """Send a layer, or let it be sent when it can be; the future gives the event after its copy."""
        ready, hosted = Future[Event](), self.hosted.get(layer)
        if hosted is not None and hosted.is_pinned:
            ready.set_result(self._send(layer, slot, free, _flat(hosted)))
        else:
            self._feed.submit(self._send_late, ready, layer, slot, free)
        return [ready]

    def weights(self, layer: int, slab: Tensor) -> Tensor:
        """Copies began with the first weight."""
        return slab

    def start(self) -> None:
        """Read ahead, from the first layer on."""
        self.ahead.start()

    def stop(self) -> None:
        """On return nothing moves any more; whoever waits for a layer must have been cancelled before."""
        self.ahead.cancel()
        self._feed.submit(int).result()  # behind whatever the thread is at
        self.ahead.stop()
        self.device.synchronize(self.device.record(self.device.copies))

    def close(self) -> None:
        """End the thread and let go of the memory; nothing moves."""
        self._feed.shutdown()
        self._bounces = None
        for memory in (self.resident, self.hosted, self.ahead.slots):
            memory.clear()

    def _send_late(self, ready: Future[Event], layer: int, slot: Tensor, free: Event) -> None:
        """Send a layer that the copy engine cannot take from where it lies; in the feeding thread."""
        if not ready.set_running_or_notify_cancel():
            return
        hosted = self.hosted.get(layer)
        try:
            if hosted is not None:
                sent = self._send_in_pieces(layer, slot, free, _flat(hosted))
            else:
                sent = self._send(layer, slot, free, self.ahead.acquire(layer).slot)
        except BaseException as error:  # whoever acquires the layer hears of it
            ready.set_exception(error)
            return
        ready.set_result(sent)
        if hosted is None:
            self.ahead.release(layer, sent)

    def _send(self, layer: int, slot: Tensor, free: Event, source: Tensor) -> Event:
        """Enqueue the one copy of a layer; returns the event after it."""
        device, weights = self.device, source[self.layouts[layer].sent]
        with self._sending:
            begun = self._when_free(free)
            device.copy(slot[: len(weights)], weights, device.copies)
            sent = device.record(device.copies, is_timed=begun is not None)
        self.spans.add("copy", layer, begun, sent)
        return sent

    def _send_in_pieces(self, layer: int, slot: Tensor, free: Event, source: Tensor) -> Event:
        """From memory that is not locked, through the bounce buffers."""
        weights = source[self.layouts[layer].sent]
        with self._sending:
            begun = self._when_free(free)
        assert self._bounces is not None, "they came with the first memory that is not locked"
        sent = self._bounces.send(slot[: len(weights)], weights, is_timed=begun is not None)
        self.spans.add("copy", layer, begun, sent)
        return sent

    def _when_free(self, free: Event) -> Event:
        """Let the copies that follow wait for the slot; when they begin, if somebody listens."""
        self.device.wait(self.device.copies, free)
        return self.spans.mark(self.device.copies)

    def _load_device(self, on_bytes: Callable[[int], None]) -> None:
        """Resident layers, through buffers that later hold other layers, where there are any large enough."""
        device = self.device
        device.wait(device.copies, device.record(device.compute))  # memory that was in use before
        size = max(slab.nbytes for slab in self.resident.values())
        later = [*self.ahead.slots, *(_flat(self._host(n)) for n in self._of_host[:_NUM_LOADERS])]
        fitting = [buffer for buffer in later if len(buffer) >= size]
        own = [] if fitting else [self.pinned.allocate(size) for _ in range(_NUM_LOADERS)]
        loading = Stage(self.read, list(self.resident), fitting or [*map(_flat, own)], is_cycle=False)
        loading.start()
        try:
            for layer, slab in self.resident.items():
                weights = loading.acquire(layer).slot[self.layouts[layer].sent]
                device.copy(slab[: len(weights)], weights, device.copies)
                loading.release(layer, device.record(device.copies))
                on_bytes(self.layouts[layer].slab_bytes)
        finally:
            loading.stop()
            device.synchronize(device.record(device.copies))
            for buffer in own:
                self.pinned.release(buffer)

    def _host(self, layer: int) -> HostBuffer:
        if layer not in self.hosted:
            self.hosted[layer] = self.pinned.allocate(self.layouts[layer].slab_bytes)
        return self.hosted[layer]


def _flat(buffer: HostBuffer) -> Tensor:
    return torch.from_numpy(buffer.array)


def _of(tiers: Sequence[Tier], wanted: Tier) -> list[int]:
    return [layer for layer, tier in enumerate(tiers) if tier is wanted]
