"""Whose turn it is at a decoder: one thread's at a time, and within it one step's.

Invariant: caches, slots and readers are touched by whoever has the turn alone. Nobody waits for it but who closes.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from offload.errors import UserError


class Turn:
    """Had by the thread that uses a decoder, as often as it likes; others are refused meanwhile.

    `computing` is entered with every turn: where that thread is to compute.
    """

    def __init__(self, computing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._lock, self._is_over, self._computing = threading.RLock(), False, computing
        self._stepping: int | None = None  # the thread that a step is under way in

    @contextmanager
    def held(self) -> Iterator[None]:
        """For a run, or a part of one. Raises `UserError` where another thread has it, or nobody can any more."""
        if not self._lock.acquire(blocking=False):
            raise UserError("this decoder is in use by another thread: wait until that is done, or load a second one")
        try:
            self._require_no_own_step()
            if self._is_over:
                raise UserError("this decoder was closed: load the model again")
            with self._computing():
                yield
        finally:
            self._lock.release()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """For one step, which nothing that it calls may disturb."""
        with self.held():
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None

    @contextmanager
    def last(self) -> Iterator[None]:
        """When another thread's step has ended; nobody gets a turn from now on."""
        self._require_no_own_step()
        self._is_over = True
        with self._lock:
            yield

    def _require_no_own_step(self) -> None:
        if self._stepping == threading.get_ident():
            raise UserError("this decoder is in the middle of a step: let what that calls raise, to end it first")
