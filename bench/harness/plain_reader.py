"""The ceiling of all that streams from disk: a few threads that only read the same files.

It shares no code with the disk reader, so that a slow one cannot hide behind a ceiling of its own
making.
"""

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = 4096


class Reading(NamedTuple):
    """How to read."""

    num_threads: int = 4
    block_bytes: int = 4 << 20
    # past the page cache; where a file system cannot, pages are dropped after use instead
    is_direct: bool = True

    @property
    def label(self) -> str:
        way = "O_DIRECT" if self.is_direct else "page cache"
        return f"plain reader, {way}, {self.num_threads} x {self.block_bytes >> 20} MiB"


def plain_read_s(shards: Sequence[Path], num_bytes: int, how: Reading = Reading()) -> float:  # noqa: B008 (immutable)
    """Return the seconds in which `num_bytes` of these files arrive.

    They are read from their beginnings, again and again if need be.
    """
    largest_bytes = max(path.stat().st_size for path in shards) // _PAGE_BYTES * _PAGE_BYTES
    block_bytes = min(how.block_bytes, largest_bytes)
    assert block_bytes, "there is nothing to read"
    wanted = max(1, num_bytes // block_bytes)
    files = [(_open(path, how.is_direct), path.stat().st_size) for path in shards]
    blocks = [
        (fd, lo) for fd, size in files for lo in range(0, size - block_bytes + 1, block_bytes)
    ]
    free = [_touched(block_bytes) for _ in range(how.num_threads)]

    def read(block: tuple[int, int]) -> None:
        buffer = free.pop()
        count = os.preadv(block[0], [buffer], block[1])
        assert count == block_bytes, f"{count} of {block_bytes} bytes"
        if not how.is_direct:
            os.posix_fadvise(block[0], block[1], block_bytes, os.POSIX_FADV_DONTNEED)
        free.append(buffer)

    try:
        with ThreadPoolExecutor(how.num_threads) as pool:
            started = time.perf_counter()
            list(pool.map(read, islice(cycle(blocks), wanted)))
            elapsed_s = time.perf_counter() - started
    finally:
        for fd, _ in files:
            os.close(fd)
    return elapsed_s * num_bytes / (wanted * block_bytes)


def plain_rate(shards: Sequence[Path], num_bytes: int, how: Reading = Reading()) -> float:  # noqa: B008
    return num_bytes / plain_read_s(shards, num_bytes, how)


def _touched(num_bytes: int) -> memoryview:
    """Return huge pages that are there already.

    With small ones O_DIRECT pins each for itself: 1.2 instead of 2.0 GB/s.
    """
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    region.write(bytes(num_bytes))
    return memoryview(region)


def _open(path: Path, is_direct: bool) -> int:
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    if not is_direct:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd
