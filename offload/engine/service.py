"""Many callers, one decoder: requests wait in order, and one thread runs the passes that their
texts share.

Only that thread touches the decoder.
"""

import threading
from collections.abc import Sequence

from offload.declaration import whole_number
from offload.engine.decoder import Decoder
from offload.engine.job import Job
from offload.engine.request import Request
from offload.engine.scheduler import EngineStats, Scheduler
from offload.errors import UserError, require
from offload.machine import give_back_memory

# Seconds until an idle server frees memory; the next request then pays for new pages.
_IDLE_S = 5.0
# limit for all that wait: compiled grammars may take 200 times as much
_MOST_GRAMMAR_BYTES = 2 << 20
ASK_LATER = "the server is closing: ask again later"


class QueueFull(UserError):  # noqa: N818
    """The queue of waiting requests is full."""


class Closing(UserError):  # noqa: N818
    """The engine takes no more requests."""


class Engine:
    """Serves many callers with one decoder.

    Use it as a context manager, or `close` it before the decoder. Any thread may call any method;
    nothing else may use the decoder. If `max_waiting` requests wait, more are refused.
    """

    def __init__(self, decoder: Decoder, *, max_waiting: int = 64) -> None:
        self._max_waiting = whole_number(max_waiting, "`max_waiting`")
        requirement = "`max_waiting` must be 1 or more"
        require(self._max_waiting >= 1, requirement, max_waiting, "one that waits is begun at once")
        self.decoder = decoder
        self._scheduler = Scheduler(decoder)
        self._changed = self._scheduler.changed
        self._is_closing = False
        self._is_over = False
        # after a signal interrupts `join`, it may report a running thread as ended
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        return not self._is_closing and not self._ended.is_set()

    @property
    def most_requests(self) -> int:
        return self._max_waiting + self.decoder.num_parallel

    def prepare(self, request: Request) -> Request:
        """Return the request with its prompt checked and encoded, see `Decoder.prepare`.

        Raises as `submit` does.
        """
        self._require_room()  # before the prompt is read, which may take longer
        return self.decoder.prepare(request)

    def submit(self, request: Request) -> Job:
        """Add a request, to be begun once there is a place.

        Raises `UserError` for a request that cannot be served, `QueueFull`, and `Closing`.
        """
        job = Job(self.prepare(request))
        with self._changed:
            self._require_room()
            others_bytes = self._scheduler.waiting_grammar_bytes
            if job.request.grammar and others_bytes > _MOST_GRAMMAR_BYTES:
                self._scheduler.count(num_refused=1)
                raise QueueFull("requests with long grammars wait already: ask again later")
            self._scheduler.add(job)
        return job

    def submit_all(self, requests: Sequence[Request]) -> list[Job]:
        """Add several requests at once, or none of them; see `submit`."""
        jobs = list[Job]()
        with self._changed:
            try:
                for request in requests:
                    jobs.append(self.submit(request))
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
        return jobs

    def close(self, grace_s: float = 0.0) -> None:
        """Refuse requests, end those that wait, and after the grace period cancel the others.

        Returns once the current pass is over; a second call does nothing.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._scheduler.reject_waiting(Closing(ASK_LATER))
        self._ended.wait(max(0.0, grace_s))
        with self._changed:
            self._is_over = True
        self._ended.wait()

    def figures(self) -> EngineStats:
        """Return the counts of work done, and the current load."""
        return self._scheduler.figures()

    def _require_room(self) -> None:
        with self._changed:
            if not self.is_open:
                raise Closing(ASK_LATER)
            if self._scheduler.num_waiting + self._scheduler.num_active >= self.most_requests:
                self._scheduler.count(num_refused=1)
                raise QueueFull(f"{self._max_waiting} requests wait already: ask again later")

    # The following runs in the engine's own thread.

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ended.set()

    def _serve(self) -> None:
        """Admit and run texts until the engine closes; then end all that are left."""
        error: BaseException | None = None
        try:
            while self._has_work():
                self._scheduler.admit()
                if self._scheduler.num_active:
                    self._scheduler.step()
        except BaseException as caught:  # an error in this program: no caller may be left waiting
            error = caught
            raise
        finally:
            with self._changed:
                self._is_closing = True
            self._scheduler.end_all(error)
            self._scheduler.reject_waiting(error or Closing(ASK_LATER))

    def _has_work(self) -> bool:
        """Wait for work; return False once there will be none."""
        with self._changed:
            is_idle = not self._changed.wait_for(self._is_asked, _IDLE_S)
        if is_idle:
            give_back_memory()
        with self._changed:
            self._changed.wait_for(self._is_asked)
            return not self._is_over and bool(self._scheduler.num_active or not self._is_closing)

    def _is_asked(self) -> bool:
        return self._scheduler.has_work or self._is_closing
