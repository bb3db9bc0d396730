"""Files on disk: small files that may be hostile, locked folders, and large files read in parts.

A small file such as config.json may be a pipe that never ends, so only regular files are opened,
and only up to a limit. Invariant: memory holds a few parts of a large file; and a lock holds only
while its folder keeps the requested name. A folder that another process finishes and renames
meanwhile is not locked, and a new folder under the old name is not removed.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from offload.encoding.base import AGAIN
from offload.errors import (
    ReadError,
    UserError,
    os_errors_as_user_error,
    reason,
    system_reason,
)
from offload.interrupts import held_back
from offload.machine import num_cores
from offload.units import format_bytes

PART_BYTES = 8 << 20
_MARGIN_BYTES = 64 << 20  # headers, small files, and the file system's own blocks
# suffix of what this program leaves in folders of models
INFLATED = "inflation.json"  # in folders of `inflate`
SUMS = "offload_sums.json"  # in folders that `offload verify` was asked about
MANIFEST = "offload_pack.json"  # in folders of `offload pack`
_MAX_BYTES = 64 << 20  # the indexes of the largest models have about 10 MiB
_MAX_THREADS = 8
_CACHED = "models--"  # prefix of folder names in the hub's cache
_SCRATCH_NAME = re.compile(r"\..+\.\d+-[0-9a-f]{8}")
_Result = TypeVar("_Result")
Progress = Callable[[int, int], object]  # called with the bytes done and the bytes in all


class Stamp(NamedTuple):
    """Identifies the content of a file: it differs once the file was replaced or written to."""

    device: int
    inode: int
    num_bytes: int
    written_ns: int
    # Archives set the modification time; only the system sets this one.
    changed_ns: int

    @classmethod
    def from_file(cls, file: int | Path) -> "Stamp":
        """Return the stamp of a file, open or by its path, as it is now. Raises `OSError`."""
        status = os.stat(file)
        times_ns = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times_ns)


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file, or None if it cannot be read."""
    try:
        return Stamp.from_file(path)
    except OSError:
        return None


def readable(path: Path) -> AbstractContextManager[None]:
    """Raise `UserError` for a file that the body may not read."""
    return os_errors_as_user_error(
        f"cannot read {path}", "check that it is a file and yours to read"
    )


def require_visible(path: Path) -> None:
    """Raise `UserError` for a folder that this user may not enter, or one above it."""
    for folder in (*reversed(path.absolute().parents), path):
        wanted = os.X_OK | (os.R_OK if folder == path else 0)
        if os.path.isdir(folder) and not os.access(folder, wanted):
            complaint = f"{folder} may not be looked into by this user"
            raise UserError(
                f"{complaint}: let it read the folder (chmod, chown), or run as another user"
            )


def require_writable(path: Path, remedy: str) -> None:
    """Raise `UserError` for a file that could not be written, before hours of work for it."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path} ({folder} may not be written to): {remedy}")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read bytes from. Raises `OSError`, also for anything but a regular file."""
    # without O_NONBLOCK, opening a pipe would wait for a writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(fd, "rb")


def read_small(path: Path, most_bytes: int | None = None) -> str:
    """Return the text of a small file. Raises `OSError`, also for large ones, and `ValueError`."""
    with open_regular(path) as file:
        return read_all_of(file, most_bytes).decode("utf-8")


def read_given(path: Path, most_bytes: int | None = None) -> bytes:
    """Return all bytes of a file or pipe; one without a writer is empty. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode) or os.isatty(fd)):
        os.close(fd)
        is_folder = stat.S_ISDIR(status.st_mode)
        why = os.strerror(errno.EISDIR) if is_folder else "it is neither a file nor a pipe"
        raise OSError(errno.EISDIR if is_folder else errno.EINVAL, why, str(path))
    os.set_blocking(fd, True)
    with os.fdopen(fd, "rb") as file:
        return read_all_of(file, most_bytes, status.st_size)


def read_all_of(file: BinaryIO, most_bytes: int | None = None, known_bytes: int = 0) -> bytes:
    """Return the rest of a file or pipe. Raises `OSError`, also for more than `most_bytes`."""
    most_bytes = _MAX_BYTES if most_bytes is None else most_bytes
    raw = file.read(most_bytes + 1) if known_bytes <= most_bytes else b""
    if max(len(raw), known_bytes) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20} MiB")
    return raw


def read_text(path: Path, subject: str, most_bytes: int | None = None) -> str:
    """Return the text of a file or pipe, called `what` in messages. Raises `UserError`."""
    with os_errors_as_user_error(f"cannot read {subject} from {path}", "check the path"):
        raw = read_given(path, most_bytes)
    return text_of(raw, subject, path)


def text_of(raw: bytes, subject: str, source: object) -> str:
    """Return the text of bytes read from `source`. Raises `UserError` unless it is UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        requirement = f"{subject} must be UTF-8, {source} is not at byte {error.start}"
        raise UserError(f"{requirement}: convert it first") from None


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `OSError`, and `UserError` for other content."""
    try:
        value = json.loads(read_small(path), parse_constant=_constant)
    except _NotANumberError:
        # the file was published so, and another download would bring the same
        mend = "write a number in its place, or leave the entry out"
        raise UserError(f"{path} is not valid JSON (NaN is no number): {mend}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({reason(error)}): {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object: {remedy}")
    return value


class _NotANumberError(ValueError):
    """NaN in a JSON file."""


def _constant(name: str) -> float:
    """Return an infinity, which configs use as limits. Raises `_NotANumberError` for NaN."""
    if name == "NaN":
        raise _NotANumberError
    return float(name)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `UserError` when it is missing or something else."""
    with readable(path):
        try:
            return read_object(path, AGAIN)
        except FileNotFoundError:
            complaint = f"no {path.name} in {path.parent}"
            raise UserError(f"{complaint}: give the folder of a Hugging Face model") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a scratch path that replaces `path` when the body ends. Raises `OSError`.

    A reader sees either the old file or the new one. The scratch name is random because threads
    share a process number, and so do containers that share a folder.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def is_scratch(path: Path) -> bool:
    """Return True if `replacing` made this file and was killed before renaming it."""
    return _SCRATCH_NAME.fullmatch(path.name) is not None


def write_whole(path: Path, text: str) -> None:
    """Write a text, whole or not at all, into a folder that is made if need be. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as `write_whole` does. Raises `OSError`."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def is_free(path: Path) -> bool:
    """Return True if a new folder can have this name: nothing is there, or an empty folder."""
    is_folder = path.is_dir() and path.name != "" and not path.is_symlink()
    return not os.path.lexists(path) or (is_folder and not any(path.iterdir()))


def cache_folder() -> Path:
    """Return this program's folder in the user's cache. Raises `UserError` without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload"
    except RuntimeError:
        raise UserError("this user has no home folder: set XDG_CACHE_HOME to a folder") from None


def hub_id_of(commit: Path) -> str | None:
    """Return the hub id that a folder of the hub's cache is a commit of; None for other folders."""
    repo = commit.parent.parent
    is_cached = commit.parent.name == "snapshots" and repo.name.startswith(_CACHED)
    return repo.name.removeprefix(_CACHED).replace("--", "/", 1) if is_cached else None


def name_of_folder(folder: Path) -> str:
    """Return the name of a model's folder in lines for users; the hub's cache has hashes there."""
    path = Path(os.path.abspath(folder))
    return hub_id_of(path) or path.name


class BusyError(UserError):
    """Another process writes to a folder."""


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a folder, yield its descriptor. Raises `OSError`, `UserError` if another process has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock), os.stat(folder))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            remedy = "wait for it, or take another name"
            raise BusyError(f"another process is writing to {folder}: {remedy}")
        yield lock
    finally:
        os.close(lock)


@contextmanager
def locked_anew(folder: Path) -> Iterator[int]:
    """Lock a folder, created if missing; an `OSError` in the body removes it if it is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = None
        try:
            lock = stack.enter_context(locked(folder))
            yield lock
        except OSError:
            with suppress(OSError):  # it was removed already, or has content
                if lock is None or os.path.samestat(os.fstat(lock), os.stat(folder)):
                    folder.rmdir()
            raise


@contextmanager
def publish_atomically(destination: Path, scratch: Path) -> Iterator[Path]:
    """Yield an empty, locked folder: `destination` when the body succeeds, else removed."""
    with ExitStack() as held:
        is_ours = False
        try:
            # otherwise Ctrl-C could leave an unlocked folder behind
            with held_back():
                held.enter_context(locked_anew(scratch))
                is_ours = True
            for leftover in scratch.iterdir():
                leftover.unlink()
            yield scratch
            scratch.replace(destination)
        except BaseException:
            if is_ours:
                shutil.rmtree(scratch)
            raise


def in_order(
    work: Callable[..., _Result], jobs: Iterable[tuple[Any, ...]], num_waiting: int = 0
) -> Generator[_Result]:
    """Yield `work(*job)` for each job, in order; it should not hold Python's lock.

    Jobs begin in order, on one thread for each core and `num_waiting` more, since some wait for a
    disk while others compute.
    """
    from concurrent.futures import Future, ThreadPoolExecutor  # `--help` reads no large file

    num_threads = min(_MAX_THREADS, num_cores()) + num_waiting
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
    """Return bytes [lo, hi), and drop them from the page cache. Raises `ReadError`."""
    data = bytearray(hi - lo)
    read_into(fd, memoryview(data), lo, len(data))
    os.posix_fadvise(fd, lo, hi - lo, os.POSIX_FADV_DONTNEED)
    return data


def read_into(fd: int, view: memoryview, lo: int, least_bytes: int) -> None:
    """Read bytes from `lo` on, at least this many. Raises `ReadError`."""
    done = 0
    while done < least_bytes:
        try:
            count = os.preadv(fd, [view[done:]], lo + done)
        except OSError as error:
            raise ReadError(
                f"reading failed at byte {lo + done}: {system_reason(error)}"
            ) from error
        if not count:
            raise ReadError(f"a file ends at byte {lo + done}: it was cut short while in use")
        done += count


def write_part(fd: int, data: Any, lo: int) -> None:
    """Write a whole buffer at `lo` and start writing it back to the disk. Raises `OSError`."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], lo + done)
    # starts the writing of pages that are still dirty
    os.posix_fadvise(fd, lo, len(view), os.POSIX_FADV_DONTNEED)


def counter(total_bytes: int, progress: Progress) -> Callable[[int], None]:
    """Return a function that adds up the bytes of pieces and reports the sum."""
    done_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(done_bytes, total_bytes)

    return count


def require_disk(folder: Path, needed_bytes: int, subject: str, remedy: str) -> None:
    """Raise `UserError` where a folder's disk lacks room for `needed_bytes` and some spare."""
    needed_bytes += _MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        has = f"{folder.parent} has {format_bytes(free_bytes)}"
        raise UserError(f"{subject} {format_bytes(needed_bytes)} more of disk, {has}: {remedy}")


def parts(lo: int, hi: int, part_bytes: int = PART_BYTES) -> Iterator[tuple[int, int]]:
    """Yield the parts of at most this many bytes that make up [lo, hi)."""
    for at in range(lo, hi, part_bytes):
        yield at, min(at + part_bytes, hi)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, readable by all if new, and yield its descriptor. Raises `OSError`."""
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
