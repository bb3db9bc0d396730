"""What the hub says that files of a model should be: checksums that its library leaves beside downloads.

In its cache a file is a link to one named by its sum; in a folder of its own each has a note in `.cache`. Large files
have a sha256, small ones the sum that git has for them. Invariant: a file in a folder of its own is not judged once it
was written to since; in the cache nobody should write, and all are.
"""

import hashlib
import os
import re
from pathlib import Path

from offload.checkpoint.small_files import open_regular, read_small

_NOTES = Path(".cache", "huggingface", "download")
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_LARGEST_BYTES = 64 << 20  # of what is read at once


def hub_sum(path: Path) -> str | None:
    """The sum that a file should have: 64 characters of a sha256, 40 of git's; None where nobody knows."""
    real = path.resolve()
    name = real.name if real.parent.name == "blobs" else _noted(path)
    return name if name and (_SHA256.fullmatch(name) or _GIT.fullmatch(name)) else None


def is_sha256(found: str | None) -> bool:
    """Whether a sum is one of the whole file's bytes alone."""
    return found is not None and len(found) == 64


def changed_small_files(folder: Path, weights: set[str]) -> tuple[list[str], list[str]]:
    """Names of configs and the like that are not what the hub has, and of those that cannot be read, with why."""
    changed, unread = list[str](), list[str]()
    try:
        for path in (folder / name for name in sorted(os.listdir(folder)) if name not in weights):
            try:
                if os.path.isfile(path) and not _is_as_hub(path):
                    changed.append(path.name)
            except OSError as error:
                unread.append(f"{path.name} ({error.strerror})")
    except OSError as error:
        unread.append(f"{folder} ({error.strerror})")
    return changed, unread


def _is_as_hub(path: Path) -> bool:
    """Or too large to be looked at, or unknown to the hub. Raises `OSError`."""
    wanted = hub_sum(path)
    if wanted is None or path.stat().st_size > _LARGEST_BYTES:
        return True
    with open_regular(path) as file:
        raw = file.read(_LARGEST_BYTES)
    found = hashlib.sha256(raw) if is_sha256(wanted) else hashlib.sha1(b"blob %d\0" % len(raw) + raw)
    return found.hexdigest() == wanted


def _noted(path: Path) -> str | None:
    """The second of three lines: revision, sum, time of the download."""
    try:
        _, etag, then_s, *_ = read_small(path.parent / _NOTES / f"{path.name}.metadata").split("\n")
        return etag.strip().strip('"') if path.stat().st_mtime - 1 <= float(then_s) else None
    except (OSError, ValueError):
        return None
