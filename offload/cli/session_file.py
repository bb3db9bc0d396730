"""The file that `--session` names: looked at before anything is loaded, and written."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UserError
from offload.interrupts import held_back

if TYPE_CHECKING:
    from offload.cli.console import Console


def found_session(path: Path | None, ranks: str | None = None) -> Path | None:
    """Return the file if it is there, else None. Raises `UserError` where it could not be written."""
    if path is None:
        return None
    if ranks is not None:
        rule = "`session` keeps what one process has computed"
        raise UserError(f"{rule}, got `ranks` {ranks}: leave one of them out")
    folder = path.absolute().parent
    what = ""
    if path.is_dir():
        what = "it is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        what = f"{folder} is no folder that can be written to"
    if what:
        raise UserError(f"cannot keep a session in {path} ({what}): name another file")
    return path if path.exists() else None


@contextmanager
def saving(console: "Console") -> Iterator[None]:
    """Have the live line tell of it, and let what would end the program wait until it is written."""
    with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        try:
            console.wait("keeping the session")
            yield
        finally:
            console.clear()
