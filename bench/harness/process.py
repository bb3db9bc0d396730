"""Other processes: they find this package, are held to a limit, and are never left behind."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import offload
from offload.errors import RunError

_END_S = 15.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def environment() -> dict[str, str]:
    """Return our environment and, in a checkout, the way to this package for others."""
    root = Path(offload.__file__).resolve().parents[1]
    paths = [str(root)] if (root / "pyproject.toml").is_file() else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    # set by our own import
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def call(
    module: str, order: Any, *, python: str = sys.executable, limit_s: float | None = None
) -> Any:
    """Return the JSON that a module prints last, run as a process with the order as JSON.

    Raises `RunError` with the reason in a line where there is none.
    """
    command = [python, "-m", module, json.dumps(order)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=environment()
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"failed: took longer than {limit_s:.0f} s") from None
    if done.returncode < 0:
        why = ", out of memory" if done.returncode == -signal.SIGKILL else ""
        raise RunError(f"failed: killed by signal {-done.returncode}{why}")
    if done.returncode:
        raise RunError(f"failed: {last_line(done.stderr)}")
    return json.loads(last_line(done.stdout))


def last_line(text: str) -> str:
    """Return the last line with anything on it, cut to what fits into a table."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def die_with_parent() -> None:
    """Let the child be killed when this process is; called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Talker:
    """A process that hears lines of JSON and answers in such lines; it ends when its input does.

    Args:
        log: takes its standard error, and has a name for the reader of an error.
    """

    def __init__(self, command: Sequence[str], log: TextIO, env: Mapping[str, str]) -> None:
        self._log = log
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def tell(self, value: Any) -> None:
        """Send one line; a process that has ended is noticed when it is to answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(value), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        """Return the next answer. Raises `RunError` where the process has ended."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.wait(_END_S)
        self._log.seek(0)
        raise RunError(f"a process has ended: {last_line(self._log.read())}")

    def close(self, patience_s: float = _END_S) -> int:
        """End the process, by force where it does not end by itself; return its exit status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.process.kill()
        self.process.stdout.close()
        return self.process.wait()
