"""Ctrl-C that waits until a pass of all ranks is over; the second one ends the program at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on leaving, if there was one meanwhile. Elsewhere than in the main thread: nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual, came = signal.getsignal(signal.SIGINT), False

    def note(*_: Any) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        raise KeyboardInterrupt
