"""Signals at safe moments: held back meanwhile, sent again later, and SIGTERM with a reason.

An exchange between ranks that is broken off cannot be resumed, so Ctrl-C waits for its end.
torchrun sends SIGTERM to all ranks as soon as one fails; rank 0 then reports which rank was lost.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType

_LOSS_S = 2.0
_AGAIN_S = 0.02


@contextmanager
def held_back(*numbers: int) -> Iterator[None]:
    """Let signals, by default Ctrl-C, wait for the end of the body; may be nested.

    Only the main thread receives signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in numbers or (signal.SIGINT,)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        # all of them, also behind one that raises
        with ExitStack() as stack:
            for number in reversed(came):
                stack.callback(signal.raise_signal, number)


def send_later(number: int) -> None:
    """Send this process a signal once more, when what cannot raise for it now is over."""
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    # an interpreter that ends makes no thread, and needs no signal to end
    with suppress(RuntimeError):
        again.start()


@contextmanager
def terminated_later(find_loss: Callable[[], Exception | None], *, is_head: bool) -> Iterator[None]:
    """Raise on SIGTERM the loss that rank 0 finds within a moment; else it does what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    if not is_head:
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        # within a `__del__` an exception would be ignored
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        if frame is not None:
            send_later(number)
            return
        due_s = time.monotonic() + _LOSS_S
        while (loss := find_loss()) is None and time.monotonic() < due_s:
            time.sleep(0.05)
        if loss is not None:
            raise loss
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(number)

    with heard_by(hear, signal.SIGTERM):
        yield


def terminated_at_once() -> AbstractContextManager[None]:
    """Let SIGTERM end the process within a call that may take minutes: there is nothing to tell yet."""
    is_heard = callable(signal.getsignal(signal.SIGTERM))
    return heard_by(signal.SIG_DFL, signal.SIGTERM) if is_heard else nullcontext()


@contextmanager
def heard_by(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
    *numbers: int,
) -> Iterator[None]:
    """Set the handler of signals within the body, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
