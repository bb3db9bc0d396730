"""Locked buffers through which bytes get to a device from memory that could not be locked.

Invariant: a buffer is written again only after the device has copied from it.
"""

from collections import deque

import torch
from torch import Tensor

from offload.streaming.device import Device, Event
from offload.streaming.pinned import PinnedAllocator

_BOUNCE_BYTES = 32 << 20
_NUM_BOUNCES = 3


class Bounces:
    """A ring of locked buffers; one thread uses it, and waits for the device where it has to."""

    def __init__(self, device: Device, pinned: PinnedAllocator) -> None:
        self.buffers = [pinned.allocate(_BOUNCE_BYTES) for _ in range(_NUM_BOUNCES)]
        self._device = device
        self._next = deque[tuple[Tensor, Event]](
            (torch.from_numpy(one.array), None) for one in self.buffers
        )

    def send(self, to: Tensor, source: Tensor, *, is_timed: bool = False) -> Event:
        """Enqueue copies of all bytes.

        Returns the event after the last one; `source` is free on return.
        """
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
