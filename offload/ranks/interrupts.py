"""Ctrl-C that waits until ranks agree again: an exchange or a message that is broken off cannot be resumed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C within comes true at the end; may be nested. Only the main thread hears signals, others run as ever."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    heard = list[tuple[int, FrameType | None]]()
    signal.signal(signal.SIGINT, lambda *which: heard.append(which))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            before(*heard[0])
