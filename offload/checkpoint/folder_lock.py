"""Folders that one process at a time writes to.

Invariant: who holds a lock holds that of the folder that has the name now; one that was finished and renamed meanwhile
is not what was asked for, and what another process makes under the name since is its own.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from offload.errors import UserError


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, locked. Raises `UserError` where another process writes to it, and `OSError`."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _is_taken(lock, folder):
            raise UserError(f"another process is writing to {folder}: wait for it, or take another name")
        yield lock
    finally:
        os.close(lock)


@contextmanager
def locked_anew(folder: Path) -> Iterator[int]:
    """The same for one that is made if need be; an empty one does not stay where an `OSError` ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        lock = None
        try:
            lock = held.enter_context(locked(folder))
            yield lock
        except OSError:
            with suppress(OSError):  # it is gone already, or holds something
                if lock is None or os.path.samestat(os.fstat(lock), os.stat(folder)):
                    folder.rmdir()
            raise


def _is_taken(lock: int, folder: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), os.stat(folder))
    except (BlockingIOError, FileNotFoundError):
        return False
