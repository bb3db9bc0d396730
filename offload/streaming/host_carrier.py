"""Layers from a byte source into host memory, where a CPU computes with them."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.streaming.device import Device, Event
from offload.streaming.source import ByteSource, read_all
from offload.streaming.timeline import Spans


class HostCarrier:
    """Brings layers to where they are computed with: here, host memory.

    The layers `resident` stay, others are `streamed` through slots in every sweep, but for those that come `once` for a
    prompt; events of the `device` that computes order both.
    """

    def __init__(
        self,
        source: ByteSource,
        layouts: Sequence[SlabLayout],
        resident: Iterable[int],
        device: Device,
        once: Sequence[int] = (),
    ) -> None:
        self.source, self.layouts, self.device, self.spans = source, layouts, device, Spans(device)
        self.resident = {layer: device.allocate(layouts[layer].slab_bytes) for layer in resident}
        passing = [layer for layer in range(len(layouts)) if layer not in self.resident]
        self.streamed = [layer for layer in passing if layer not in once]
        self.once = [layer for layer in passing if layer in once]

    @property
    def note(self) -> str | None:
        return self.source.note

    def load(self, on_bytes: Callable[[int], None]) -> None:
        """Bring the layers that stay; `on_bytes` hears of every slab that has landed."""
        read_all(self.source, [(self.layouts[n], slab.numpy()) for n, slab in self.resident.items()], on_bytes)

    def carry(self, layer: int, slot: Tensor, free: Event) -> Sequence[Future[Any]]:
        """Start moving a layer into a slot, see `stage.Carry`."""
        asked, reads = self.spans.mark(self.device.copies), self.read(layer, slot, free)
        num_done = count(1)  # counts in one step, whichever readers meet here

        def one_done(read: Future[None]) -> None:
            if next(num_done) == len(reads) and not read.cancelled():
                self.spans.add("copy", layer, asked, self.spans.mark(self.device.copies))

        for read in reads if asked is not None else ():
            read.add_done_callback(one_done)
        return reads

    def read(self, layer: int, slot: Tensor, free: Event) -> Sequence[Future[None]]:
        """Start reading a layer into host memory, which the host waits for until nobody reads it any more."""
        if free is not None:
            self.device.synchronize(free)
        layout = self.layouts[layer]
        return self.source.read(layout, slot.numpy()[: layout.slab_bytes])

    def weights(self, layer: int, slab: Tensor) -> Tensor:
        """What begins with the layer's first weight, of a slab as it lies in its file."""
        return slab[self.layouts[layer].sent]

    def start(self) -> None:
        """Layers will be asked for, from the first one on."""

    def stop(self) -> None:
        """On return nothing goes on that was asked for and cancelled, but what the futures tell of."""

    def close(self) -> None:
        """Let go of the memory; it is stopped."""
        self.resident.clear()
