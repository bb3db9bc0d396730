"""Experts from a byte source into the memory of the host, where a CPU computes with them."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.streaming.device import Device, Event
from offload.streaming.source import ByteSource


class ExpertCarrier:
    """Brings experts, `records` by block, to the `device` that computes: here, host memory."""

    def __init__(self, source: ByteSource, records: Sequence[SlabLayout], device: Device) -> None:
        self.source, self.records, self.device = source, records, device

    @property
    def note(self) -> str | None:
        """A line for the user where experts come more slowly than they could."""
        return self.source.note

    def begin_pass(self, num_rows: int) -> None:
        """A pass of so many rows follows."""

    def use(self, blocks: Sequence[int]) -> None:
        """The pass needs these, and they were not there when it began."""

    def carry(self, block: int, slot: Tensor, free: Event) -> Sequence[Future[Any]]:
        """Start moving an expert into a slot, see `stage.Carry`."""
        self.device.synchronize(free)
        return self.source.read(self.records[block], slot.numpy()[: self.records[block].slab_bytes])

    def weights(self, block: int, slot: Tensor) -> Tensor:
        """What begins with the expert's first weight."""
        return slot[self.records[block].sent]

    def close(self) -> None:
        """On return nothing moves any more; what was asked for has been cancelled."""
