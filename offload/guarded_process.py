"""Processes that strangers' programs run in: chat templates, and grammars as they are compiled. Some
never end, and some would end the process that they run in.

Why a process. A line tracer, or an exception thrown into a thread, acts between two lines of
Python, but a power of large numbers, `'x' * 10**10`, filters that join, replace or sort, and a
compiler are one call of C that holds the interpreter's lock until it is done; and a thread cannot
be ended. A process has the kernel's limits on its time and memory, whatever runs in it. Why it is
not forked: pages of a fork are shared until they are written to, and the disk writes into ours.
Invariant: one request is answered at a time, and after anything but an answer the process is ended:
none is ever met by what belongs to another, and none is left behind that computes.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

MOST_CHARS = 1 << 20
_ESCAPED = 12  # characters of JSON for one of text, at most
_MOST_TOLD = 1000  # characters of an error at the start
_READY = b"ready\n"


class ProgramFailed(ValueError):  # noqa: N818
    """A program has refused what it was told, or is none."""


class NotStarted(ProgramFailed):
    """The process that it was to run in does not start."""


class ProgramExceeded(ProgramFailed):
    """It has taken more than it may, and would do so again: of what, where that is known."""

    def __init__(self, line: str, limit: Literal["processor", "time", ""] = "") -> None:
        super().__init__(line)
        self.limit = limit


class GuardedProcess:
    """Does one of the jobs of `guarded_worker`; started when first asked, and again after it had to
    be ended.

    Args:
        cpu_s: of a processor for one request.
        wait_s: wall time for an answer, and for the start: it may be stopped from outside.
    """

    def __init__(self, job: Literal["render", "compile"], *, cpu_s: int, wait_s: float) -> None:
        self._job = job
        self._cpu_s = cpu_s
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any], most_chars: int = MOST_CHARS) -> str:
        """Return the job's answer, of at most `most_chars` characters. Raises `ProgramFailed`."""
        limits = {"most_s": self._cpu_s, "most_chars": most_chars}
        line = json.dumps({**request, **limits}, default=str).encode() + b"\n"
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            try:
                answer = self._answer(line, _ESCAPED * most_chars + 100)
                if "exceeded" in answer:
                    raise ProgramExceeded(answer["exceeded"])
            except BaseException:  # a signal's too: the answer that still comes is for no request
                self._end()
                raise
        if "failed" in answer:
            raise ProgramFailed(answer["failed"])
        return answer["text"]

    def end(self) -> None:
        """End the process, whatever it does; a later request starts another."""
        with self._lock:
            self._end()

    def _answer(self, line: bytes, most_bytes: int) -> dict[str, str]:
        """Return an answer of at most this many bytes. Raises `ProgramExceeded` for none."""
        process = self._started()
        assert process.stdin is not None, "a pipe that we asked for"
        with self._timed(process) as has_struck:
            with suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
            line = _line(process, most_bytes)
        if line.endswith(b"\n"):
            answer: dict[str, str] = json.loads(line)
            if has_struck.is_set():
                self._end()
            return answer
        process.kill()
        status = process.wait()
        if sys.platform != "win32" and status == -signal.SIGXCPU:
            raise ProgramExceeded(f"it computes for more than {self._cpu_s} s", "processor")
        why = f"it ends, or does not answer, the process that it runs in (status {status})"
        raise ProgramExceeded(why, "time" if has_struck.is_set() else "")

    def _started(self) -> "subprocess.Popen[bytes]":
        """Return the process, once it is ready. Raises `NotStarted`, `ProgramExceeded`."""
        if self._process is None:
            worker = Path(__file__).with_name("guarded_worker.py")
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker, self._job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._stop = weakref.finalize(self, _stop, os.getpid(), self._process)
            with self._timed(self._process) as has_struck:
                line = _line(self._process, _ESCAPED * _MOST_TOLD)
            if has_struck.is_set():
                late = f"the process that it is to run in does not start within {self._wait_s:g} s"
                raise ProgramExceeded(late, "time")
            if line != _READY:
                why = " ".join(line.decode("utf-8", "replace").split()) or "without a word"
                raise NotStarted(f"the process that it is to run in does not start: {why}")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process = None
            self._stop()

    @contextmanager
    def _timed(self, process: "subprocess.Popen[bytes]") -> Iterator[threading.Event]:
        """End a process that takes longer than it may, by monotonic time; the event tells of it."""
        has_struck = threading.Event()

        def strike() -> None:
            has_struck.set()
            process.kill()

        timer = threading.Timer(self._wait_s, strike)
        timer.daemon = True
        timer.start()
        try:
            yield has_struck
        finally:
            timer.cancel()
            timer.join()  # from here on it has struck or never will


def _line(process: "subprocess.Popen[bytes]", most_bytes: int) -> bytes:
    assert process.stdout is not None, "a pipe that we asked for"
    return process.stdout.readline(most_bytes)


def _stop(owner: int, process: "subprocess.Popen[bytes]") -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was still to be written to it
            pipe.close()  # type: ignore[union-attr]
