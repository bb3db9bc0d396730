"""Checksums that the hub's library leaves beside what it downloads.

In its cache a file is a link to one named by its sum; in a folder of its own each has a note in
`.cache`. Large files have a sha256, small ones the sum that git has for them. Invariant: a file in a
folder of its own is not judged once it was written to since.
"""

import hashlib
import os
import re
from pathlib import Path

from offload.checkpoint.files import open_regular, read_small

_NOTES = Path(".cache", "huggingface", "download")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")


_LARGEST_BYTES = 64 << 20  # of small files, which are read at once


def hub_sum(path: Path) -> str | None:
    """Return the checksum that a file should have, or None where it is unknown.

    It is a sha256 (64 characters) or git's (40).
    """
    real = path.resolve()
    name = real.name if real.parent.name == "blobs" else _noted(path)
    return name if name and (_SHA256.fullmatch(name) or _GIT.fullmatch(name)) else None


def is_sha256(found: str | None) -> bool:
    """Return whether a checksum is the sha256 of the file's bytes alone."""
    return found is not None and len(found) == 64


def changed_small_files(folder: Path, weights: set[str]) -> tuple[list[str], list[str]]:
    """Return names of small files that differ from the hub's, and of unreadable ones, with why."""
    changed = list[str]()
    unread = list[str]()
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
    """Return whether a file is as the hub has it, too large to look at, or unknown to the hub.

    Raises `OSError`.
    """
    wanted = hub_sum(path)
    if wanted is None or path.stat().st_size > _LARGEST_BYTES:
        return True
    with open_regular(path) as file:
        raw = file.read(_LARGEST_BYTES)
    found = (
        hashlib.sha256(raw) if is_sha256(wanted) else hashlib.sha1(b"blob %d\0" % len(raw) + raw)
    )
    return found.hexdigest() == wanted


def _noted(path: Path) -> str | None:
    """Return the checksum in a download's note: the second of revision, checksum, time."""
    try:
        _, etag, then_s, *_ = read_small(path.parent / _NOTES / f"{path.name}.metadata").split("\n")
        return etag.strip().strip('"') if path.stat().st_mtime - 1 <= float(then_s) else None
    except (OSError, ValueError):
        return None
