"""Threads that share one product by its columns, each computing its blocks alone.

torch divides every single operation among its threads and waits for all of them at its end. A
product that is made block by block has hundreds of such ends, and a thread whose core was taken by
another process holds up each of them. Here the threads of a product take one block after the
other until none is left, so a slow one takes fewer. A block is computed by one thread: its bits
cannot depend on how many there are.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch


class ThreadTeam:
    """The threads of this process that share products with the thread that asks for them."""

    def __init__(self) -> None:
        self._num_threads = 0  # taken from torch, while they are
        self._helpers: ThreadPoolExecutor | None = None
        self._num_helpers = 0
        # a child process has none of its parent's threads
        os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def in_place_of_torch(self) -> Iterator[int]:
        """Give the team as many threads as torch has, and torch one, and yield the number.

        Within another such context nothing changes.
        """
        if self._num_threads:
            yield self._num_threads
            return
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield self._num_threads
        finally:
            torch.set_num_threads(self._num_threads)
            self._num_threads = 0

    def run(self, work: Callable[[], None], most: int) -> None:
        """Call `work` in every thread at once, at most in `most` of them, and wait for all.

        `work` takes parts of a common task until none is left. What it raises is raised here.
        """
        with self.in_place_of_torch() as num_threads:
            num_helpers = min(num_threads, most) - 1
            if num_helpers < 1:
                work()
                return
            pool = self._pool(num_helpers)
            helped = [pool.submit(_work_alone, work) for _ in range(num_helpers)]
            try:
                work()
            finally:
                wait(helped)
            for one in helped:
                one.result()

    def _pool(self, num_helpers: int) -> ThreadPoolExecutor:
        if self._helpers is None or self._num_helpers < num_helpers:
            if self._helpers is not None:
                self._helpers.shutdown()
            self._helpers = ThreadPoolExecutor(num_helpers, thread_name_prefix="offload-product")
            self._num_helpers = num_helpers
        return self._helpers

    def _forget(self) -> None:
        self._helpers = None


def _work_alone(work: Callable[[], None]) -> None:
    # in some versions of torch the number is one for each thread, in others one for all
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    with torch.inference_mode():
        work()


TEAM = ThreadTeam()
