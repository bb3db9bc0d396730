"""Other processes: they find this package, are held to a limit, and are never left behind.

A peer that maps a file larger than its share must not live off the page cache: only a memory group
of the kernel (cgroup v1 or v2) counts both. Where none may be made, the caller must say so.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import offload
from offload.errors import RunError
from offload.machine import GroupFiles, memory_groups

_GONE_S = 5.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# of this checkout, or where this package is installed
ROOT = Path(offload.__file__).resolve().parents[1]


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return our environment and, in a checkout, the way to its package for others."""
    paths = [str(root)] if (root / "pyproject.toml").is_file() else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    # set by our own import
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def call(
    module: str, order: Any, *, python: str = sys.executable, limit_s: float | None = None
) -> Any:
    """Return the JSON that a module prints last, run with an order. Raises `RunError` in a line."""
    return json.loads(last_line(run([python, "-m", module, json.dumps(order)], limit_s=limit_s)))


def run(command: Sequence[str], *, limit_s: float | None = None, root: Path = ROOT) -> str:
    """Return the output of a checkout's program, run to its end. Raises `RunError` in a line."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=environment(root),
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"failed: took longer than {limit_s:.0f} s") from None
    if done.returncode < 0:
        why = ", out of memory" if done.returncode == -signal.SIGKILL else ""
        raise RunError(f"failed: killed by signal {-done.returncode}{why}")
    if done.returncode:
        # a refusal of ours needs no name of its class
        why = re.sub(r"^offload[\w.]+: ", "", last_line(done.stderr))
        raise RunError(f"failed: {why}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line with anything on it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def die_with_parent() -> None:
    """Let the child be killed when this process is; called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(
    words: Sequence[str], variables: Mapping[str, str], **options: Any
) -> "subprocess.Popen[str]":
    """Start a module, with its arguments and variables of its own; it dies with this process."""
    command = [sys.executable, "-m", *words]
    env = {**environment(), **variables}
    return subprocess.Popen(command, env=env, preexec_fn=die_with_parent, **options)


class MemoryCap(NamedTuple):
    """An empty group with its limit set: memory and page cache of a process, together below it."""

    folder: Path
    files: GroupFiles

    @property
    def processes(self) -> Path:
        """The file that a process writes its id into to join."""
        return self.folder / "cgroup.procs"

    def takes(self, cap_bytes: int) -> bool:
        """Return True if the group takes the limit; only the kernel's own files are written."""
        try:
            with (self.folder / self.files.limit).open("r+", encoding="ascii") as limit:
                limit.write(str(cap_bytes))
        except OSError:
            return False
        return os.access(self.processes, os.W_OK)

    def peak_bytes(self) -> int | None:
        """Return the most bytes held, page cache included; None where it is not kept."""
        path = self.folder / self.files.peak
        return int(path.read_text()) if path.is_file() else None

    def remove(self) -> None:
        """Remove the group once its last process is gone, which the kernel may notice late."""
        give_up = time.monotonic() + _GONE_S
        while True:
            try:
                return self.folder.rmdir()
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)


def new_cap(cap_bytes: int) -> MemoryCap | None:
    """Make a group of `cap_bytes` inside the innermost group of ours that can have one, or None.

    In cgroup v2 a group that holds processes may have no limited children: then one beside it has
    to do.
    """
    for outer, files in memory_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        cap = MemoryCap(outer / f"offload-bench-{os.getpid()}", files)
        try:
            cap.folder.mkdir()
        except OSError:
            continue
        if cap.takes(cap_bytes):
            return cap
        cap.folder.rmdir()
    return None
