"""One request that others wait for: pieces as they come, the result, and the way out.

A scheduler has a `Job` as long as it needs it; who has asked holds a `Ticket`, and one that is
dropped cancels its job. Invariant: a job ends exactly once, and all who wait for it are told; what
is handed out in order is never lost, though a slow reader gets fewer and longer pieces.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.engine.sequence import PassFigures, TokenLogprob
from offload.errors import RunError

MOST_PIECES = 64  # pieces that wait for a reader; further ones become part of the last


class Cancelled(RunError):  # noqa: N818
    """The request was cancelled before it had written anything."""


class TextPiece(NamedTuple):
    """What a text has gained by a pass, or by several where it was not fetched in between."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # of these tokens, where the request asks for them
    last_pass: PassFigures | None  # of the last one; None where several passes are put together

    def joined(self, other: "TextPiece") -> "TextPiece":
        """Return this piece with the one behind it."""
        return TextPiece(
            self.text + other.text,
            self.token_ids + other.token_ids,
            self.logprobs + other.logprobs,
            None,
        )


@dataclass(eq=False, repr=False)
class Job:
    """A request, and what has become of it."""

    request: Request
    run: Run | None = None  # while it is being written
    result: Generation | None = None  # this or an error, once it has ended
    error: BaseException | None = None
    is_cancelled: bool = False
    is_done: bool = False
    submitted_s: float = field(default_factory=time.monotonic)
    # is held to look at a job, and told whenever something has come
    changed: threading.Condition = field(default_factory=threading.Condition)
    _pieces: deque[TextPiece] = field(default_factory=deque)
    _heard: Callable[[], None] | None = None

    def cancel(self) -> None:
        """End before the next pass; without a lock, so that a collector of garbage may call it."""
        self.is_cancelled = True

    def hand_out(self, piece: TextPiece) -> None:
        """Hand out one more piece to the holder of the ticket."""
        with self.changed:
            if len(self._pieces) == MOST_PIECES:
                piece = self._pieces.pop().joined(piece)
            self._pieces.append(piece)
        self._tell()

    def end(self, result: Generation | None, error: BaseException | None = None) -> None:
        """Tell that nothing more comes; a second end changes nothing."""
        with self.changed:
            if not self.is_done:
                self.result = result
                self.error = error
                self.is_done = True
        self._tell()

    def take(self) -> list[TextPiece]:
        """Return what has come by now and was not taken yet, without waiting."""
        with self.changed:
            pieces = list(self._pieces)
            self._pieces.clear()
            return pieces

    def listen(self, heard: Callable[[], None] | None) -> None:
        """Call this from the scheduler's thread whenever something has come, and now."""
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

    Errors that end the request are raised by iterating, behind the last piece, and by `result`:
    `UserError`, or `RunError` where something failed under way. A cancelled request ends
    `interrupted`, or if it had not begun with `Cancelled`.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    # no `weakref.finalize`, which would keep the job, its error, and what that passed by
    def __del__(self) -> None:
        self._job.cancel()

    def __repr__(self) -> str:
        state = "done" if self.is_done else "cancelled" if self._job.is_cancelled else "under way"
        return f"Ticket({state})"

    def take(self) -> list[TextPiece]:
        """Return what has come by now and was not taken yet, without waiting."""
        return self._job.take()

    def listen(self, heard: Callable[[], None] | None) -> None:
        """Call this from another thread whenever something has come, and once at once."""
        self._job.listen(heard)

    def cancel(self) -> None:
        """End the request before the next pass; nothing happens if it has ended already."""
        self._job.cancel()

    def __iter__(self) -> Iterator[TextPiece]:
        while True:
            with self._job.changed:
                is_done = self.is_done
                pieces = self.take()
                if not is_done and not pieces:
                    self._job.changed.wait()
            yield from pieces
            if is_done:
                break
        self._raise()

    @property
    def is_done(self) -> bool:
        """Return whether nothing more will come; pieces may still wait to be taken."""
        return self._job.is_done

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
