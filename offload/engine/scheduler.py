"""Many callers, one decoder: requests wait in order, and one thread runs the passes that all of
their texts share.

Only that thread touches the decoder. Invariant: every request that was taken ends, with its text or
with the error that ended it; one that fails, or is cancelled, disturbs no other; and a place is
given back before the next text gets it.

What a caller holds of a request that an engine has taken: pieces as they come, the result, and the
way out.

The engine's side of it is a `Job`, which lives as long as the engine needs it; a `Ticket` that is
dropped cancels its job. Invariant: a job ends exactly once, and all who wait for it are told; what
is handed out in order is never lost, though a slow reader gets fewer and longer pieces.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.many import is_coming, sweep_each
from offload.engine.request import Request
from offload.engine.sequence import PassFigures, TokenLogprob
from offload.errors import RunError, UserError
from offload.machine import give_back_memory
from offload.stats import Transfers

MOST_PIECES = 64  # that wait for a reader; more become part of the last one


class Cancelled(RunError):  # noqa: N818
    """The request was cancelled before it had written anything."""


class TextPiece(NamedTuple):
    """What a text has gained by a pass, or by several where it was not fetched in between."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # of these tokens, where the request asks for them
    last_pass: PassFigures | None  # of the last one; None where several passes are put together


class JobRequest(NamedTuple):
    """A request, and what a run of it is to be started with."""

    request: Request
    tree: str | None = None
    rule: str | None = None


class Job:
    """A request from the engine's side. `cancel` takes no lock, so that a collector of garbage may
    call it.
    """

    def __init__(self, asked: JobRequest) -> None:
        self.asked = asked
        self.is_cancelled = False
        self.is_done = False
        self.submitted_s = time.monotonic()
        self.result: Generation | None = None
        self.error: BaseException | None = None
        self.changed, self._pieces = threading.Condition(), deque[TextPiece]()
        self._heard: Callable[[], None] | None = None

    def cancel(self) -> None:
        """It ends before the next pass, with what it has by then."""
        self.is_cancelled = True

    def hand_out(self, piece: TextPiece) -> None:
        """Hand out one more piece to the holder of the ticket."""
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
                self.result = result
                self.error = error
                self.is_done = True
        self._tell()

    def take(self) -> list[TextPiece]:
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

    Errors that end the request are raised by iterating, behind the last piece, and by `result`:
    `UserError` for what the user can mend, `RunError` where something failed under way. A request
    that was cancelled has the finish reason `interrupted`, or if it had not begun `Cancelled` is
    raised.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    # no `weakref.finalize`, which would keep the job, its error, and what that passed by
    def __del__(self) -> None:
        self._job.cancel()

    def __repr__(self) -> str:
        state = "done" if self.is_done else "cancelled" if self._job.is_cancelled else "under way"
        return f"Ticket({state})"

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
        """Whether nothing more will come; pieces may still wait to be taken."""
        return self._job.is_done

    def take(self) -> list[TextPiece]:
        """What has come by now and was not taken yet, without waiting."""
        return self._job.take()

    def listen(self, heard: Callable[[], None] | None) -> None:
        """For who cannot wait: this is called whenever something has come, from another thread, and
        once at once.
        """
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


def _joined(first: TextPiece, second: TextPiece) -> TextPiece:
    return TextPiece(
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        None,
    )


_RECENT_S = 60.0  # what rates are of
_MOST_RECENT = 256
# after which C's allocator gives back what it keeps: the next request then pays for new pages
_IDLE_S = 5.0
_NOTHING = Transfers()


class QueueFull(UserError):  # noqa: N818
    """As many requests wait as may."""


class Closing(UserError):  # noqa: N818
    """The engine takes no more requests."""


class PassDone(NamedTuple):
    """One pass over the weights, for all texts that shared it."""

    ended_s: float  # by the monotonic clock
    seconds: float
    num_texts: int
    num_tokens: int
    moved: Transfers


class EngineFigures(NamedTuple):
    """What an engine has done since it began, and what goes on now."""

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


class _Active(NamedTuple):
    job: Job
    run: Run


class Engine:
    """Serves many callers with one decoder; use it as a context manager or `close` it, before the
    decoder.

    Any thread may call any method. Nothing else may use the decoder meanwhile.

    Args:
        decoder: as many texts as it has places are written at a time.
        max_waiting: requests beyond these are refused while so many wait.
    """

    def __init__(self, decoder: Decoder, *, max_waiting: int = 64) -> None:
        if max_waiting < 1:
            raise UserError(
                f"`max_waiting` must be 1 or more, got {max_waiting}: one that waits is begun at once"
            )
        self.decoder = decoder
        self._max_waiting = max_waiting
        self._changed, self._waiting, self._active = (
            threading.Condition(),
            deque[Job](),
            list[_Active](),
        )
        self._is_closing = self._is_over = False
        self._sums, self._recent = EngineFigures(), deque[PassDone](maxlen=_MOST_RECENT)
        self._pass_began_s: float | None = None
        # `join` that a signal interrupts takes a thread for ended that is not
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return not self._is_closing and not self._ended.is_set()

    @property
    def most_requests(self) -> int:
        """That are written or wait at a time."""
        return self._max_waiting + self.decoder.num_parallel

    def submit(
        self, request: Request, *, tree: str | None = None, rule: str | None = None
    ) -> Ticket:
        """Take a request; it is begun once there is a place.

        Raises `UserError` for one that cannot be served at all, `QueueFull` where too many wait,
        and `Closing`.
        """
        self._require_room()  # before its prompt is read, which may take longer
        request = replace(
            request, prompt=self.decoder.check(request, tree=tree, rule=rule).prompt_ids
        )
        with self._changed:
            self._require_room()
            job = Job(JobRequest(request, tree, rule))
            self._waiting.append(job)
            self._changed.notify_all()
        return Ticket(job)

    def close(self, grace_s: float = 0.0) -> None:
        """Take no more requests, end those that wait, let those under way have so long, then cancel
        them.

        Returns once the pass under way is over; again it does nothing.
        """
        with self._changed:
            self._is_closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for job in waiting:
            self._end(job, error=Closing("the server is closing: ask again later"))
        self._ended.wait(max(0.0, grace_s))
        with self._changed:
            self._is_over = True
            for one in self._active:
                one.job.cancel()
        self._ended.wait()

    def figures(self) -> EngineFigures:
        """What was done, and what goes on."""
        with self._changed:
            now_s = time.monotonic()
            recent = tuple(one for one in self._recent if now_s - one.ended_s < _RECENT_S)
            return self._sums._replace(
                num_active=len(self._active),
                num_waiting=self._num_waiting(),
                recent=recent,
                pass_began_s=self._pass_began_s,
            )

    def _num_waiting(self) -> int:
        return sum(not job.is_cancelled for job in self._waiting)

    def _require_room(self) -> None:
        with self._changed:
            if not self.is_open:
                raise Closing("the server is closing: ask again later")
            if self._num_waiting() + len(self._active) >= self.most_requests:
                self._add(num_refused=1)
                raise QueueFull(f"{self._max_waiting} requests wait already: ask again later")

    def _add(self, *, moved: Transfers = _NOTHING, **more: float) -> None:
        with self._changed:
            sums = {name: getattr(self._sums, name) + value for name, value in more.items()}
            self._sums = self._sums._replace(moved=self._sums.moved.and_more(moved), **sums)

    # What follows runs in the engine's own thread.

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ended.set()

    def _serve(self) -> None:
        error: BaseException | None = None
        try:
            while self._has_work():
                self._drop_cancelled()
                self._admit()
                if self._active:
                    self._pass()
        except BaseException as caught:  # of our own making: no caller may be left waiting
            error = caught
            raise
        finally:
            with self._changed:
                self._is_closing = True
                left = list(self._waiting)
                self._waiting.clear()
            for one in list(self._active):
                self._leave(one, error)
            for job in left:
                self._end(job, error=error or Closing("the server is closing: ask again later"))

    def _has_work(self) -> bool:
        """Wait for some; False once there will be none."""
        with self._changed:
            is_idle = not self._changed.wait_for(self._is_asked, _IDLE_S)
        if is_idle:
            give_back_memory()
        with self._changed:
            self._changed.wait_for(self._is_asked)
            return not self._is_over and bool(self._active or not self._is_closing)

    def _is_asked(self) -> bool:
        return bool(self._waiting or self._active or self._is_closing)

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [job for job in self._waiting if job.is_cancelled]
            for job in gone:
                self._waiting.remove(job)
        for job in gone:
            self._end(job, error=Cancelled("the request was cancelled before it had begun"))
        for one in [one for one in self._active if one.job.is_cancelled]:
            self._leave(one)

    def _admit(self) -> None:
        """Begin those that wait, in order, while there are places.

        A prompt that another text is just taking in waits until it is there, and takes it over.
        """
        while len(self._active) < self.decoder.num_parallel:
            texts = [(one.job.asked.request.prompt, one.run) for one in self._active]
            with self._changed:
                if not self._waiting or is_coming(self._waiting[0].asked.request.prompt, texts):
                    return
                job = self._waiting.popleft()
            request, tree, rule = job.asked
            try:
                run = self.decoder.start(request, tree=tree, rule=rule, continues=True)
            except Exception as error:  # this request's own, whatever it is
                self._end(job, error=error)
                continue
            with self._changed:
                self._active.append(_Active(job, run))
            waited_s = time.monotonic() - job.submitted_s
            num_prompt_tokens = run.sequence.num_prompt_tokens
            self._add(waited_s=waited_s, num_prompt_tokens=num_prompt_tokens)

    def _pass(self) -> None:
        """One pass for all of them: pieces are handed out, and those that it has ended leave."""
        active = list(self._active)
        before = self.decoder.target.moved
        began_s = time.monotonic()
        num_texts = sum(one.run.is_writing for one in active)
        num_before = [len(one.run.sequence.new_ids) for one in active]
        self._pass_began_s = began_s
        try:
            errors = sweep_each(self.decoder, [one.run for one in active])
        except RunError as error:
            for one in active:
                self._leave(one, error)
            return
        finally:
            self._pass_began_s = None
        gained = zip(active, num_before, errors, strict=True)
        num_tokens = sum(self._hand_out(one, num, error) for one, num, error in gained)
        if num_texts:  # else there was nothing left to write
            ended_s = time.monotonic()
            moved = self.decoder.target.moved.since(before)
            with self._changed:
                self._recent.append(
                    PassDone(ended_s, ended_s - began_s, num_texts, num_tokens, moved)
                )
            self._add(moved=moved, num_passes=1, num_tokens=num_tokens, pass_s=ended_s - began_s)

    def _hand_out(self, one: _Active, num_before: int, error: Exception | None) -> int:
        sequence = one.run.sequence
        try:
            if error is not None:
                raise error
            text = one.run.take()
            # its end is told now, not behind the next pass
            text += "" if one.run.is_writing else one.run.take()
        # of its own: of a grammar, or of its text, which a stranger's tokenizer makes
        except Exception as failure:
            self._leave(one, failure)
            return 0
        token_ids = sequence.new_ids[num_before:]
        if text or token_ids:
            one.job.hand_out(
                TextPiece(text, token_ids, sequence.logprobs[num_before:], sequence.last_pass)
            )
        if one.run.is_finished:
            self._leave(one)
        return len(token_ids)

    def _leave(self, one: _Active, error: BaseException | None = None) -> None:
        """Its place is free again before its caller is told."""
        result = None
        try:
            result = None if error else one.run.result()
        except Exception as failure:  # of its text, which a stranger's tokenizer makes
            error = failure
        with self._changed:
            self._active.remove(one)
        # of a decoder that was closed too early, which has no places any more
        with suppress(UserError):
            self.decoder.release(one.run)
        self._end(one.job, result, error)

    def _end(
        self, job: Job, result: Generation | None = None, error: BaseException | None = None
    ) -> None:
        outcome = "num_cancelled" if job.is_cancelled else "num_failed" if error else "num_done"
        self._add(**{outcome: 1})  # type: ignore[arg-type]
        job.end(result, error)
