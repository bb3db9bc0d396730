"""A device that is the host itself, so that what drives a device can be run without one; nothing is gained by it."""

import time

import numpy as np
import torch
from torch import Tensor

from offload.streaming.device import Event, Stream
from offload.streaming.disk import allocate


class HostDevice:
    """Does everything at once, in the order in which it is asked."""

    name, place = "host", torch.device("cpu")
    copies = compute = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory of the host."""
        return torch.empty(num_bytes, dtype=torch.uint8)

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
        """It is over already."""

    def synchronize(self, event: Event) -> None:
        """It is over already."""

    def elapsed_s(self, before: Event, after: Event) -> float | None:
        """Between two times."""
        return float(after - before)

    def peak_bytes(self) -> int:
        """Nothing of its own."""
        return 0


class PlainWay:
    """Pages that count as locked, because nobody copies from them behind our back."""

    name = "plain"

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Exactly so many bytes."""
        return allocate(num_bytes)

    def free(self, array: np.ndarray) -> None:
        """They go with the last view."""
