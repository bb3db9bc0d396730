"""The ceilings of a machine: files that are only read, copies to a device, memory and products.

The plain reader shares no code with the disk reader, so that a slow one cannot hide behind a
ceiling of its own making.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

import torch

from offload.calibration.link import copy_bytes_per_s
from offload.streaming.device import Device
from offload.streaming.pinned import RefusedError
from offload.timer import timed
from offload.units import format_bytes

NUM_THREADS = 4
BLOCK_BYTES = 4 << 20
PLAIN_READER = f"plain reader, O_DIRECT, {NUM_THREADS} x {BLOCK_BYTES >> 20} MiB"
_PAGE_BYTES = 4096
_NUM_RUNS = 8
_NUM_WARM = 3
_ODD_BYTES = 8  # behind a page, where the weights of many files begin


def plain_read_s(shards: Sequence[Path], num_bytes: int) -> float:
    """Return the seconds in which `num_bytes` of these files arrive, past the page cache."""
    sizes = [path.stat().st_size for path in shards]
    block_bytes = min(BLOCK_BYTES, max(sizes) // _PAGE_BYTES * _PAGE_BYTES)
    assert block_bytes, "there is nothing to read"
    wanted = max(1, num_bytes // block_bytes)
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in shards]
    blocks = [
        (file, lo)
        for file, size in zip(files, sizes, strict=True)
        for lo in range(0, size - block_bytes + 1, block_bytes)
    ]
    free = [_touched(block_bytes) for _ in range(NUM_THREADS)]

    def read(block: tuple[int, int]) -> None:
        buffer = free.pop()
        count = os.preadv(block[0], [buffer], block[1])
        assert count == block_bytes, f"{count} of {block_bytes} bytes"
        free.append(buffer)

    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            started = time.perf_counter()
            list(pool.map(read, islice(cycle(blocks), wanted)))
            elapsed_s = time.perf_counter() - started
    finally:
        for file in files:
            os.close(file)
    return elapsed_s * num_bytes / (wanted * block_bytes)


def plain_write_s(folder: Path, num_bytes: int) -> float:
    """Return the seconds until `num_bytes` of random numbers are on the disk of a folder."""
    block = os.urandom(BLOCK_BYTES)
    with TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        for _ in range(num_bytes // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
        elapsed_s = time.perf_counter() - started
    return elapsed_s * num_bytes / (num_bytes // BLOCK_BYTES * BLOCK_BYTES)


def _touched(num_bytes: int) -> memoryview:
    """Return huge pages: of small ones O_DIRECT pins each, which gives 1.2 instead of 2.0 GB/s."""
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    region.write(bytes(num_bytes))
    return memoryview(region)


def copy_rates(device: Device, num_bytes: int) -> tuple[str, list[float]]:
    """Time copies of page-locked memory; return how it is locked, and both rates."""
    pinned = device.open_allocator()
    try:
        array = pinned.allocate(num_bytes).array
        way = pinned.note or f"page-locked ({pinned.ways})"
        rates = [copy_bytes_per_s(device, source) for source in (array, array[_ODD_BYTES:])]
        return f"copies of {format_bytes(num_bytes)}: {way}", rates
    finally:
        del array
        pinned.close()
        if device.torch_device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device.torch_device)


def lock_rates(device: Device, num_bytes: int) -> Iterator[tuple[str, float]]:
    """Time each way to lock so much host memory, bytes a second: a model is loaded no faster."""
    for method in device.open_allocator().methods:
        started = time.perf_counter()
        try:
            array = method.allocate(num_bytes)
        except RefusedError:
            continue
        yield method.name, num_bytes / (time.perf_counter() - started)
        method.free(array)


def flops_per_s(device: Device, num_out: int, num_in: int) -> float:
    torch_device = device.torch_device
    num_rows = 2048 if torch_device.type == "cuda" else 64
    weight = torch.randn(num_out, num_in, device=torch_device, dtype=torch.bfloat16)
    rows = torch.randn(num_rows, num_in, device=torch_device, dtype=torch.bfloat16)
    seconds = _seconds(device, lambda: torch.nn.functional.linear(rows, weight))
    return 2 * num_rows * weight.numel() / seconds


def memory_bytes_per_s(device: Device, most_bytes: int) -> float:
    """Return the rate at which a copy reads: computing cannot read weights faster.

    At most `most_bytes` are copied, since models fill the memory meanwhile.
    """
    torch_device = device.torch_device
    is_cuda = torch_device.type == "cuda"
    size = min(most_bytes, (1 << 28) if is_cuda else (64 << 20))
    source, two = (torch.ones(size, dtype=torch.uint8, device=torch_device) for _ in range(2))
    # device memory is written as fast
    return (2 if is_cuda else 1) * size / _seconds(device, lambda: two.copy_(source))


def _seconds(device: Device, work: Callable[[], object]) -> float:
    def once() -> None:
        work()
        # the wait before the first one is among those that do not count
        device.synchronize(device.mark(device.compute))

    return median([timed(once) for _ in range(_NUM_RUNS)][_NUM_WARM:])
