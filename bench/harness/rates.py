"""The ceilings of a device, or of the host where there is none: memory, products and link."""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from offload.calibration.link import copy_bytes_per_s
from offload.streaming.device import Device
from offload.timer import timed
from offload.units import format_bytes

_NUM_RUNS = 8
_NUM_WARM = 3
_ODD_BYTES = 8  # behind a page, where the weights of many files begin


class CopyRates(NamedTuple):
    """Page-locked host memory to the device, a layer at a time."""

    how: str  # the memory was locked
    bytes_per_s: float
    # the same from some bytes behind a page, as slabs of most files are sent
    odd_bytes_per_s: float


def copy_rates(device: Device, num_bytes: int) -> CopyRates:
    """Time copies of that size; what was needed for them is given back."""
    pinned = device.open_allocator()
    try:
        array = pinned.allocate(num_bytes).array
        way = pinned.note or f"page-locked ({pinned.ways})"
        rates = [copy_bytes_per_s(device, one) for one in (array, array[_ODD_BYTES:])]
        return CopyRates(f"copies of {format_bytes(num_bytes)}: {way}", *rates)
    finally:
        del array
        pinned.close()
        if device.place.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device.place)


def flops_per_s(device: Device | None, num_out: int, num_in: int) -> float:
    place = device.place if device else torch.device("cpu")
    num_rows = 2048 if place.type == "cuda" else 64
    weight = torch.randn(num_out, num_in, device=place, dtype=torch.bfloat16)
    rows = torch.randn(num_rows, num_in, device=place, dtype=torch.bfloat16)
    seconds = _seconds(device, lambda: torch.nn.functional.linear(rows, weight))
    return 2 * num_rows * weight.numel() / seconds


def memory_bytes_per_s(device: Device | None) -> float:
    """Return the rate at which a copy reads: computing cannot read weights faster."""
    place = device.place if device else torch.device("cpu")
    is_cuda = place.type == "cuda"
    size = (1 << 30) if is_cuda else (64 << 20)
    one, two = (torch.ones(size, dtype=torch.uint8, device=place) for _ in range(2))
    # device memory is written as fast
    return (2 if is_cuda else 1) * size / _seconds(device, lambda: two.copy_(one))


def _seconds(device: Device | None, work: Callable[[], object]) -> float:
    def once() -> None:
        work()
        if device is not None:  # the wait before the first one is among those that do not count
            device.synchronize(device.record(device.compute))

    return median([timed(once) for _ in range(_NUM_RUNS)][_NUM_WARM:])
