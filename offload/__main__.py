"""The command `offload`, and `python -m offload`: standard streams are open, and no signal is lost.

Both must hold before anything else is imported, so this file imports only what loads at once.
"""

import io
import os
import signal
import sys
from types import FrameType
from typing import Any

from offload.interrupts import send_later

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # file descriptors
# both raise exceptions, so that a session is still written and the terminal echoes again
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the `offload` command."""
    _open_closed_streams()
    sys.stdout = _buffered(sys.stdout)
    sys.unraisablehook = _unraisable
    for number in _ENDINGS:
        # SIGINT is ignored in the background of a shell, and some signals under `nohup`
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)
    try:
        from offload.commands import main as run

        run()
    except KeyboardInterrupt:  # pressed just before `run` caught it, or just after
        os._exit(128 + signal.SIGINT)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that `>&-` closed, lest another file get its number.

    Writing to a closed standard output still fails, as on a full disk: that is what `>&-` asks for.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _buffered(stdout: Any) -> Any:
    """Return the stream with a buffer that remembers a failed write and encodes any character.

    The buffer is C code: in a `write` in Python, Ctrl-C would lose text or write it twice.
    """
    if isinstance(stdout.buffer, io.RawIOBase):  # `python -u`
        whole = io.BufferedWriter(io.FileIO(stdout.fileno(), "w", closefd=False))
        return io.TextIOWrapper(whole, stdout.encoding, "replace", line_buffering=True)
    stdout.reconfigure(errors="replace")
    return stdout


def _end(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt` or `SystemExit`, but only after an import: it may swallow them."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            send_later(number)
            return
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal again if it arrived within a destructor, which no exception can leave."""
    if unraisable.exc_type is KeyboardInterrupt:
        send_later(signal.SIGINT)
    elif isinstance(unraisable.exc_value, SystemExit) and isinstance(
        unraisable.exc_value.code, int
    ):
        send_later(unraisable.exc_value.code - 128)
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
