"""Files that are whole or not there: written beside their place and moved into it when they are done.

Why: a measurement may be ended at any moment, and half a result would be read as one. Invariant: whatever ends the
writing, neither a partial file nor a damaged older one stays behind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def partial_path(path: Path) -> Path:
    """Where `path` is written to until it is whole; it keeps its suffix, by which libraries tell formats."""
    return path.with_name(f".writing-{path.name}")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write to, which becomes `path` if the block ends well; folders are made. Raises `OSError`."""
    path = path.resolve()  # a link stays one, and what it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a pipe or a device takes what is written, and is not to be replaced
        yield path
        return
    partial = partial_path(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
