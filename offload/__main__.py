"""The command `offload`, and `python -m offload`: standard streams that are there, and a Ctrl-C that is never lost.

Both must hold before anything else is imported, so this file imports nothing that takes time.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from offload.errors import OutputError

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor
_ASK_AGAIN_S = 0.02


def main() -> None:
    """Entry point of the `offload` command."""
    _open_closed_streams()
    sys.stdout = _told_apart(sys.stdout)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in the background of a shell
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
    try:
        from offload.cli.main import main as run

        run()
    except KeyboardInterrupt:  # before `run` could, or after
        os._exit(128 + signal.SIGINT)


def _open_closed_streams() -> None:
    """Nothing in place of what `>&-` closed, lest the next file to be opened take its number."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class _Output(io.TextIOWrapper):
    """Standard output, whose failures must not be taken for those of another file.

    Above the buffer, not below: Ctrl-C in a raw write of Python's would have the buffer write everything once more.
    """

    def write(self, text: str) -> int:
        with _marked():
            return super().write(text)

    def flush(self) -> None:
        with _marked():
            super().flush()


@contextmanager
def _marked() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from None


def _told_apart(stdout: Any) -> _Output:
    """The same stream, whose failures are `OutputError`, and none of them a letter that its encoding lacks."""
    how = {"line_buffering": stdout.line_buffering, "write_through": stdout.write_through}
    encoding = stdout.encoding
    return _Output(stdout.detach(), encoding, "replace", **how)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C, but not within an import: what is half imported takes it for an error of its own, or swallows it."""
    if not _is_importing(frame):
        raise KeyboardInterrupt
    _interrupt_later()


def _unraisable(what: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C within a destructor, which no exception leaves."""
    if what.exc_type is KeyboardInterrupt:
        _interrupt_later()
    else:
        sys.__unraisablehook__(what)


def _interrupt_later() -> None:
    again = threading.Timer(_ASK_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main()
