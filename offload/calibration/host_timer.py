"""Seconds of work on the host, for comparisons at start.

Invariant: the shortest run counts, since others that use the machine only ever add to it.
"""

import time
from collections.abc import Callable
from typing import Any

_NUM_ROUNDS = 5


def host_seconds(work: Callable[[], Any], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest of a few runs behind one that does not count."""
    work()
    seconds = []
    for _ in range(_NUM_ROUNDS):
        started = clock()
        work()
        seconds.append(clock() - started)
    return min(seconds)
