"""Checkpoint bytes from disk into our buffers, at the disk's full speed.

`ByteSource` is the interface of slabs' bytes; `DiskReader` reads them from files. Files are opened
with O_DIRECT where the file system supports it: nothing passes through the page cache, so memory
stays within its budget. A few threads keep several requests in flight; a single one would leave a
third of the disk's bandwidth unused.

Invariant: a read that returns has every byte of its slab, from a file that did not change.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from offload.checkpoint.files import Stamp
from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, SlabRead, allocate, open_direct
from offload.errors import ReadError, UserError, system_reason
from offload.units import rounded_up


class ByteSource(Protocol):
    """The weight files of one checkpoint. The opener of a source closes it."""

    # by shard number
    paths: Sequence[Path]
    # limit of the reading rate, for studies
    rate_limit_bytes_per_s: float | None

    @property
    def reading_s(self) -> float:
        """Return the seconds during which any read was in progress."""

    @property
    def note(self) -> str | None:
        """Return a line for the user if the fast way of reading is not available."""

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        """Start filling a page-aligned uint8 buffer.

        It is valid once all futures are done; their `result()` may raise `ReadError`.
        """

    def fetch(self, layout: SlabLayout) -> np.ndarray:
        """Return the `sent` part of a new slab, complete. Raises `ReadError`."""
        slab = allocate(layout.slab_bytes)
        finish(self.read(layout, slab))
        return slab[layout.sent]

    def close(self) -> None:
        """Drop queued reads and wait for running ones."""


# looks at bytes (uint8) of a shard, from an offset on, as they are read
Watcher = Callable[[int, int, np.ndarray], None]
# takes shards, the `stamps` that they must have, and `rate_limit_bytes_per_s` for studies
OpenSource = Callable[..., ByteSource]


def finish(reads: Iterable[Future[None]]) -> None:
    """Return once all of these reads have arrived. Raises `ReadError`."""
    for read in reads:
        read.result()


def when_all_done(parts: Sequence[Future[Any]], call: Callable[[Future[Any]], object]) -> None:
    """Call with the last of these futures once all are done, in the thread that finished it."""
    # counting is one atomic step, even if several readers meet here
    num_done = count(1)

    def one_done(part: Future[Any]) -> None:
        if next(num_done) == len(parts):
            call(part)

    for part in parts:
        part.add_done_callback(one_done)


def drop(reads: Iterable[Future[None]]) -> None:
    """Return once no reader writes to the slab; errors of dropped reads are ignored."""
    for read in reads:
        if not read.cancel():
            read.exception()


def read_all(
    source: ByteSource,
    slabs: Iterable[tuple[SlabLayout, np.ndarray]],
    on_bytes: Callable[[int], None],
) -> None:
    """Fill these slabs; `on_bytes` is called with the size of each. Raises `ReadError`."""
    reads = list[tuple[int, list[Future[None]]]]()
    try:
        for layout, slab in slabs:
            reads.append((layout.slab_bytes, source.read(layout, slab)))
        for num_bytes, futures in reads:
            finish(futures)
            on_bytes(num_bytes)
    finally:
        for _, futures in reads:
            drop(futures)


# as many requests in flight: a reader that waits for its turn must not leave the disk idle
NUM_READERS = 8
REQUEST_BYTES = 2 << 20
_NOT_INTO = "disks cannot write into locked memory here: reading through a buffer, which takes the host's time"
_NO_DIRECT = "this file system has no O_DIRECT: reading through the page cache, which is slower and competes for memory"


class DiskReader(ByteSource):
    """Reads slabs no faster than `rate_limit_bytes_per_s`; `is_direct` says whether with O_DIRECT.

    `watcher` looks at what is read. Raises `ReadError` for files without the given `stamps`.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        stamps: Sequence[Stamp] = (),
        rate_limit_bytes_per_s: float | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._files, self.is_direct = _open_all(shards)
        self.paths = tuple(shards)
        self.rate_limit_bytes_per_s = rate_limit_bytes_per_s
        self._watcher = watcher
        self._stamps = [Stamp.from_file(fd) for fd in self._files]
        self._require_unchanged(stamps)
        self._pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="offload-read")
        self._bounce = threading.local()
        self._throttle = _Throttle(rate_limit_bytes_per_s) if rate_limit_bytes_per_s else None
        self._process = os.getpid()
        self._count = threading.Lock()
        self.bytes_read = 0
        self._reading_s = 0.0
        self._num_reading = 0
        self._reading_since = 0.0
        self._has_bounced = False

    @property
    def reading_s(self) -> float:
        with self._count:
            is_reading = self._num_reading > 0
            now_s = time.perf_counter() - self._reading_since if is_reading else 0.0
            return self._reading_s + now_s

    @property
    def note(self) -> str | None:
        if not self.is_direct:
            return _NO_DIRECT
        return _NOT_INTO if self._has_bounced else None

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        """Start reading a slab, see `ByteSource`."""
        if os.getpid() != self._process:
            obstacle = "weights are read by threads, which a forked process does not have"
            raise ReadError(f"{obstacle}: load the model in the process that uses it")
        for piece in layout.pieces:
            # bytes that are not read would keep old content, unnoticed
            if piece.hi > self._stamps[piece.shard].num_bytes:
                name = self.paths[piece.shard].name
                raise ReadError(f"{name} ends before byte {piece.hi}: it was cut short")
        if layout.is_direct:
            # whole blocks around each run: slab and file stay aligned to each other
            blocks = (
                SlabRead(shard, _down(lo), rounded_up(hi, BLOCK_BYTES), _down(slab_lo))
                for shard, lo, hi, slab_lo in layout.pieces
            )
            return [
                self._pool.submit(
                    self._fill, block, slab[block.slab_lo :][: block.hi - block.lo].data
                )
                for block in _cut(blocks, REQUEST_BYTES)
            ]
        return [
            self._pool.submit(self._read_scattered, slab, batch)
            for batch in _scattered_requests(layout.pieces)
        ]

    def close(self) -> None:
        """Drop queued reads, wait for running ones, close the files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _require_unchanged(self, stamps: Sequence[Stamp]) -> None:
        for path, stamp, wanted in zip(self.paths, self._stamps, stamps, strict=bool(stamps)):
            if stamp != wanted:
                self._close_files()
                change = f"{path.name} changed since the model was opened"
                raise ReadError(f"{change}: load the model again")

    def _read_scattered(self, slab: np.ndarray, pieces: list[SlabRead]) -> None:
        """Read the blocks around neighbouring pieces into a buffer, then place each piece."""
        shard = pieces[0].shard
        lo = _down(pieces[0].lo)
        hi = rounded_up(max(piece.hi for piece in pieces), BLOCK_BYTES)
        buffer = self._bounce_buffer()
        self._fill(SlabRead(shard, lo, hi, 0), buffer[: hi - lo].data)
        for _, first, end, slab_lo in pieces:
            slab[slab_lo : slab_lo + end - first] = buffer[first - lo : end - lo]

    def _bounce_buffer(self) -> np.ndarray:
        if not hasattr(self._bounce, "buffer"):
            # one huge page: reading into small pages is half as fast
            self._bounce.buffer = allocate(REQUEST_BYTES)
        return self._bounce.buffer

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Time one request, unless another request is being timed already."""
        with self._count:
            if not self._num_reading:
                self._reading_since = time.perf_counter()
            self._num_reading += 1
        try:
            yield
        finally:
            with self._count:
                self._num_reading -= 1
                if not self._num_reading:
                    self._reading_s += time.perf_counter() - self._reading_since

    def _fill(self, request: SlabRead, view: memoryview) -> None:
        """Read [lo, hi) of a shard, or to its end. Raises `ReadError`, also if it changed."""
        fd = self._files[request.shard]
        stamp = self._stamps[request.shard]
        wanted = min(request.hi, stamp.num_bytes) - request.lo
        with self._reading():
            if self._throttle is not None:
                self._throttle.wait_for(wanted)
            self._read_whole(request, view, wanted)
        if Stamp.from_file(fd) != stamp:
            change = f"{self.paths[request.shard].name} changed while in use"
            raise ReadError(f"{change}: load the model again")
        if not self.is_direct:
            os.posix_fadvise(fd, request.lo, wanted, os.POSIX_FADV_DONTNEED)
        if self._watcher is not None:
            self._watcher(request.shard, request.lo, np.frombuffer(view[:wanted], np.uint8))
        with self._count:
            self.bytes_read += wanted

    def _read_whole(self, request: SlabRead, view: memoryview, wanted: int) -> None:
        """Read at least `wanted` bytes into a view of whole blocks. Raises `ReadError`."""
        name = self.paths[request.shard].name
        done = 0
        while done < wanted:
            at = request.lo + done
            try:
                count = self._read_some(self._files[request.shard], view[done:], at)
            except OSError as error:
                raise ReadError(f"reading {name} failed: {system_reason(error)}") from error
            if count == 0:
                raise ReadError(f"{name} ends at byte {at}: it was cut short while in use")
            done += count

    def _read_some(self, fd: int, view: memoryview, at: int) -> int:
        """Read with `preadv`, through a buffer if a disk cannot write to a driver's memory."""
        try:
            return os.preadv(fd, [view], at)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
        buffer = self._bounce_buffer()[: len(view)].data
        count = os.preadv(fd, [buffer], at)
        view[:count] = buffer[:count]
        self._has_bounced = True
        return count


class _Throttle:
    """Lets reads start no faster than a given rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait_for(self, num_bytes: int) -> None:
        with self._lock:
            start = max(self._free_at, time.perf_counter())
            self._free_at = start + num_bytes / self._bytes_per_s
            ends = self._free_at
        time.sleep(max(0.0, ends - time.perf_counter()))


def _open_all(shards: Sequence[Path]) -> tuple[list[int], bool]:
    """Return descriptors of all shards, and whether all have O_DIRECT.

    Raises `ReadError`, and `UserError` if too many files would be open.
    """
    direct = [open_direct(path) for path in shards]
    opened = [fd for fd in direct if fd is not None]
    if len(opened) == len(shards):
        return opened, True
    for fd in opened:
        os.close(fd)
    buffered: list[int] = []
    for path in shards:
        try:
            buffered.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        # its header could be read a moment ago, so this is not the user's mistake
        except OSError as error:
            for fd in buffered:
                os.close(fd)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                requirement = f"{len(shards)} files of weights must be open at once"
                raise UserError(f"{requirement}, {system_reason(error)}") from None
            failure = f"{path.name} cannot be opened any more"
            raise ReadError(f"{failure}: {system_reason(error)}") from error
        os.posix_fadvise(buffered[-1], 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return buffered, False


def _scattered_requests(pieces: Sequence[SlabRead]) -> Iterator[list[SlabRead]]:
    """Yield neighbouring pieces together, as long as the blocks around them fit into one request."""
    batch: list[SlabRead] = []
    most_bytes = REQUEST_BYTES - BLOCK_BYTES
    for piece in _cut(pieces, most_bytes):
        if batch:
            is_near = 0 <= piece.lo - batch[-1].hi <= BLOCK_BYTES and piece.shard == batch[0].shard
            if not is_near or piece.hi - batch[0].lo > most_bytes:
                yield batch
                batch = []
        batch.append(piece)
    if batch:
        yield batch


def _cut(pieces: Iterable[SlabRead], most_bytes: int) -> Iterator[SlabRead]:
    """Yield parts that end at multiples of `most_bytes` of a file: a sum then takes whole blocks."""
    for shard, lo, hi, slab_lo in pieces:
        start = lo
        while start < hi:
            end = min(hi, _down(start, most_bytes) + most_bytes)
            yield SlabRead(shard, start, end, slab_lo + start - lo)
            start = end


def _down(value: int, step: int = BLOCK_BYTES) -> int:
    return value // step * step
