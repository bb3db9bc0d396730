"""The file that `--session` names: looked at before anything is loaded, gone on from, and written
again.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UserError

if TYPE_CHECKING:
    from offload.cli.console import Console
    from offload.engine.decoder import Decoder
    from offload.engine.generation import Run
    from offload.engine.request import Prompt

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def found_session(path: Path | None, ranks: str | None = None) -> Path | None:
    """Return the file where it is there already, else None.

    Raises `UserError` where none could be written, or not of many `ranks`.
    """
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


def begun_text(decoder: "Decoder", path: Path | None, prompt: "Prompt | None") -> "Prompt":
    """Return the prompt of a run whose text is kept in this file.

    Without a prompt it goes on where the file ends.
    """
    if path is None or not path.exists():
        return prompt or ""
    tokens, messages, _ = decoder.load_session(path)
    if messages is not None:
        what = f"{path} holds a conversation: go on with it by offload chat"
        raise UserError(f"{what}, or name another file")
    if not prompt and tokens[-1:] and tokens[-1] in decoder.end_ids:
        what = f"the text in {path} has come to its end: give a prompt"
        raise UserError(f"{what}, or name another file")
    return prompt or tokens


@contextmanager
def kept_text(
    decoder: "Decoder", run: "Run", path: Path | None, console: "Console"
) -> Iterator[None]:
    """Keep a run's text in this file, however the run ends.

    One without a new token leaves the file as it is.
    """
    try:
        yield
    finally:
        if path is not None and run.sequence.new_ids:
            with saving(console):
                decoder.save_session(path)


@contextmanager
def saving(console: "Console") -> Iterator[None]:
    """Have the live line tell of it, and let what would end the program wait until it is written."""
    came: list[int] = []

    def hear(number: int, _: object) -> None:
        came.append(number)

    before = {number: signal.signal(number, hear) for number in _HELD}
    try:
        console.wait("keeping the session")
        yield
    finally:
        console.clear()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for sent in came:
            signal.raise_signal(sent)
