"""Copies of blocks from host memory to a device: at once where it is locked, else by way of buffers.

The copy into a slot waits, on the device, for the event after which nothing reads the slot; kernels
wait for the event after the copy. The host only enqueues, except memory that could not be locked,
which goes in pieces through locked buffers (`Bounces`).
"""

import threading
from collections import deque

from torch import Tensor

from offload.streaming.device import Device, Event
from offload.streaming.pinned import PinnedAllocator

_BOUNCE_BYTES = 32 << 20
_NUM_BOUNCES = 3


class Sender:
    """Enqueues copies of blocks on the copy stream of a device.

    Any thread may send what is locked, one thread what is not.

    Attributes:
        last: by host slot, the event after the last copy of a locked block that lay there.
    """

    def __init__(self, device: Device, pinned: PinnedAllocator) -> None:
        self.last = dict[int, Event]()
        self._device = device
        self._pinned = pinned
        self._bounces: Bounces | None = None
        # a wait, a copy and an event must stand together on the copy stream
        self._sending = threading.Lock()

    def expect_unlocked(self) -> None:
        """Make the buffers for memory that is not locked, while there is room for them."""
        self._bounces = Bounces(self._device, self._pinned)

    def send(
        self,
        slot: Tensor,
        free: Event,
        weights: Tensor,
        *,
        is_locked: bool,
        host_slot: int | None = None,
    ) -> Event:
        """Enqueue the copy of a block into a slot behind the event `free`; return the event after.

        Memory that is not locked may be written again on return.

        Args:
            weights: of the block in host memory, from the first one on.
            host_slot: the number of that memory, by which the last copy from there is found; None:
                it is never written again.
        """
        device = self._device
        to = slot[: len(weights)]
        with self._sending:
            device.wait(device.copies, free)
            if is_locked:
                device.copy(to, weights, device.copies)
                sent = device.mark(device.copies)
                if host_slot is not None:
                    self.last[host_slot] = sent
        if not is_locked:
            assert self._bounces is not None, "memory that is not locked was expected"
            sent = self._bounces.send(to, weights)
        return sent

    def close(self) -> None:
        """Let go of the buffers; nothing moves."""
        self._bounces = None


class Bounces:
    """A ring of locked buffers; one thread uses it, and waits for the device where it has to."""

    def __init__(self, device: Device, pinned: PinnedAllocator) -> None:
        self.buffers = [pinned.allocate(_BOUNCE_BYTES) for _ in range(_NUM_BOUNCES)]
        self._device = device
        self._next = deque[tuple[Tensor, Event]]((buffer.tensor, None) for buffer in self.buffers)

    def send(self, to: Tensor, source: Tensor) -> Event:
        """Enqueue copies of all bytes; return the event behind them. `source` is free on return."""
        device = self._device
        sent = None
        size = len(self._next[0][0])
        for piece, part in zip(source.split(size), to.split(size), strict=True):
            bounce, last = self._next.popleft()
            if last is not None:
                device.synchronize(last)
            device.copy(part, bounce[: len(piece)].copy_(piece), device.copies)
            sent = device.mark(device.copies)
            self._next.append((bounce, sent))
        return sent
