"""The host as a device: models that compute on the CPU stream as those on a GPU do, with times for events."""

import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from offload.streaming.device import Event, Stream
from offload.streaming.disk import allocate
from offload.streaming.pinned import PinnedAllocator


class PlainWay:
    """Pages that count as locked, because nobody copies from them behind our back."""

    name, is_seen = "plain", True

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Exactly so many bytes."""
        return allocate(num_bytes)

    def free(self, array: np.ndarray) -> None:
        """They go with the last view."""


class HostDevice:
    """Does everything at once, in the order in which it is asked."""

    name, place = "host", torch.device("cpu")
    copies = compute = None

    def computing(self) -> AbstractContextManager[None]:
        """Every thread computes here anyway."""
        return nullcontext()

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory of the host, page-aligned, so that a disk can write into it directly."""
        return torch.from_numpy(allocate(num_bytes))

    def open_allocator(self) -> PinnedAllocator:
        """Of ordinary memory, which counts as locked: copies from it are over when they return."""
        return PinnedAllocator([PlainWay()])

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy now."""
        to.copy_(source)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Fill now."""
        tensor.fill_(value)

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """The time."""
        return time.perf_counter()

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing: it is over already."""

    def synchronize(self, event: Event) -> None:
        """Nothing: it is over already."""

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        """Between two times."""
        return float(after - before)

    def peak_bytes(self) -> int:
        """Nothing of its own."""
        return 0
