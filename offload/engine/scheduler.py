"""Many requests through one decoder: as many at a time as it has places for, in the order in which
they came, and one pass over the weights for all that are being written.

Whatever is written goes this way: lists of prompts, files of them, tasks of lm-eval, and requests
over HTTP. A scheduler has no thread of its own: what drives it calls `admit` and `step` in turn;
`write_all` does in the thread of its caller, `service.Engine` in one that it has.
Invariant: every job that was added ends, with its text or with the error that ended it; one that
fails, or is cancelled, disturbs no other; and a place is given back before the next text gets it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from itertools import islice
from typing import NamedTuple, Protocol

from offload.engine.cache_pool import LEAST_COPIED
from offload.engine.generation import Generation, Run
from offload.engine.job import Cancelled, Job, TextPiece
from offload.engine.request import Request
from offload.errors import RunError, UserError
from offload.model.target import Target
from offload.stats import Transfers

_RECENT_S = 60.0  # rates are told of the passes of the last minute
_MOST_RECENT = 256
_NOTHING = Transfers()


class TextWriter(Protocol):
    """What a scheduler needs of a decoder."""

    @property
    def num_parallel(self) -> int:
        """Return how many texts may be written at a time."""

    @property
    def target(self) -> Target:
        """Return what tells what passes have moved."""

    def start(self, request: Request, *, continues: bool) -> Run:
        """Take a place for a text."""

    def step_all(self, runs: Sequence[Run]) -> None:
        """Run one pass for all of them."""

    def release(self, run: Run) -> None:
        """Give its place back."""


class PassDone(NamedTuple):
    """One pass over the weights, for all texts that shared it."""

    ended_s: float  # by the monotonic clock
    seconds: float
    num_texts: int
    num_tokens: int
    moved: Transfers


class EngineFigures(NamedTuple):
    """What was done since the beginning, and what goes on now."""

    num_active: int = 0
    num_waiting: int = 0
    num_done: int = 0  # those below not counted
    num_cancelled: int = 0
    num_failed: int = 0
    num_refused: int = 0  # because too many waited
    num_prompt_tokens: int = 0  # of requests that were begun
    num_tokens: int = 0
    num_passes: int = 0
    pass_s: float = 0.0
    waited_s: float = 0.0  # of all requests that were begun, before they were
    moved: Transfers = Transfers()  # by all passes
    recent: tuple[PassDone, ...] = ()  # of the last minute, as far as they are kept
    pass_began_s: float | None = None  # by the monotonic clock; None while idle


class Scheduler:
    """Jobs that wait, jobs that are being written, and the passes that these share.

    One thread at a time may call `admit`, `step` and `end_all`; any may call the other methods.
    """

    def __init__(self, decoder: TextWriter) -> None:
        self._decoder = decoder
        # is held to add a job or to look at several figures at once, and told of new jobs
        self.changed = threading.Condition()
        self.active = list[Job]()  # being written, in the order in which they were begun
        self._waiting = deque[Job]()
        self._sums = EngineFigures()
        self._recent = deque[PassDone](maxlen=_MOST_RECENT)
        self._pass_began_s: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.active)

    @property
    def runs(self) -> list[Run]:
        return [job.run for job in self.active if job.run is not None]

    def add(self, job: Job) -> None:
        """Have a job wait behind those that wait already."""
        with self.changed:
            self._waiting.append(job)
            self.changed.notify_all()

    def admit(self) -> list[Job]:
        """Drop what was cancelled, and begin those that wait, in order, while there are places.

        A prompt that another text is just taking in waits until it is there, and takes it over.
        Returns the jobs that have ended by this.
        """
        ended = self._drop_cancelled()
        while len(self.active) < self._decoder.num_parallel:
            with self.changed:
                if not self._waiting or self._is_coming(self._waiting[0].request.prompt):
                    break
                job = self._waiting.popleft()
            try:
                run = self._decoder.start(job.request, continues=True)
            except Exception as error:  # this request's own, whatever it is
                ended.append(self._end(job, error=error))
                continue
            with self.changed:
                job.run = run
                self.active.append(job)
            waited_s = time.monotonic() - job.submitted_s
            self.count(waited_s=waited_s, num_prompt_tokens=run.sequence.num_prompt_tokens)
        return ended

    def step(self) -> list[Job]:
        """Run one pass for all being written, hand out pieces; return the jobs it has ended."""
        active = list(self.active)
        runs = self.runs
        before = self._decoder.target.moved
        num_texts = sum(run.is_writing for run in runs)
        num_before = [len(run.sequence.new_ids) for run in runs]
        began_s = self._pass_began_s = time.monotonic()
        try:
            errors = self._sweep_each(runs)
        except RunError as error:  # the disk, or another rank: it is an error of all texts
            return self.end_all(error)
        finally:
            self._pass_began_s = None
        num_tokens = 0
        for job, run, num, failure in zip(active, runs, num_before, errors, strict=True):
            num_tokens += self._hand_out(job, run, num, failure)
        if num_texts:  # else there was nothing left to write
            ended_s = time.monotonic()
            moved = self._decoder.target.moved.since(before)
            one = PassDone(ended_s, ended_s - began_s, num_texts, num_tokens, moved)
            with self.changed:
                self._recent.append(one)
            self.count(moved=moved, num_passes=1, num_tokens=num_tokens, pass_s=one.seconds)
        return [job for job in active if job.is_done]

    def end_all(self, error: BaseException | None = None) -> list[Job]:
        """End what is being written, with what there is or with this error; returns those jobs."""
        active = list(self.active)
        for job in active:
            self._leave(job, error)
        return active

    def turn_away(self, error: BaseException) -> None:
        """End all that wait with this error."""
        with self.changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        for job in waiting:
            self._end(job, error=error)

    def figures(self) -> EngineFigures:
        """Return what was done, and what goes on."""
        with self.changed:
            now_s = time.monotonic()
            recent = tuple(one for one in self._recent if now_s - one.ended_s < _RECENT_S)
            return self._sums._replace(
                num_active=len(self.active),
                num_waiting=self.num_waiting,
                recent=recent,
                pass_began_s=self._pass_began_s,
            )

    @property
    def num_waiting(self) -> int:
        """Return how many jobs wait for a place; a cancelled one needs none."""
        return sum(not job.is_cancelled for job in self._waiting)

    def count(self, *, moved: Transfers = _NOTHING, **more: float) -> None:
        """Add to the figures of these names."""
        with self.changed:
            sums = {name: getattr(self._sums, name) + value for name, value in more.items()}
            self._sums = self._sums._replace(moved=self._sums.moved.and_more(moved), **sums)

    def _is_coming(self, prompt: object) -> bool:
        """Return whether a text takes in this very prompt, to be copied, and no place has it yet."""
        alike = [
            job.run.sequence
            for job in self.active
            if job.run is not None and job.request.prompt == prompt
        ]
        is_worth_it = any(text.num_prompt_tokens > LEAST_COPIED for text in alike)
        return is_worth_it and not any(text.new_ids for text in alike)

    def _drop_cancelled(self) -> list[Job]:
        with self.changed:
            gone = [job for job in self._waiting if job.is_cancelled]
            for job in gone:
                self._waiting.remove(job)
        for job in gone:
            self._end(job, error=Cancelled("the request was cancelled before it had begun"))
        left = [job for job in self.active if job.is_cancelled]
        for job in left:
            self._leave(job)
        return gone + left

    def _sweep_each(self, runs: Sequence[Run]) -> list[Exception | None]:
        """Run a pass for all, or if it fails for each, to see whose error it was; but `RunError`."""
        try:
            self._decoder.step_all(runs)
        except RunError:
            raise
        except Exception as error:
            if len(runs) == 1:
                return [error]
            return [one for run in runs for one in self._sweep_each([run])]
        return [None] * len(runs)

    def _hand_out(self, job: Job, run: Run, num_before: int, error: Exception | None) -> int:
        """Hand out what a text has gained; return how many tokens that is."""
        sequence = run.sequence
        try:
            if error is not None:
                raise error
            text = run.take()
            # its end is told now, not behind the next pass
            text += "" if run.is_writing else run.take()
        # of its own: of a grammar, or of its text, which a stranger's tokenizer makes
        except Exception as failure:
            self._leave(job, failure)
            return 0
        token_ids = sequence.new_ids[num_before:]
        if text or token_ids:
            logprobs = sequence.logprobs[num_before:]
            job.hand_out(TextPiece(text, token_ids, logprobs, sequence.last_pass))
        if run.is_finished:
            self._leave(job)
        return len(token_ids)

    def _leave(self, job: Job, error: BaseException | None = None) -> None:
        """Free the job's place, then tell its caller."""
        run = job.run
        assert run is not None, "it is being written"
        result = None
        try:
            result = None if error else run.result()
        except Exception as failure:  # of its text, which a stranger's tokenizer makes
            error = failure
        with self.changed:
            self.active.remove(job)
            job.run = None
        # of a decoder that was closed too early, which has no places any more
        with suppress(UserError):
            self._decoder.release(run)
        self._end(job, result, error)

    def _end(
        self, job: Job, result: Generation | None = None, error: BaseException | None = None
    ) -> Job:
        outcome = "num_cancelled" if job.is_cancelled else "num_failed" if error else "num_done"
        self.count(**{outcome: 1})  # type: ignore[arg-type]
        job.end(result, error)
        return job


class Finished(NamedTuple):
    """What has become of one request."""

    number: int  # among those that were given, from 0
    outcome: Generation | UserError  # the error where it could not begin, or not go on


def write_all(
    decoder: TextWriter,
    requests: Sequence[Request],
    on_pass: Callable[[Sequence[Run]], None] = lambda runs: None,
) -> Generator[Finished, None, None]:
    """Yield results in the order of finishing; closing this drops what is left under way.

    `on_pass` hears of all runs before every pass. An error that is no request's `UserError` is
    raised.
    """
    scheduler = Scheduler(decoder)
    left = iter(enumerate(requests))
    numbers = dict[Job, int]()

    def begin() -> Generator[Finished, None, None]:
        """Begin as many as there are places for; a job takes memory, so few wait."""
        while True:
            num_more = max(0, decoder.num_parallel - scheduler.num_waiting)
            for number, request in islice(left, num_more):
                job = Job(request)
                numbers[job] = number
                scheduler.add(job)
            if not (ended := scheduler.admit()):
                return
            yield from _finished(ended, numbers)

    try:
        yield from begin()
        while runs := scheduler.runs:
            on_pass(runs)
            yield from _finished(scheduler.step(), numbers)
            yield from begin()
    finally:
        scheduler.end_all(Cancelled("the others were given up"))


def _finished(jobs: Sequence[Job], numbers: dict[Job, int]) -> Generator[Finished, None, None]:
    for job in jobs:
        outcome = job.error or job.result
        if not isinstance(outcome, Generation | UserError):
            assert outcome is not None, "it has ended"
            raise outcome
        yield Finished(numbers.pop(job), outcome)


def in_order(decoder: TextWriter, requests: Sequence[Request]) -> list[Generation]:
    """Return all results, as they were asked for. Raises `UserError` for the first that fails."""
    found = dict[int, Generation]()
    with closing(write_all(decoder, requests)) as finished:
        for number, outcome in finished:
            if isinstance(outcome, UserError):
                raise outcome
            found[number] = outcome
    return [found[number] for number in range(len(requests))]
