"""Whole files at the speed of their disk, measured part by part: checksums, and the largest number of every tensor.

Invariant: a few parts are in memory, however large the files are, and each byte is read once.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, zip_longest
from threading import Event
from typing import NamedTuple

import numpy as np

from offload.checkpoint.crc32 import crc32_of_scratch
from offload.checkpoint.layout import BLOCK_BYTES, Piece, SlabLayout
from offload.checkpoint.numbers import top_bits
from offload.checkpoint.parts import PART_BYTES
from offload.checkpoint.whole import Span, WholeFile
from offload.errors import ReadError
from offload.streaming.disk import DiskReader, allocate
from offload.streaming.source import drop, finish
from offload.threads.cores import num_cores

_MAX_THREADS, _NUM_AHEAD = 8, 4
_CACHED_BYTES = 512 << 10
_BUFFER_BYTES = PART_BYTES + 2 * BLOCK_BYTES


class Measured(NamedTuple):
    """A file that was read, as far as the disk gave it."""

    sums: list[str]  # of each span, CRC-32 of its parts
    tops: list[int]  # of each span, the largest bits of its numbers
    sha256: str | None  # where it was asked for
    failure: str  # why it could not be read; empty where it was


class _Batch(NamedTuple):
    """Parts that follow one another, read at once."""

    shard: int
    parts: tuple[tuple[int, int, int], ...]  # span, [lo, hi)
    turn: int  # of its file

    @property
    def lo(self) -> int:
        return self.parts[0][1]

    @property
    def hi(self) -> int:
        return self.parts[-1][2]


class _File:
    """What is known of a file so far."""

    def __init__(self, file: WholeFile, *, is_hashed: bool) -> None:
        self.spans, self.failure = file.spans, ""
        self.sums: list[list[str]] = [[] for _ in file.spans]
        self.tops = [0] * len(file.spans)
        self.sha256 = hashlib.sha256() if is_hashed else None
        self.turns: dict[int, Event] = {}

    def add(self, batch: _Batch, found: list[tuple[int, int]]) -> None:
        """Sums and tops of a batch's parts."""
        for (span, *_), (crc, bits) in zip(batch.parts, found, strict=True):
            self.sums[span].append(f"{crc:08x}")
            self.tops[span] = max(self.tops[span], bits)

    def measured(self) -> Measured:
        sha256 = None if self.sha256 is None else self.sha256.hexdigest()
        return Measured(["".join(own) for own in self.sums], self.tops, sha256, self.failure)


def measure(files: Sequence[WholeFile], hashed: Collection[int], on_bytes: Callable[[int], None]) -> list[Measured]:
    """Read all of these files once; `hashed` are those, by index, whose sha256 is wanted.

    `on_bytes` hears of what was measured. Raises `ReadError` where a file is not the one whose header was read.
    """
    num_threads = min(_MAX_THREADS, num_cores())
    known = [_File(file, is_hashed=index in hashed) for index, file in enumerate(files)]
    free, pending = [allocate(_BUFFER_BYTES) for _ in range(num_threads + _NUM_AHEAD)], deque[_Job]()
    with closing(DiskReader([file.path for file in files], stamps=[file.stamp for file in files])) as reader:
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="offload-measure")
        try:
            for batch in _in_turns(files, num_threads):
                if not free:
                    free.append(_collect(pending.popleft(), known, on_bytes))
                if not known[batch.shard].failure:
                    pending.append(_begin(batch, known[batch.shard], reader, pool, free.pop()))
            while pending:
                _collect(pending.popleft(), known, on_bytes)
        finally:
            for job in pending:
                job.found.cancel()
            for turn in chain.from_iterable(file.turns.values() for file in known):
                turn.set()
            pool.shutdown(cancel_futures=True)
    return [file.measured() for file in known]


class _Job(NamedTuple):
    """A batch under way."""

    batch: _Batch
    buffer: np.ndarray
    found: Future[list[tuple[int, int]]]


def _begin(batch: _Batch, file: _File, reader: DiskReader, pool: ThreadPoolExecutor, buffer: np.ndarray) -> _Job:
    at = batch.lo % BLOCK_BYTES
    layout = SlabLayout((Piece(batch.shard, batch.lo, batch.hi, at),), {}, _BUFFER_BYTES, is_direct=True)
    file.turns[batch.turn] = Event()
    reads = reader.read(layout, buffer)
    return _Job(batch, buffer, pool.submit(_work, batch, file, reads, buffer[at : at + batch.hi - batch.lo]))


def _collect(job: _Job, known: Sequence[_File], on_bytes: Callable[[int], None]) -> np.ndarray:
    """Wait for a batch; its buffer is free again."""
    file = known[job.batch.shard]
    try:
        file.add(job.batch, job.found.result())
    except ReadError as error:
        file.failure = file.failure or str(error)
    file.turns.pop(job.batch.turn - 1, None)
    on_bytes(job.batch.hi - job.batch.lo)
    return job.buffer


def _work(batch: _Batch, file: _File, reads: list[Future[None]], stored: np.ndarray) -> list[tuple[int, int]]:
    try:
        finish(reads)
        parts = [(file.spans[span], lo, stored[lo - batch.lo : hi - batch.lo]) for span, lo, hi in batch.parts]
        tops = [_top(*part) for part in parts]
        if file.sha256 is not None:
            before = file.turns.get(batch.turn - 1)
            if before is not None:
                before.wait()
            file.sha256.update(stored.data)
            file.turns[batch.turn].set()
        sums = [crc32_of_scratch(part) for *_, part in parts]  # last: the bytes are lost
        return [*zip(sums, tops, strict=True)]
    finally:
        drop(reads)
        file.turns[batch.turn].set()


def _top(span: Span, lo: int, stored: np.ndarray) -> int:
    """Largest bits, of blocks that the processor's cache holds: memory is read once."""
    if span.form is None:
        return 0
    stored, step = stored[: max(0, span.hi - lo)], _CACHED_BYTES // span.form.item_bytes * span.form.item_bytes
    return max((top_bits(stored[at : at + step], span.form) for at in range(0, len(stored), step)), default=0)


def _in_turns(files: Sequence[WholeFile], num_files: int) -> Iterator[_Batch]:
    """A few files at a time, batch by batch, so that as many can be hashed at once."""
    for first in range(0, len(files), num_files):
        several = [_batches(shard, files[shard]) for shard in range(first, min(first + num_files, len(files)))]
        yield from (batch for row in zip_longest(*several) for batch in row if batch is not None)


def _batches(shard: int, file: WholeFile) -> Iterator[_Batch]:
    own, turn = list[tuple[int, int, int]](), 0
    for index, span in enumerate(file.spans):
        for lo, hi in span.parts():
            if own and hi - own[0][1] > PART_BYTES:
                yield _Batch(shard, tuple(own), turn)
                own, turn = [], turn + 1
            own.append((index, lo, hi))
    if own:
        yield _Batch(shard, tuple(own), turn)
