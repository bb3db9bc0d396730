"""One request that others wait for: pieces as they come, the result, and the way out.

The caller holds the `Job`, its scheduler only a weak reference: a job that is dropped is cancelled.
Invariant: a job ends exactly once, and everyone who waits for it is notified. No piece is lost,
though a slow reader gets fewer and longer ones.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.engine.generation import Generation, OutputDelta
from offload.engine.request import Request
from offload.engine.scoring import PromptScore, Scorer, ScoreRequest
from offload.errors import RunError

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder

MOST_PIECES = 64  # pieces kept for a reader; later ones are joined to the last


class Cancelled(RunError):  # noqa: N818
    """The request was cancelled before its text was complete."""


@dataclass(eq=False, repr=False)
class Job:
    """Iterate for pieces as they come; `result` waits for the end. Dropping it cancels the request.

    Errors that end the request are raised by iterating, behind the last piece, and by `result`:
    `UserError`, or `RunError` where something failed under way. A cancelled request ends
    `interrupted`, or with `Cancelled` if it had not begun. Any thread may call any method.
    """

    request: Request
    outcome: Generation | BaseException | None = None  # error that ended it, or None
    is_cancelled: bool = False
    # scores of its prompt, before the first piece, if the request asks for them
    prompt_score: PromptScore | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    # guards pieces and outcome; notified when something has come
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _pieces: deque[OutputDelta] = field(default_factory=deque)
    _heard: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "done" if self.is_done else "cancelled" if self.is_cancelled else "under way"
        return f"Job({state})"

    def __iter__(self) -> Iterator[OutputDelta]:
        while True:
            with self._changed:
                is_done = self.is_done
                pieces = self.take()
                if not is_done and not pieces:
                    self._changed.wait()
            yield from pieces
            if is_done:
                break
        self.result()

    @property
    def is_done(self) -> bool:
        """Return True if nothing more will come; there may still be pieces to take."""
        return self.outcome is not None

    def result(self, timeout_s: float | None = None) -> Generation:
        """Wait for the end. Raises the error that ended it, and `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_done, timeout_s):
                raise TimeoutError(f"the request is still under way after {timeout_s:g} s")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None, "it has ended"
        return self.outcome

    def cancel(self) -> None:
        """End the request before the next pass; does nothing if it has ended."""
        self.is_cancelled = True

    def take(self) -> list[OutputDelta]:
        """Return the pieces that have come and were not taken yet, without waiting."""
        with self._changed:
            pieces = list(self._pieces)
            self._pieces.clear()
            return pieces

    def listen(self, heard: Callable[[], None] | None) -> None:
        """Call this from another thread when something has come, and once right away."""
        self._heard = heard
        if heard is not None:
            heard()

    # The following methods are for the scheduler.

    def push(self, piece: OutputDelta) -> None:
        """Add one more piece."""
        with self._changed:
            if len(self._pieces) == MOST_PIECES:
                piece = self._pieces.pop().joined(piece)
            self._pieces.append(piece)
        self._tell()

    def end(self, outcome: Generation | BaseException) -> None:
        """Note the end; a second end changes nothing."""
        with self._changed:
            self.outcome = self.outcome or outcome
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if (heard := self._heard) is not None:
            heard()


def needs_score(ref: weakref.ref[Job]) -> bool:
    """Return True if a job waits for a score of its prompt."""
    job = ref()
    if job is None or job.is_cancelled:
        return False
    return job.request.num_prompt_logprobs is not None and job.prompt_score is None


class PromptScores:
    """Jobs whose prompts are scored together, a pass at a time, before their texts are written.

    Invariant: a job has the score of its prompt before its first piece or its end, except after an
    error.
    """

    def __init__(self, jobs: Sequence[weakref.ref[Job]]) -> None:
        self.jobs = jobs
        self._scored = list[weakref.ref[Job]]()  # in the scorer's order
        self._scorer: Scorer | None = None

    def step(self, decoder: "Decoder") -> bool:
        """Run one pass over the weights; return False once all are scored and handed to their jobs."""
        if self._scorer is None:
            # a job that is dropped from now on gets no score
            alive = [(ref, job) for ref in self.jobs if (job := ref()) is not None]
            self._scored = [ref for ref, _ in alive]
            self._scorer = decoder.start_scores([_score_request(job) for _, job in alive])
        if decoder.step_scores(self._scorer):
            return True
        for ref, score in zip(self._scored, self._scorer.prompt_scores(), strict=True):
            if (job := ref()) is not None:
                job.prompt_score = score
        return False

    def release(self, decoder: "Decoder") -> None:
        """Free its place. Raises `UserError` if the decoder was closed."""
        if self._scorer is not None:
            decoder.release(self._scorer)


def _score_request(job: Job) -> ScoreRequest:
    prompt = job.request.prompt
    assert isinstance(prompt, tuple), "it was prepared"
    return ScoreRequest(prompt, 1, job.request.num_prompt_logprobs)
