"""Ctrl-C that waits until ranks agree again: an exchange or a message that is broken off cannot be resumed.

And SIGTERM, which torchrun sends to all ranks as soon as one fails: rank 0 has more to say than that it was ended.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_LOSS_S, _AGAIN_S = 2.0, 0.05


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


@contextmanager
def terminated_later(find_loss: Callable[[], Exception | None], *, is_head: bool) -> Iterator[None]:
    """SIGTERM raises what rank 0 finds to be lost, where anything is within a moment; else it is what it was before."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not is_head:
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        if _is_deleting(frame):  # where an exception would be passed over
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        due_s = time.monotonic() + _LOSS_S
        while (loss := find_loss()) is None and time.monotonic() < due_s:
            time.sleep(0.05)
        if loss is not None:
            raise loss
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def terminated_at_once() -> Iterator[None]:
    """SIGTERM ends the process in the middle of a call that may wait for minutes; there is nothing to be said yet."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_deleting(frame: FrameType | None) -> bool:
    """Whether Python is in a `__del__` there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
