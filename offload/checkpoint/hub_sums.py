"""What the hub says that files of a model should be: checksums that its library leaves beside downloads.

In its cache a file is a link to one named by its sum; in a folder of its own each has a note in `.cache`. Large files
have a sha256, small ones the sum that git has for them. Invariant: a file that was written to since is not judged.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from offload.checkpoint.small_files import read_small

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


def changed_small_files(folder: Path, weights: set[str]) -> Iterator[str]:
    """Names of configs, tokenizers and the like that are not what the hub has. Raises `OSError`."""
    for path in sorted(folder.iterdir()):
        if path.name in weights or not os.path.isfile(path) or path.stat().st_size > _LARGEST_BYTES:
            continue
        wanted = hub_sum(path)
        if wanted is None:
            continue
        raw = path.read_bytes()
        found = hashlib.sha256(raw) if is_sha256(wanted) else hashlib.sha1(b"blob %d\0" % len(raw) + raw)
        if found.hexdigest() != wanted:
            yield path.name


def _noted(path: Path) -> str | None:
    """The second of three lines: revision, sum, time of the download."""
    try:
        _, etag, then_s, *_ = read_small(path.parent / _NOTES / f"{path.name}.metadata").split("\n")
        return etag.strip().strip('"') if path.stat().st_mtime - 1 <= float(then_s) else None
    except (OSError, ValueError):
        return None
