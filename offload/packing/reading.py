"""Large files that are read part by part past the page cache, where their file system allows it.

What the disk writes straight into a buffer that is used again costs neither copies nor new pages,
and what was just written comes from the disk. Invariant: a thread has one buffer, whose content
lasts until it reads again.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import local

import numpy as np

from offload.checkpoint.files import read_into
from offload.checkpoint.layout import BLOCK_BYTES, allocate, open_direct
from offload.errors import ReadError

_NOTHING = np.empty(0, np.uint8)


class Rooms:
    """A buffer for each thread, which grows."""

    def __init__(self) -> None:
        self._own = local()

    def take(self, num_bytes: int) -> np.ndarray:
        """Return this many bytes or more, from a page's beginning on."""
        if len(getattr(self._own, "room", b"")) < max(1, num_bytes):
            self._own.room = allocate(max(1, num_bytes))
        room: np.ndarray = self._own.room
        return room


class PartFile:
    """An open file."""

    def __init__(self, fd: int, *, is_direct: bool) -> None:
        self._fd = fd
        self._is_direct = is_direct
        self._rooms = Rooms()

    def read(self, *spans: tuple[int, int], behind: np.ndarray = _NOTHING) -> list[np.ndarray]:
        """Return the bytes of spans [lo, hi), in this thread's buffer. Raises `ReadError`.

        Args:
            behind: bytes that follow those of the last span there.
        """
        blocks = [(_down(lo), -_down(-hi)) for lo, hi in spans]
        room = self._rooms.take(sum(end - begin for begin, end in blocks) + len(behind))
        parts = []
        at = 0
        for (lo, hi), (begin, end) in zip(spans, blocks, strict=True):
            if hi > os.fstat(self._fd).st_size:
                raise ReadError(f"a file ends before byte {hi}: it was cut short while in use")
            view = room[at : at + end - begin]
            read_into(self._fd, view.data, begin, hi - begin)
            if not self._is_direct:
                os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            parts.append(room[at + lo - begin : at + hi - begin])
            at += end - begin
        last = at - end + hi
        room[last : last + len(behind)] = behind
        parts[-1] = room[last - hi + lo : last + len(behind)]
        return parts

    def copy_of(self, lo: int, hi: int) -> np.ndarray:
        """Return bytes that stay. Raises `ReadError`."""
        return self.read((lo, hi))[0].copy()


@contextmanager
def parts_of(path: Path) -> Iterator[PartFile]:
    """Open a file. Raises `OSError`."""
    direct = open_direct(path)
    fd = os.open(path, os.O_RDONLY) if direct is None else direct
    try:
        yield PartFile(fd, is_direct=direct is not None)
    finally:
        os.close(fd)


def _down(place: int) -> int:
    return place // BLOCK_BYTES * BLOCK_BYTES
