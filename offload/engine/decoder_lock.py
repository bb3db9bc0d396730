"""Which thread may use a decoder.

Invariant: only the thread that has the turn touches caches, slots and readers.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from offload.errors import HostFault, UserError


class DecoderLock:
    """Gives the turn at a decoder to one thread, and within it to one step; others are refused.

    The thread that has it may take it again; only closing waits for it. `computing` is entered with
    every turn: where that thread is to compute.
    """

    def __init__(self, computing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._lock = threading.RLock()
        self._is_over = False
        self._computing = computing
        self._stepping: int | None = None  # the thread that a step is under way in

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the turn for a run. Raises `HostFault` where it is another thread's, or closed."""
        if not self._lock.acquire(blocking=False):
            raise HostFault(
                "this decoder is in use by another thread: wait until that is done, or load a "
                "second one"
            )
        try:
            self._require_no_own_step()
            if self._is_over:
                raise HostFault("this decoder was closed: load the model again")
            with self._computing():
                yield
        finally:
            self._lock.release()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Take the turn for one step, which nothing that it calls may disturb."""
        with self.taken():
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None

    @contextmanager
    def last(self) -> Iterator[None]:
        """Take the turn once another thread's step has ended; there is no other turn from now on."""
        self._require_no_own_step()
        self._is_over = True
        with self._lock:
            yield

    def _require_no_own_step(self) -> None:
        if self._stepping == threading.get_ident():
            raise UserError(
                "this decoder is in the middle of a step: let what that calls raise, to end it "
                "first"
            )
