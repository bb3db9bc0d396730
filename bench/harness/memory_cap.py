"""A memory group for one child process: its memory and page cache, together below a cap.

A peer that maps a file larger than its share must not live off the page cache of a machine with
more memory. Only a group of the kernel (cgroup v1 or v2) counts both. Where none may be made, the
caller gets None and must say so.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from offload.machine import GroupFiles, memory_groups

_PROCESSES = "cgroup.procs"


class MemoryCap(NamedTuple):
    """An empty group with its limit set."""

    folder: Path
    files: GroupFiles

    @property
    def processes(self) -> Path:
        """The file that a process writes its id into to join."""
        return self.folder / _PROCESSES

    def peak_bytes(self) -> int | None:
        """Return the most bytes held, page cache included; None where it is not kept."""
        path = self.folder / self.files.peak
        return int(path.read_text()) if path.is_file() else None

    def remove(self, patience_s: float = 5.0) -> None:
        """Remove the group once its last process is gone, which the kernel may notice late."""
        give_up = time.monotonic() + patience_s
        while True:
            try:
                return self.folder.rmdir()
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)


def new_cap(
    cap_bytes: int,
    root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
    make_folder: Callable[[Path], None] = Path.mkdir,
) -> MemoryCap | None:
    """Make a group of `cap_bytes` inside the innermost group of ours that can have one, or None.

    In cgroup v2 a group that holds processes may have no limited children: then one beside it has
    to do.
    """
    for outer, files in memory_groups(root, membership):
        cap = MemoryCap(outer / f"offload-bench-{os.getpid()}", files)
        try:
            make_folder(cap.folder)
        except OSError:
            continue
        if _set_limit(cap, cap_bytes):
            return cap
        cap.folder.rmdir()
    return None


def drop_pages(path: Path) -> None:
    """Ask the kernel to forget what it has cached of a file or of the files in a folder."""
    for each in [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]:
        file = os.open(each, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _set_limit(cap: MemoryCap, cap_bytes: int) -> bool:
    """Return whether the group takes the limit; only the kernel's own files are written."""
    try:
        with (cap.folder / cap.files.limit).open("r+", encoding="ascii") as limit:
            limit.write(str(cap_bytes))
    except OSError:
        return False
    return os.access(cap.processes, os.W_OK)
