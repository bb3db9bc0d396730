"""Layers from disk, read in a fixed order into a few host buffers before they are wanted there.

One thread starts the reads. It is the one that waits until the device has copied from a buffer, so that whoever
computes never does. Invariant: a buffer is read into again only after the event that was given back with it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from offload.checkpoint.layout import SlabLayout
from offload.errors import ReadError
from offload.streaming.device import Device, Event
from offload.streaming.disk import drop, finish
from offload.streaming.pinned import HostBuffer

Read = Callable[[SlabLayout, np.ndarray], list[Future[None]]]


class StaticTree(NamedTuple):
    """A layer that has arrived in host memory."""

    layer: int
    buffer: HostBuffer  # its first bytes are the layer; to be given back


class ReadAhead:
    """Fills `buffers` with `layers`, in that order.

    Args:
        read: starts reading a slab, see `HostStore.read`.
        layers: may be endless.
    """

    def __init__(
        self, read: Read, layouts: Sequence[SlabLayout], layers: Iterable[int], buffers: Sequence[HostBuffer],
        device: Device,
    ) -> None:  # fmt: skip
        self._read, self._layouts, self._layers, self._device = read, layouts, layers, device
        self._empty: SimpleQueue[tuple[HostBuffer, Event | None] | None] = SimpleQueue()
        self._filling: SimpleQueue[tuple[int, HostBuffer, list[Future[None]]] | BaseException] = SimpleQueue()
        for buffer in buffers:
            self._empty.put((buffer, None))
        self._is_closed, self._reads = False, list[Future[None]]()
        self._thread = threading.Thread(target=self._run, name="offload-ahead", daemon=True)
        self._thread.start()

    def next(self) -> StaticTree:
        """The next layer, once all of it has arrived. Raises `ReadError`."""
        started = self._filling.get()
        if isinstance(started, BaseException):
            self._filling.put(started)  # whoever asks again hears the same
            raise started
        layer, buffer, futures = started
        try:
            finish(futures)
        except CancelledError:
            raise ReadError("reading ahead was stopped") from None
        return StaticTree(layer, buffer)

    def give_back(self, buffer: HostBuffer, sent: Event | None) -> None:
        """The buffer may be filled again once `sent` is reached."""
        self._empty.put((buffer, sent))

    def close(self) -> None:
        """Stop; on return no read touches a buffer any more, and whoever waits in `next` is told."""
        self._is_closed = True
        self._empty.put(None)
        self._thread.join()
        drop(self._reads)
        self._filling.put(ReadError("reading ahead was stopped"))

    def _run(self) -> None:
        try:
            for layer in self._layers:
                taken = self._empty.get()
                if taken is None or self._is_closed:
                    break
                buffer, sent = taken
                if sent is not None:
                    self._device.synchronize(sent)
                layout = self._layouts[layer]
                futures = self._read(layout, buffer.array[: layout.slab_bytes])
                self._reads = [future for future in self._reads if not future.done()] + futures
                self._filling.put((layer, buffer, futures))
        except BaseException as error:
            self._filling.put(error)
