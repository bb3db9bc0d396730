"""What a GPU and its link give: the ceilings beside which the bench of the device path puts its figures."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from offload.calibration.link import copy_bytes_per_s
from offload.checkpoint.safetensors import read_json
from offload.config import format_bytes
from offload.streaming.device import Device

_NUM_RUNS, _NUM_WARM = 8, 3
_ODD_BYTES = 8  # behind a page, where the weights of many files begin


class Rates(NamedTuple):
    """What this machine gives, measured with nothing else in memory."""

    copy_bytes_per_s: float  # page-locked host memory to the GPU, a layer at a time
    odd_copy_bytes_per_s: float  # the same from some bytes behind a page, as slabs of most files are sent
    flops_per_s: float  # the target's own largest matrix
    memory_bytes_per_s: float  # of the GPU, read and written


def ceilings(card: Device, target: Path, layer_bytes: int) -> tuple[str, Rates]:
    """How copies were made, and the rates; what was needed for them is given back."""
    name, even, odd = _copy_rates(card, layer_bytes)
    rates = Rates(even, odd, _flops_rate(card, target), _memory_rate(card))
    if card.place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(card.place)
    return name, rates


def _copy_rates(card: Device, num_bytes: int) -> tuple[str, float, float]:
    arena = card.open_allocator()
    array = arena.allocate(num_bytes).array
    rates = copy_bytes_per_s(card, array), copy_bytes_per_s(card, array[_ODD_BYTES:])
    name = f"copies of {format_bytes(num_bytes)}: {arena.note or f'page-locked ({arena.ways})'}"
    arena.close()
    return name, *rates


def _flops_rate(card: Device, target: Path) -> float:
    config, place = read_json(target / "config.json"), card.place
    weight = torch.randn(config["intermediate_size"], config["hidden_size"], device=place, dtype=torch.bfloat16)
    rows = torch.randn(2048 if place.type == "cuda" else 64, weight.shape[1], device=place, dtype=torch.bfloat16)
    return 2 * len(rows) * weight.numel() / _seconds(card, lambda: torch.nn.functional.linear(rows, weight))


def _memory_rate(card: Device) -> float:
    size = (1 << 30) if card.place.type == "cuda" else (16 << 20)
    one, two = (torch.zeros(size, dtype=torch.uint8, device=card.place) for _ in range(2))
    return 2 * size / _seconds(card, lambda: two.copy_(one))


def _seconds(card: Device, work: Callable[[], object]) -> float:
    """Of work on the compute stream, the launch included."""
    seconds = []
    for _ in range(_NUM_RUNS):
        card.synchronize(card.record(card.compute))
        started = time.perf_counter()
        work()
        card.synchronize(card.record(card.compute))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_NUM_WARM:])
