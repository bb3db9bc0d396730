"""Small files of strangers, such as config.json: what is no regular file would hang, or never end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_MAX_BYTES = 64 << 20  # the indexes of the largest models take some ten


def open_regular(path: Path) -> BinaryIO:
    """A file to read bytes from. Raises `OSError`, also for what is no regular file."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # does not wait for a pipe
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_small(path: Path) -> str:
    """The whole text. Raises `OSError`, also where it is too large, and `ValueError` for other text than UTF-8."""
    with open_regular(path) as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MAX_BYTES >> 20} MiB", str(path))
    return raw.decode("utf-8")
