"""Ctrl-C that waits where it would leave books half written: an exchange that is broken off cannot
be resumed.

And SIGTERM, which torchrun sends to all ranks as soon as one fails: rank 0 has more to say than
that it was ended.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

_LOSS_S = 2.0
_AGAIN_S = 0.05


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C within comes true at the end; may be nested. Only the main thread hears signals,
    others run as ever.
    """
    before = signal.getsignal(signal.SIGINT)
    heard = list[tuple[int, FrameType | None]]()
    if not callable(before):
        yield
        return
    try:
        with _heard_by(signal.SIGINT, lambda *which: heard.append(which)):
            yield
    finally:
        if heard:
            before(*heard[0])


@contextmanager
def terminated_later(find_loss: Callable[[], Exception | None], *, is_head: bool) -> Iterator[None]:
    """SIGTERM raises what rank 0 finds to be lost, where anything is within a moment; else it is
    what it was before.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not is_head:
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

    with _heard_by(signal.SIGTERM, hear):
        yield


def terminated_at_once() -> AbstractContextManager[None]:
    """SIGTERM ends the process in the middle of a call that may wait for minutes; there is nothing
    to be said yet.
    """
    is_heard = callable(signal.getsignal(signal.SIGTERM))
    return _heard_by(signal.SIGTERM, signal.SIG_DFL) if is_heard else nullcontext()


@contextmanager
def _heard_by(
    number: int, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """The signal within, where it can be heard: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _is_deleting(frame: FrameType | None) -> bool:
    """Whether Python is in a `__del__` there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
