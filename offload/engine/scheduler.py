"""Many requests through one decoder: as many at a time as it has places, in order of arrival, with
one pass over the weights for all that are being written.

Everything that can share passes uses it: lists of prompts, files of them, tasks of lm-eval, and
requests over HTTP. A scheduler has no thread of its own: a driver calls `admit` and `step` in turn,
`write_all` in its caller's thread and `service.Engine` in a thread of its own. Invariant: every job
that was added ends, with its text or with the error that ended it; one that fails, or is cancelled,
disturbs no other; and a place is given back before the next text gets it.

Jobs are held weakly, so dropping one cancels it. An error keeps the frames alive through which it
passed, with all their variables. So no frame through which a text's own error passes may name
another text's job.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from offload.engine.cache_pool import LEAST_COPIED, num_shared
from offload.engine.generation import Generation, Run
from offload.engine.job import Cancelled, Job, PromptScores, needs_score
from offload.engine.prefix_cache import BLOCK_ROWS
from offload.engine.request import Request
from offload.engine.sequence import TokenSequence
from offload.errors import RunError, UserError
from offload.stats import Transfers

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder

_RECENT_S = 60.0  # rates are those of the passes in the last minute
_MOST_RECENT = 256
_NOTHING = Transfers()


class PassDone(NamedTuple):
    """One pass over the weights, for all texts that shared it."""

    ended_s: float  # on the monotonic clock
    seconds: float
    num_texts: int
    num_tokens: int
    moved: Transfers


class EngineStats(NamedTuple):
    """Counts since the start, and the current load."""

    num_active: int = 0
    num_waiting: int = 0
    num_begun: int = 0
    num_done: int = 0  # successful requests; those below are not counted
    num_cancelled: int = 0
    num_failed: int = 0
    num_refused: int = 0  # because too many waited
    num_prompt_tokens: int = 0  # of requests that were begun
    num_tokens: int = 0
    num_passes: int = 0
    pass_s: float = 0.0
    waited_s: float = 0.0  # seconds that all begun requests waited
    moved: Transfers = Transfers()  # of all passes
    recent: tuple[PassDone, ...] = ()  # passes of the last minute, as far as they are kept


class Scheduler:
    """Jobs that wait, jobs that are being written, and the passes that these share.

    One thread at a time may call `admit`, `step` and `end_all`; any may call the other methods.
    """

    def __init__(self, decoder: "Decoder") -> None:
        self._decoder = decoder
        # guards adding jobs and reading several counts at once; notified of new jobs
        self.changed = threading.Condition()
        # jobs being written, in the order in which they were begun
        self._active = dict[Run, weakref.ref[Job]]()
        self._waiting = deque[weakref.ref[Job]]()
        self._scores: PromptScores | None = None  # prompts being scored
        self._sums = EngineStats()
        self._recent = deque[PassDone](maxlen=_MOST_RECENT)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.num_active)

    @property
    def runs(self) -> list[Run]:
        return list(self._active)

    def add(self, job: Job) -> None:
        """Add a job behind those that wait already."""
        with self.changed:
            self._waiting.append(weakref.ref(job))
            self.changed.notify_all()

    def admit(self) -> None:
        """Drop cancelled jobs, and begin waiting ones, in order, while there are places.

        A job whose prompt shares a beginning that another text is just reading waits until it is
        computed, and then takes it over. Prompts to be scored come first, all together, in one
        place.
        """
        self._drop_cancelled()
        while len(self._active) + (self._scores is not None) < self._decoder.num_parallel:
            with self.changed:
                if not self._waiting or self._is_prefix_in_flight(self._waiting[0]):
                    break
                if needs_score(self._waiting[0]):
                    if self._scores is None:
                        self._begin_scores()
                        continue
                    break
                ref = self._waiting.popleft()
            self._begin(ref)

    def step(self) -> None:
        """Run one pass for all texts being written and hand out pieces, after a pass for scores."""
        if self._scores is not None:
            self._step_scores(self._scores)
        runs = self.runs
        before = self._moved()
        num_texts = sum(run.is_writing for run in runs)
        began_s = time.monotonic()
        try:
            errors = self._sweep_each(runs)
        except RunError as error:  # the disk, or another rank: it ends all texts
            self.end_all(error)
            return
        num_tokens = sum(map(self._hand_out, runs, errors))
        # else nothing was left to write, or the decoder was closed
        if num_texts and not all(errors):
            ended_s = time.monotonic()
            moved = self._moved().since(before)
            done = PassDone(ended_s, ended_s - began_s, num_texts, num_tokens, moved)
            with self.changed:
                self._recent.append(done)
            self.count(moved=moved, num_passes=1, num_tokens=num_tokens, pass_s=done.seconds)

    def _moved(self) -> Transfers:
        """Return the transfers of all passes so far; none if the decoder was closed before."""
        target = getattr(self._decoder, "target", None)
        return _NOTHING if target is None else target.moved

    def end_all(self, error: BaseException | None = None) -> None:
        """End all that are being written, with their text so far or with this error."""
        if self._scores is not None:
            self._end_scores(self._scores, error or _unbegun())
        for run in self.runs:
            self._leave(run, error)

    def reject_waiting(self, error: BaseException) -> None:
        """End all that wait with this error."""
        with self.changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        for ref in waiting:
            self._end(ref, error)

    def figures(self) -> EngineStats:
        """Return the counts of work done, and the current load."""
        with self.changed:
            now_s = time.monotonic()
            recent = tuple(done for done in self._recent if now_s - done.ended_s < _RECENT_S)
            return self._sums._replace(
                num_active=self.num_active,
                num_waiting=self.num_waiting,
                recent=recent,
            )

    @property
    def num_active(self) -> int:
        return len(self._active) + (len(self._scores.jobs) if self._scores else 0)

    @property
    def num_waiting(self) -> int:
        """Return the number of jobs that wait for a place; a cancelled one needs none."""
        with self.changed:
            return sum(not _is_given_up(ref) for ref in self._waiting)

    @property
    def waiting_grammar_bytes(self) -> int:
        """Return the total length of the grammars, compiled by now, of all waiting jobs."""
        with self.changed:
            jobs = filter(None, (ref() for ref in self._waiting))
            return sum(job.request.grammar.num_bytes for job in jobs if job.request.grammar)

    def count(self, *, moved: Transfers = _NOTHING, **sums_of_pass: float) -> None:
        """Add to the counts of these names."""
        with self.changed:
            sums = {name: getattr(self._sums, name) + value for name, value in sums_of_pass.items()}
            self._sums = self._sums._replace(moved=self._sums.moved.and_more(moved), **sums)

    def _begin(self, ref: weakref.ref[Job]) -> None:
        """Give a job a place."""
        if (job := ref()) is None:
            self._end(ref, _unbegun())
            return
        try:
            run = self._decoder.start(job.request, continues=True)
            if job.prompt_score is not None:
                run.begin_with(job.prompt_score.likeliest)
        except Exception as error:  # any error is this request's own
            self._end(ref, error)
            return
        with self.changed:
            self._active[run] = ref
        waited_s = time.monotonic() - job.submitted_s
        num_prompt = run.sequence.stats.num_prompt_tokens
        self.count(num_begun=1, waited_s=waited_s, num_prompt_tokens=num_prompt)

    def _begin_scores(self) -> None:
        """Give one place to all prompts that wait to be scored."""
        jobs = [ref for ref in self._waiting if needs_score(ref)]
        for ref in jobs:
            self._waiting.remove(ref)
        self._scores = PromptScores(jobs)

    def _step_scores(self, scores: PromptScores) -> None:
        """Run one pass for the prompts being scored; after the last one they wait for places."""
        before = self._moved()
        began_s = time.monotonic()
        try:
            is_over = not scores.step(self._decoder)
        except RunError as error:
            self.end_all(error)
            return
        except Exception as error:
            self._end_scores(scores, error)
            return
        if is_over:
            self._release_scores(scores)
            with self.changed:
                self._waiting.extendleft(reversed(scores.jobs))
        else:
            moved = self._moved().since(before)
            self.count(moved=moved, num_passes=1, pass_s=time.monotonic() - began_s)

    def _end_scores(self, scores: PromptScores, error: BaseException) -> None:
        """End all jobs whose prompts are being scored with an error."""
        self._release_scores(scores)
        for ref in scores.jobs:
            self._end(ref, error)

    def _release_scores(self, scores: PromptScores) -> None:
        """Free the place of prompts that were scored."""
        with self.changed:
            self._scores = None
        # the decoder was closed before, and has no places any more
        with suppress(UserError):
            scores.release(self._decoder)

    def _is_prefix_in_flight(self, ref: weakref.ref[Job]) -> bool:
        """Return True if a text is reading this job's first tokens, which no text has computed."""
        if (job := ref()) is None:
            return False
        shares = [
            (_num_alike(active.request, run.sequence, job.request), run.sequence)
            for run, other in self._active.items()
            if (active := other()) is not None
        ]
        most = max((num for num, _ in shares), default=0)
        is_worth_it = most > LEAST_COPIED
        alike = [text for num, text in shares if num == most]
        # the last token of a prompt is computed with its first tree
        return is_worth_it and not any(text.num_computed >= most - 1 for text in alike)

    def _drop_cancelled(self) -> None:
        with self.changed:
            gone = [ref for ref in self._waiting if _is_given_up(ref)]
            for ref in gone:
                self._waiting.remove(ref)
        for ref in gone:
            self._end(ref, _unbegun())
        for run in [run for run, ref in self._active.items() if _is_given_up(ref)]:
            self._leave(run)
        if self._scores is not None and all(map(_is_given_up, self._scores.jobs)):
            self._end_scores(self._scores, _unbegun())

    def _sweep_each(self, runs: Sequence[Run]) -> list[Exception | None]:
        """Run a pass for all; if it fails, one for each to find the culprit, except for `RunError`."""
        try:
            return self._decoder.step_all(runs)
        except RunError:
            raise
        except Exception as error:
            if len(runs) == 1:
                return [error]
            return [outcome for run in runs for outcome in self._sweep_each([run])]

    def _hand_out(self, run: Run, error: Exception | None) -> int:
        """Hand out a text's gain; return its number of tokens."""
        try:
            if error is not None:
                raise error
            piece = run.take()
        # the text's own error: of its grammar, or its text, which an untrusted tokenizer makes
        except Exception as failure:
            self._leave(run, failure)
            return 0
        if (piece.text or piece.token_ids) and (job := self._active[run]()) is not None:
            job.push(piece)
        if run.is_finished:
            self._leave(run)
        return len(piece.token_ids)

    def _leave(self, run: Run, error: BaseException | None = None) -> None:
        """Free a text's place, then end its job."""
        outcome: Generation | BaseException
        try:
            outcome = error or run.result()
        except Exception as failure:  # the text's own, which an untrusted tokenizer makes
            outcome = failure
        with self.changed:
            ref = self._active.pop(run)
        # the decoder was closed before, and has no places any more
        with suppress(UserError):
            self._decoder.release(run)
        self._end(ref, outcome)

    def _end(self, ref: weakref.ref[Job], outcome: Generation | BaseException) -> None:
        """Count a job by its outcome, and end it."""
        match outcome:
            case Cancelled() | Generation(finish_reason="interrupted"):
                self.count(num_cancelled=1)
            case BaseException():
                self.count(num_failed=1)
            case _:
                self.count(num_done=1)
        if (job := ref()) is not None:
            job.end(outcome)


def _num_alike(request: Request, text: TokenSequence, waiting: Request) -> int:
    """Count the tokens that a waiting prompt shares with a text: all, or at least a block.

    A prompt that is not encoded yet is compared as it was given.
    """
    if request.prompt == waiting.prompt:
        return text.num_prompt_tokens
    if not isinstance(waiting.prompt, tuple):
        return 0
    num = num_shared(text.tokens[: text.num_prompt_tokens], waiting.prompt)
    return num if num >= BLOCK_ROWS else 0


def _unbegun() -> Cancelled:
    return Cancelled("the request was cancelled before it had begun")


def _is_given_up(ref: weakref.ref[Job]) -> bool:
    job = ref()
    return job is None or job.is_cancelled


class Finished(NamedTuple):
    """The outcome of one request."""

    number: int  # index among the given requests
    outcome: Generation | UserError  # its text, or the error that ended it


def write_all(
    decoder: "Decoder",
    requests: Sequence[Request],
    on_pass: Callable[[Sequence[Run]], None] = lambda runs: None,
) -> Generator[Finished, None, None]:
    """Yield results in the order of finishing; closing this drops all that are unfinished.

    `on_pass` is called with all runs before every pass. Raises any error but a request's own
    `UserError`.
    """
    scheduler = Scheduler(decoder)
    left = iter(enumerate(requests))
    # held here, since the scheduler only refers to them weakly
    numbers = dict[Job, int]()

    def begin() -> Generator[Finished, None, None]:
        """Begin as many as there are places for; a job takes memory, so few wait."""
        while True:
            num_more = max(0, decoder.num_parallel - scheduler.num_waiting)
            for number, request in islice(left, num_more):
                job = Job(request)
                numbers[job] = number
                scheduler.add(job)
            scheduler.admit()
            if not (ended := _ended(numbers)):
                return
            yield from ended

    try:
        yield from begin()
        while scheduler.num_active:
            on_pass(scheduler.runs)
            scheduler.step()
            yield from _ended(numbers)
            yield from begin()
    finally:
        given_up = Cancelled("the others were given up")
        scheduler.end_all(given_up)
        scheduler.reject_waiting(given_up)


def _ended(numbers: dict[Job, int]) -> list[Finished]:
    """Return the jobs that have ended. Raises an error that is no request's own."""
    finished = []
    for job in [job for job in numbers if job.is_done]:
        number = numbers.pop(job)
        if not isinstance(job.outcome, Generation | UserError):
            assert job.outcome is not None, "it has ended"
            raise job.outcome
        finished.append(Finished(number, job.outcome))
    return finished


def in_order(decoder: "Decoder", requests: Sequence[Request]) -> list[Generation]:
    """Return all results in the order of the requests. Raises the first `UserError`."""
    outcomes = dict[int, Generation]()
    with closing(write_all(decoder, requests)) as finished:
        for number, outcome in finished:
            if isinstance(outcome, UserError):
                raise outcome
            outcomes[number] = outcome
    return [outcomes[number] for number in range(len(requests))]
