<<<<<<<< HEAD:offload/streaming/host_device.py
"""The host as a device: models that compute on the CPU stream as those on a GPU do, with times for events."""
========
"""A device that is the host itself: what drives a device can be rehearsed without one, and nothing is gained by it."""
>>>>>>>> b38ffe4 ([bench] folders by purpose; one harness; a device is a flag):bench/harness/pretend.py

import time

import numpy as np
import torch
from torch import Tensor

from offload.streaming.device import Event, Stream
from offload.streaming.disk import allocate
from offload.streaming.pinned import PinnedAllocator


class PlainWay:
    """Pages that count as locked, because nobody copies from them behind our back."""

    name = "plain"

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Exactly so many bytes."""
        return allocate(num_bytes)

    def free(self, array: np.ndarray) -> None:
        """They go with the last view."""


class PretendDevice:
    """Does everything at once, in the order in which it is asked (see `offload.streaming.device.Device`)."""

    name, place = "host", torch.device("cpu")
    copies = compute = None

    def allocate(self, num_bytes: int) -> Tensor:
<<<<<<<< HEAD:offload/streaming/host_device.py
        """Memory of the host, page-aligned, so that a disk can write into it directly."""
        return torch.from_numpy(allocate(num_bytes))

    def open_allocator(self) -> PinnedAllocator:
        """Of ordinary memory, which counts as locked: copies from it are over when they return."""
        return PinnedAllocator([PlainWay()])
========
        return torch.empty(num_bytes, dtype=torch.uint8)
>>>>>>>> b38ffe4 ([bench] folders by purpose; one harness; a device is a flag):bench/harness/pretend.py

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        to.copy_(source)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        tensor.fill_(value)

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        return time.perf_counter()

<<<<<<<< HEAD:offload/streaming/host_device.py
    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing: it is over already."""

    def synchronize(self, event: Event) -> None:
        """Nothing: it is over already."""
========
    def wait(self, stream: Stream, event: Event) -> None: ...

    def synchronize(self, event: Event) -> None: ...
>>>>>>>> b38ffe4 ([bench] folders by purpose; one harness; a device is a flag):bench/harness/pretend.py

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        return float(after - before)

    def peak_bytes(self) -> int:
        return 0
<<<<<<<< HEAD:offload/streaming/host_device.py
========


class PretendPages:
    """Pages that count as locked, because nobody copies from them behind our back."""

    name = "pretended"

    def allocate(self, num_bytes: int) -> np.ndarray:
        return allocate(num_bytes)

    def free(self, array: np.ndarray) -> None: ...
>>>>>>>> b38ffe4 ([bench] folders by purpose; one harness; a device is a flag):bench/harness/pretend.py
