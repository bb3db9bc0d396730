"""What a caller holds of a request that an engine has taken: pieces as they come, the result, and the way out.

The engine's side of it is a `Job`, which lives as long as the engine needs it; a `Ticket` that nobody holds any more
cancels its job. Invariant: a job ends exactly once, and whoever waits for it is told; what is handed out in order is
never lost, though a slow reader gets fewer and longer pieces.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from offload.engine.generation import Generation
from offload.engine.logprobs import TokenLogprob
from offload.engine.request import Request
from offload.engine.sequence import PassFigures
from offload.errors import RunError

MOST_PIECES = 64  # that wait for a reader; more become part of the last one


class Cancelled(RunError):  # noqa: N818
    """The request was cancelled before it had written anything."""


class Piece(NamedTuple):
    """What a text has gained by a pass, or by several where nobody came for it."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # of these tokens, where the request asks for them
    last_pass: PassFigures | None  # of the last one; None where several passes are put together


class Asked(NamedTuple):
    """A request, and what a run of it is to be started with."""

    request: Request
    tree: str | None = None
    rule: str | None = None


class Job:
    """A request from the engine's side. `cancel` takes no lock, so that a collector of garbage may call it."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.is_cancelled, self.is_done = asked, False, False
        self.submitted_s = time.monotonic()
        self.result: Generation | None = None
        self.error: BaseException | None = None
        self.changed, self._pieces = threading.Condition(), deque[Piece]()
        self._heard: Callable[[], None] | None = None

    def cancel(self) -> None:
        """It ends before the next pass, with what it has by then."""
        self.is_cancelled = True

    def hand_out(self, piece: Piece) -> None:
        """One more piece, for whoever holds the ticket."""
        with self.changed:
            if len(self._pieces) < MOST_PIECES:
                self._pieces.append(piece)
            else:
                self._pieces.append(_joined(self._pieces.pop(), piece))
        self._tell()

    def end(self, result: Generation | None, error: BaseException | None = None) -> None:
        """Nothing more comes; a second end changes nothing."""
        with self.changed:
            if not self.is_done:
                self.result, self.error, self.is_done = result, error, True
        self._tell()

    def take(self) -> list[Piece]:
        """What has come and was not taken yet."""
        with self.changed:
            pieces = list(self._pieces)
            self._pieces.clear()
            return pieces

    def listen(self, heard: Callable[[], None] | None) -> None:
        """Call this whenever something has come, from the engine's thread, and now."""
        self._heard = heard
        if heard is not None:
            heard()

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()
        if (heard := self._heard) is not None:
            heard()


class Ticket:
    """Iterate for pieces as they come; `result` waits for the end. Dropping it cancels the request.

    Errors that end the request are raised by iterating, behind the last piece, and by `result`: `UserError` for what
    the user can mend, `RunError` where something failed under way. A request that was cancelled has the finish reason
    `interrupted`, or if it had not begun `Cancelled` is raised.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __del__(self) -> None:  # no `weakref.finalize`, which would keep the job, its error, and what that passed by
        self._job.cancel()

    def __repr__(self) -> str:
        state = "done" if self.is_done else "cancelled" if self._job.is_cancelled else "under way"
        return f"Ticket({state})"

    def __iter__(self) -> Iterator[Piece]:
        while True:
            with self._job.changed:
                is_done, pieces = self.is_done, self.take()
                if not is_done and not pieces:
                    self._job.changed.wait()
            yield from pieces
            if is_done:
                break
        self._raise()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come; pieces may still wait to be taken."""
        return self._job.is_done

    def take(self) -> list[Piece]:
        """What has come by now and was not taken yet, without waiting."""
        return self._job.take()

    def listen(self, heard: Callable[[], None] | None) -> None:
        """For who cannot wait: this is called whenever something has come, from another thread, and once at once."""
        self._job.listen(heard)

    def cancel(self) -> None:
        """It ends before the next pass; nothing happens if it has ended already."""
        self._job.cancel()

    def result(self, timeout_s: float | None = None) -> Generation:
        """Wait for the end. Raises what ended it, and `TimeoutError`."""
        with self._job.changed:
            if not self._job.changed.wait_for(lambda: self.is_done, timeout_s):
                raise TimeoutError(f"the request is still under way after {timeout_s:g} s")
        self._raise()
        assert self._job.result is not None, "it ended without an error"
        return self._job.result

    def _raise(self) -> None:
        if self._job.error is not None:
            raise self._job.error


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        first.text + second.text, first.token_ids + second.token_ids, first.logprobs + second.logprobs, None
    )  # fmt: skip
