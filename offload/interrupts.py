"""Signals at safe moments: Ctrl-C after an exchange, and SIGTERM with a reason.

An exchange between ranks that is broken off cannot be resumed, so Ctrl-C waits for its end.
torchrun sends SIGTERM to all ranks as soon as one fails; rank 0 then reports which rank was lost.
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
    """Delay Ctrl-C within the body until its end; may be nested.

    Only the main thread receives signals; in others nothing changes.
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
        for one in heard:
            before(*one)


@contextmanager
def terminated_later(find_loss: Callable[[], Exception | None], *, is_head: bool) -> Iterator[None]:
    """Raise the loss that rank 0 finds when SIGTERM comes, if it finds one within a moment.

    Otherwise SIGTERM does what it did before.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not is_head:
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        # within a `__del__` an exception would be ignored
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        if frame is not None:
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
    """Let SIGTERM end the process in the middle of a call that may wait for minutes.

    At that point there is nothing to report yet.
    """
    is_heard = callable(signal.getsignal(signal.SIGTERM))
    return _heard_by(signal.SIGTERM, signal.SIG_DFL) if is_heard else nullcontext()


@contextmanager
def _heard_by(
    number: int, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Set a signal's handler within the body, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
