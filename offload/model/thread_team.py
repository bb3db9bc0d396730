"""Threads that share the parts of one product or attention, each part computed by one thread.

torch divides every operation among its threads and waits for all of them at its end. A product made
block by block has hundreds of such ends, and a thread whose core another process took delays each
of them. Here threads take one part after the other until none is left, so a slow thread takes
fewer. One thread computes a part, so its bits cannot depend on the number of threads.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import Any

import torch
from torch import Tensor

from offload.kernels.compiled import lend_threads
from offload.kernels.machine_code import ParallelKernelCall
from offload.machine import num_cores
from offload.memory.sizes import PATH_SCRATCH_BYTES

# products of numbers that one thread makes at least before it asks for more
_SHARE = 1 << 21
_LEAST_SHARED_THREADS = 2
# The same of torch's own threads, which begin sooner, and of how many parts each takes at once.
_TORCH_SHARE = 1 << 20
_SHARES_A_THREAD = 4
_NUM_CORES = num_cores()
_MOST_SHARES = 8 * _NUM_CORES
# scratch memory that a thread keeps
_ROOM_BYTES = min(1 << 20, max(1 << 18, PATH_SCRATCH_BYTES // 2 // _NUM_CORES))


class _Task:
    """Work that a helper does beside the thread that asks, which waits for its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.error: BaseException | None = None
        self._running = Lock()
        self._running.acquire()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._running.release()

    def wait(self) -> None:
        self._running.acquire()


class ThreadTeam:
    """The threads of this process that share products with the thread that asks for them."""

    def __init__(self) -> None:
        self._num_threads = 0  # taken from torch, while they are
        self._taking = Lock()  # two threads may begin a pass at once
        # One inbox for each helper. A future of a pool takes .1 ms more to hand over and to wait
        # for, which is a tenth of a product of 768 columns.
        self._inboxes: list[SimpleQueue[_Task]] = []
        # a child process has none of its parent's threads
        os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def in_place_of_torch(self) -> Iterator[int]:
        """Give the team as many threads as torch has, and torch one, and yield the number.

        Within another such context nothing changes.
        """
        with self._taking:
            is_first = not self._num_threads
            num_threads = self._num_threads or torch.get_num_threads()
            if is_first:
                self._num_threads = num_threads
                torch.set_num_threads(1)
                # coded weights are expanded between products
                lend_threads(num_threads)
        try:
            yield num_threads
        finally:
            if is_first:
                with self._taking:
                    torch.set_num_threads(num_threads)
                    self._num_threads = 0
                    lend_threads(0)

    def lend(self, work: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call `work` with torch's own threads, which it has back meanwhile."""
        num_threads = self._num_threads
        if num_threads < _LEAST_SHARED_THREADS:
            return work(*args, **kwargs)
        torch.set_num_threads(num_threads)
        try:
            return work(*args, **kwargs)
        finally:
            torch.set_num_threads(1)

    def run(self, work: Callable[[], None], most: int) -> None:
        """Call `work` in every thread at once, at most in `most` of them, and wait for all.

        `work` takes parts of a common task until none is left. What it raises is raised here.
        """
        with self.in_place_of_torch() as num_threads:
            num_helpers = min(num_threads, most) - 1
            if num_helpers < 1:
                work()
                return
            self._start(num_helpers)
            tasks = [_Task(work) for _ in range(num_helpers)]
            for inbox, task in zip(self._inboxes, tasks, strict=False):
                inbox.put(task)
            try:
                work()
            finally:
                for task in tasks:
                    task.wait()
            for error in (task.error for task in tasks if task.error is not None):
                raise error

    @property
    def has_threads(self) -> bool:
        """Return True if torch's threads are the team's at present."""
        return self._num_threads > 0

    def _start(self, num_helpers: int) -> None:
        """Let there be at least this many helpers; they end with the process."""
        while len(self._inboxes) < num_helpers:
            inbox: SimpleQueue[_Task] = SimpleQueue()
            self._inboxes.append(inbox)
            Thread(target=_help, args=(inbox,), name="offload-product", daemon=True).start()

    def _forget(self) -> None:
        self._inboxes = []
        self._taking = Lock()
        self._num_threads = 0
        lend_threads(0)


def _help(inbox: SimpleQueue[_Task]) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        while True:
            task = inbox.get()
            # in some versions of torch the number is one for each thread, in others one for all
            if torch.get_num_threads() > 1:
                torch.set_num_threads(1)
            task.run()
            del task


TEAM = ThreadTeam()


class ThreadRoom(local):
    """Room of each thread for the parts that it computes: fresh memory takes longer than products."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0, dtype=torch.float32)

    def numbers(self, num: int) -> Tensor:
        """Return at least this many uninitialised numbers in float32; only a few are kept."""
        if 4 * num > _ROOM_BYTES:
            return torch.empty(num, dtype=torch.float32)
        if num > len(self._numbers):
            self._numbers = torch.empty(num, dtype=torch.float32)
        return self._numbers


ROOM = ThreadRoom()


def compute(work: ParallelKernelCall) -> Tensor:
    """Compute all parts, by as many threads as there is work for; return the result."""
    num_shares = max(1, min(work.num_products // _SHARE, _MOST_SHARES))
    at_once = -(-work.num_parts // num_shares)
    work.begin(at_once)

    def take_parts() -> None:
        work.take_parts(ROOM.numbers(work.num_room))

    most = -(-work.num_parts // at_once)
    # what one thread does needs no other, nor any of torch's
    if most > 1:
        TEAM.run(take_parts, most)
    else:
        take_parts()
    return work.out


@cache
def _run_in_parallel() -> Callable[[Any, Any, int, int], None] | None:
    """Return a function that runs code in torch's threads; None where they are not to be had.

    That is the function by which compilers make threads of OpenMP work; libraries of others have
    it by this name, too.
    """
    try:
        run = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    run_typed: Callable[[Any, Any, int, int], None] = run
    return run_typed


def compute_with_torch(work: ParallelKernelCall) -> Tensor:
    """Compute all parts, by threads of torch, which wait for work as they do between its products.

    A draft's products take some 50 us each, in which others would only just have woken up.
    """
    run = _run_in_parallel()
    if run is None or work.alone is None or TEAM.has_threads:
        return compute(work)
    most = max(1, min(work.num_products // _TORCH_SHARE, work.num_parts))
    num_threads = min(torch.get_num_threads(), most)
    work.begin(-(-work.num_parts // (_SHARES_A_THREAD * num_threads)))
    if num_threads > 1:
        code: Any = work.alone
        run(ctypes.cast(code, ctypes.c_void_p), ctypes.addressof(work.call), num_threads, 0)
    else:
        work.alone(ctypes.addressof(work.call))
    return work.out
