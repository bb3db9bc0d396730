"""Large files taken part by part: several are worked on at once, and come out in their order.

Invariant: memory holds a few parts, however large the file is.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from offload.errors import ReadError
from offload.threads.cores import num_cores

PART_BYTES = 8 << 20
_MAX_THREADS = 8
_Result = TypeVar("_Result")


def in_order(work: Callable[..., _Result], jobs: Iterable[tuple[Any, ...]]) -> Iterator[_Result]:
    """What `work` makes of each job, on as many threads as there are cores; it should hold no lock for long."""
    num_threads = min(_MAX_THREADS, num_cores())
    pool, pending = ThreadPoolExecutor(num_threads, thread_name_prefix="offload-parts"), deque[Future[_Result]]()
    try:
        for job in jobs:
            pending.append(pool.submit(work, *job))
            if len(pending) > 2 * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_part(fd: int, lo: int, hi: int) -> bytearray:
    """Bytes [lo, hi), which do not stay in the page cache. Raises `ReadError` where the file ends before."""
    data = bytearray(hi - lo)
    view, done = memoryview(data), 0
    while done < len(data):
        try:
            count = os.preadv(fd, [view[done:]], lo + done)
        except OSError as error:
            raise ReadError(f"reading failed at byte {lo + done}: {error.strerror}") from error
        if not count:
            raise ReadError(f"a file ends at byte {lo + done}: it was cut short while in use")
        done += count
    os.posix_fadvise(fd, lo, hi - lo, os.POSIX_FADV_DONTNEED)
    return data


def write_part(fd: int, data: Any, lo: int) -> None:
    """All of a buffer, on its way to the disk at once. Raises `OSError`."""
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], lo + done)
    os.posix_fadvise(fd, lo, len(view), os.POSIX_FADV_DONTNEED)  # of what is not yet written it begins the writing


def parts(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """[lo, hi) cut into parts."""
    for at in range(lo, hi, PART_BYTES):
        yield at, min(at + PART_BYTES, hi)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor; a file that is made may be read by all. Raises `OSError`."""
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
