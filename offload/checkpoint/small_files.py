"""Small files of strangers, such as config.json: what is no regular file would hang, or never end; and ours."""

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from offload.errors import UserError, reason

_MAX_BYTES = 64 << 20  # the indexes of the largest models take some ten


def open_regular(path: Path) -> BinaryIO:
    """A file to read bytes from. Raises `OSError`, also for what is no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes to opens at once
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(fd, "rb")


def read_small(path: Path, most_bytes: int | None = None) -> str:
    """The whole text. Raises `OSError`, also where it is too large, and `ValueError` for other text than UTF-8."""
    with open_regular(path) as file:
        return read_all_of(file, most_bytes).decode("utf-8")


def read_given(path: Path, most_bytes: int | None = None) -> bytes:
    """All of a file that the user has named, which may be a pipe: one that nobody writes to is empty.

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
    """What is left of a file or pipe, of `known_bytes` at least. Raises `OSError`, also where it is too large."""
    most_bytes = _MAX_BYTES if most_bytes is None else most_bytes
    raw = file.read(most_bytes + 1) if known_bytes <= most_bytes else b""
    if max(len(raw), known_bytes) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20} MiB")
    return raw


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object. Raises what `read_small` raises of `OSError`, and `UserError` for any other content."""
    try:
        value = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({reason(error)}): {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object: {remedy}")
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write instead of this one: whoever reads sees the old one or the new one. Raises `OSError`.

    Its name is nobody else's: threads share a number of process, and so do programs in containers that share a folder.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
