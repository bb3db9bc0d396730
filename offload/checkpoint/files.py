"""Small files of strangers, such as config.json: what is no regular file would hang, or never end;
and ours.

Folders that one process at a time writes to.

Invariant: who holds a lock holds that of the folder that has the name now; one that was finished
and renamed meanwhile is not what was asked for, and what another process makes under the name since
is its own.

Large files taken part by part: several are worked on at once, and come out in their order.

Invariant: memory holds a few parts, however large the file is.
"""

import errno
import fcntl
import json
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from offload.errors import ReadError, UserError, reason
from offload.machine import num_cores

_MAX_BYTES = 64 << 20  # the indexes of the largest models take some ten


def open_regular(path: Path) -> BinaryIO:
    """A file to read bytes from. Raises `OSError`, also for what is no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes to opens at once
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(fd, "rb")


def read_small(path: Path, most_bytes: int | None = None) -> str:
    """The whole text. Raises `OSError`, also where it is too large, and `ValueError` for other text
    than UTF-8.
    """
    with open_regular(path) as file:
        return read_all_of(file, most_bytes).decode("utf-8")


def read_given(path: Path, most_bytes: int | None = None) -> bytes:
    """All of a file that the user has named, which may be a pipe: one that nobody writes to is
    empty.

    Raises `OSError`, also for what would never end, or is too large.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = os.fstat(fd)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode) or os.isatty(fd)):
        os.close(fd)
        is_folder = stat.S_ISDIR(found.st_mode)
        why = os.strerror(errno.EISDIR) if is_folder else "it is neither a file nor a pipe"
        raise OSError(errno.EISDIR if is_folder else errno.EINVAL, why, str(path))
    os.set_blocking(fd, True)
    with os.fdopen(fd, "rb") as file:
        return read_all_of(file, most_bytes, found.st_size)


def read_all_of(file: BinaryIO, most_bytes: int | None = None, known_bytes: int = 0) -> bytes:
    """What is left of a file or pipe, of `known_bytes` at least. Raises `OSError`, also where it is
    too large.
    """
    most_bytes = _MAX_BYTES if most_bytes is None else most_bytes
    raw = file.read(most_bytes + 1) if known_bytes <= most_bytes else b""
    if max(len(raw), known_bytes) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20} MiB")
    return raw


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object. Raises what `read_small` raises of `OSError`, and `UserError` for any other
    content.
    """
    try:
        value = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({reason(error)}): {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object: {remedy}")
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write instead of this one: whoever reads sees the old one or the new one. Raises
    `OSError`.

    Its name is nobody else's: threads share a number of process, and so do programs in containers
    that share a folder.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Of this program, in the user's cache directory. Raises `UserError` for a user who has none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload"
    except RuntimeError:
        raise UserError("this user has no home folder: set XDG_CACHE_HOME to a folder") from None


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, locked. Raises `UserError` where another process writes to it, and
    `OSError`.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _is_taken(lock, folder):
            raise UserError(
                f"another process is writing to {folder}: wait for it, or take another name"
            )
        yield lock
    finally:
        os.close(lock)


@contextmanager
def locked_anew(folder: Path) -> Iterator[int]:
    """The same for one that is made if need be; an empty one does not stay where an `OSError` ends
    it.
    """
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


PART_BYTES = 8 << 20
_MAX_THREADS = 8
_Result = TypeVar("_Result")


def in_order(work: Callable[..., _Result], jobs: Iterable[tuple[Any, ...]]) -> Iterator[_Result]:
    """What `work` makes of each job, on as many threads as there are cores; it should hold no lock
    for long.
    """
    num_threads = min(_MAX_THREADS, num_cores())
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="offload-parts")
    pending = deque[Future[_Result]]()
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
    """Bytes [lo, hi), which do not stay in the page cache. Raises `ReadError` where the file ends
    before.
    """
    data = bytearray(hi - lo)
    view = memoryview(data)
    done = 0
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
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], lo + done)
    # of what is not yet written it begins the writing
    os.posix_fadvise(fd, lo, len(view), os.POSIX_FADV_DONTNEED)


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
