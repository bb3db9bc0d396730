"""One step as a child in a process group: asked to stop when its time is over, then killed.

Invariant: when `run_child` returns or raises, nothing of the group runs any more; when this process
is killed, the child is killed with it.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from offload.bench.harness.process import die_with_parent

GRACE_S = 5.0  # between asking and making
_CHECKOUT = Path(__file__).resolve().parents[2]


def run_child(command: Sequence[str], limit_s: float, log: BinaryIO) -> tuple[int | None, bool]:
    """Run to the end or the limit; return the exit status, and whether time was over.

    The status is negative after a signal, and None where not even SIGKILL has ended it, as in a
    stuck driver.

    Raises:
        KeyboardInterrupt: the wait was interrupted; the child has been ended as at its limit.
    """
    with _group(command, log) as child:
        try:
            child.wait(limit_s)
            return child.returncode, False
        except subprocess.TimeoutExpired:
            return _end(child), True
        except KeyboardInterrupt:
            _end(child)
            raise


@contextmanager
def _group(command: Sequence[str], log: BinaryIO) -> "Iterator[subprocess.Popen[bytes]]":
    """Yield a child and all that it starts; on leaving they are gone."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=_CHECKOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


def _end(child: "subprocess.Popen[bytes]") -> int | None:
    """Ask the group to end, wait, then kill it; a second Ctrl-C shortens the wait."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            return child.wait(GRACE_S)
    return None
