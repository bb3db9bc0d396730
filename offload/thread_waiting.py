"""How compute threads wait for each other: they spin for a while, or they sleep.

Spinning is quicker where the cores are ours, and far slower beside a process that needs one.
libgomp reads `GOMP_SPINCOUNT` once, at start, but with more OpenMP threads than cores it spins a
hundred times at most, says its manual: an idle team is kept while the others shall sleep.
"""

import os
import threading

import torch

from offload.threads import Mode

_BYTES_PER_THREAD = 1 << 17  # of an addition that torch spreads over all threads


class ThreadWaiting:
    """Sets how the threads of this process wait; at first they spin."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None
        self._thread = threading.Thread()

    def compute_in(self, mode: Mode) -> None:
        """Compute with this mode's threads from now on, which wait as it says."""
        torch.set_num_threads(mode.num_threads)
        if mode.num_threads > 1:
            self.let_sleep(mode.is_asleep)

    def let_sleep(self, is_asleep: bool) -> None:
        """Let waiting threads sleep at once, or spin for a while first."""
        if is_asleep and self._ended is None:
            self._ended = threading.Event()
            started = threading.Event()
            self._thread = threading.Thread(
                target=_keep_team, args=(started, self._ended), name="offload-idle", daemon=True
            )
            self._thread.start()
            started.wait()
        elif not is_asleep and self._ended is not None:
            self.close()

    def close(self) -> None:
        """End the idle team."""
        if self._ended is not None:
            self._ended.set()
            self._thread.join()
            self._ended = None


def _keep_team(started: threading.Event, ended: threading.Event) -> None:
    num_threads = max(2, len(os.sched_getaffinity(0)))
    torch.set_num_threads(num_threads)
    torch.zeros(num_threads * _BYTES_PER_THREAD, dtype=torch.uint8).add_(1)
    started.set()
    ended.wait()
