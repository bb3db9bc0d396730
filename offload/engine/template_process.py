"""The process that chat templates are rendered in: they are programs of strangers, and some never
end.

Why a process. A line tracer, or an exception thrown into a thread, acts between two lines of
Python, but a power of large numbers, `'x' * 10**10`, filters that join, replace or sort are one
call of C that holds the interpreter's lock until it is done; and a thread cannot be ended. A
process has the kernel's limits on its time and memory, whatever runs in it. Why it is not forked:
pages of a fork are shared until they are written to, and the disk writes into ours.
Invariant: one request is answered at a time, and after anything but an answer the process is ended:
none is ever met by what belongs to another, and none is left behind that computes.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_CPU_S = 5  # seconds of a processor for one request; templates take milliseconds
# Wall time for an answer, and for the start: the process may be stopped from outside.
_WAIT_S = 60.0
# Characters that a template may write beside what it was told.
_MOST_CHARS = 1 << 20
_TIMES_TOLD = 8  # it may repeat what it was told, and write it as JSON, this many times as long
_ESCAPED = 12  # characters of JSON for one of text, at most
_MOST_TOLD = 1000  # characters of an error at the start
_READY = b"ready\n"


class TemplateFailed(ValueError):  # noqa: N818
    """A template has refused what it was told, or is none."""


class TemplateExceeded(TemplateFailed):
    """It has taken more than it may, and would do so again."""


class TemplateProcess:
    """Renders by `render`; started when first asked, and again after it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return what a template makes of a conversation. Raises `TemplateFailed`.

        `variables` are further arguments of transformers' `render_jinja_template`.
        """
        told = {**variables, "chat_template": template, "conversations": [messages]}
        most_chars = _MOST_CHARS + _TIMES_TOLD * len(json.dumps([messages, variables], default=str))
        line = (
            json.dumps({**told, "most_s": _CPU_S, "most_chars": most_chars}, default=str).encode()
            + b"\n"
        )
        with self._lock:
            answer = self._ask(line, _ESCAPED * most_chars + 100)
        if "exceeded" in answer:
            raise TemplateExceeded(answer["exceeded"])
        if "failed" in answer:
            raise TemplateFailed(answer["failed"])
        return answer["text"]

    def end(self) -> None:
        """End the process, whatever it does; a later request starts another."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes, most_bytes: int) -> dict[str, str]:
        """Return an answer of at most so many bytes; no other request is being answered."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        try:
            process = self._started()
            with _timed(process) as has_struck:
                answer = _exchange(process, line, most_bytes)
        except BaseException:  # a signal's too: the answer that still comes is for no request
            self._end()
            raise
        if has_struck.is_set() or "exceeded" in answer:
            self._end()
        return answer

    def _started(self) -> "subprocess.Popen[bytes]":
        """Return the process, once it is ready. Raises `TemplateFailed` where it does not start."""
        if self._process is None:
            worker = Path(__file__).with_name("template_worker.py")
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._stop = weakref.finalize(self, _stop, os.getpid(), self._process)
            with _timed(self._process):
                found = _line(self._process, _ESCAPED * _MOST_TOLD)
            if found != _READY:
                why = " ".join(found.decode("utf-8", "replace").split()) or "without a word"
                raise TemplateFailed(f"the process that renders templates does not start: {why}")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process = None
            self._stop()


@contextmanager
def _timed(process: "subprocess.Popen[bytes]") -> Iterator[threading.Event]:
    """End a process that takes longer than `_WAIT_S`, by monotonic time; the event tells of it."""
    has_struck = threading.Event()

    def strike() -> None:
        has_struck.set()
        process.kill()

    timer = threading.Timer(_WAIT_S, strike)
    timer.daemon = True
    timer.start()
    try:
        yield has_struck
    finally:
        timer.cancel()
        timer.join()  # from here on it has struck or never will


def template_process() -> TemplateProcess:
    """Return the one process that all models share: an answer depends on nothing but the request."""
    return _process_of(os.getpid())


@functools.cache
def _process_of(pid: int) -> TemplateProcess:
    """Return the process of this pid: a fork that read the same pipe would take others' answers."""
    return TemplateProcess()


def _exchange(process: "subprocess.Popen[bytes]", line: bytes, most_bytes: int) -> dict[str, str]:
    """Return the answer to a request; of a process that has ended it is the limit it has exceeded."""
    assert process.stdin is not None, "a pipe that we asked for"
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
    found = _line(process, most_bytes)
    if found.endswith(b"\n"):
        answer: dict[str, str] = json.loads(found)
        return answer
    process.kill()
    status = process.wait()
    if sys.platform != "win32" and status == -signal.SIGXCPU:
        return {"exceeded": f"it computes for more than {_CPU_S} s"}
    return {
        "exceeded": f"it ends, or does not answer, the process that renders it (status {status})"
    }


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
