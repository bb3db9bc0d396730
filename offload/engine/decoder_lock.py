"""Which thread may use a decoder.

Invariant: only the thread that has the turn touches caches, slots and readers.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from offload.errors import HostFault, UserError


class DecoderLock:
    """Gives one thread the turn at a decoder, and one step at a time within it; others are refused.

    The thread that has the turn may take it again; only closing waits for it. `computing` is
    entered with every turn, and makes that thread compute in the right place.
    """

    def __init__(self, computing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._lock = threading.RLock()
        self._is_over = False
        self._computing = computing
        self._stepping: int | None = None  # the thread that runs a step

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the turn for a run. Raises `HostFault` if another thread has it, or it is closed."""
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
        """Take the turn for one step, which none of its callbacks may disturb."""
        with self.taken():
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None

    @contextmanager
    def last(self) -> Iterator[None]:
        """Take the turn once another thread's step has ended; no later turn is possible."""
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
