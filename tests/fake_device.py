"""A device without a GPU: streams are queues whose work is done late, early and out of step with one another.

Nothing that is enqueued happens at once. A stream moves when it must be waited for, and otherwise by chance, so
that code which forgets an event reads what is not there yet or overwrites what is still read. Compute has two modes:
`late` leaves it in its queue like the copies (the test enqueues it with `launch`); otherwise it is the host's own, as
torch on a CPU is, and the host waits where its stream would.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.layout import SlabLayout, allocate
from offload.errors import ReadError
from offload.streaming.pinned import PinnedAllocator, RefusedError


class FakeEvent:
    """Reached at a virtual time, which only a timed one tells."""

    def __init__(self, is_timed: bool) -> None:
        self.at: float | None = None
        self.is_timed = is_timed


class FakeStream(deque):
    """Work not done yet: a callable to run, or an event to wait for."""

    now = 0.0


class DeviceOfNothing:
    """It has no current stream, and nothing beside what is asked of it; uploads are no copies."""

    torch_device, has_own_memory = torch.device("cpu"), True

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def open_uploads(self, resources: Any) -> None: ...

    def upload(self, source: Tensor) -> Tensor:
        return source.to(self.torch_device)

    def bytes_beside_torch(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


class FakeDevice(DeviceOfNothing):
    """One second of virtual time per copy, none for anything else."""

    name = "fake"

    def __init__(
        self,
        seed: int = 0,
        *,
        is_compute_late: bool = False,
        haste: float = 0.3,
        compute_share: float = 0.5,
        latency_s: float = 0.0,
    ) -> None:
        self.copies, self.compute = FakeStream(), FakeStream()
        self._random, self._lock = random.Random(seed), threading.RLock()
        self._is_compute_late, self._haste, self._compute_share = is_compute_late, haste, compute_share
        self.num_copies, self.num_host_waits, self._latency_s = 0, 0, latency_s

    def allocate(self, num_bytes: int) -> Tensor:
        """It begins with a page, as that of a GPU begins at a multiple of 256 bytes."""
        return torch.from_numpy(allocate(num_bytes)).fill_(0xFF).to(self.torch_device)

    def open_allocator(self) -> PinnedAllocator:
        """As much as there is; a test that wants less replaces it."""
        return fake_arena()

    def copy(self, to: Tensor, source: Tensor, stream: FakeStream) -> None:
        def work() -> None:
            to.copy_(source)
            stream.now += 1
            self.num_copies += 1

        self._enqueue(stream, work)

    def fill(self, tensor: Tensor, value: int, stream: FakeStream) -> None:
        self._enqueue(stream, lambda: tensor.fill_(value))

    def launch(self, work: Callable[[], object]) -> None:
        """A kernel: runs when the compute stream gets to it."""
        self._enqueue(self.compute, work)

    def mark(self, stream: FakeStream, *, is_timed: bool = False) -> FakeEvent:
        event = FakeEvent(is_timed)
        self._enqueue(stream, lambda: setattr(event, "at", stream.now))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._enqueue(stream, event)

    def synchronize(self, event: FakeEvent) -> None:
        time.sleep(self._latency_s)
        with self._lock:
            self.num_host_waits += 1
            while event.at is None:
                assert self._advance(), "the host waits for an event that no stream gets to"

    def elapsed_s(self, before: FakeEvent, after: FakeEvent) -> float | None:
        assert before.is_timed and after.is_timed, "CUDA raises for events that were not asked to keep the time"
        return None if after.at is None or before.at is None else after.at - before.at

    def finish(self) -> None:
        """Do everything that is enqueued."""
        with self._lock:
            while self._advance():
                pass
            assert not self.copies and not self.compute, "streams wait for each other"

    def _enqueue(self, stream: FakeStream, work: Callable[[], object] | FakeEvent) -> None:
        with self._lock:
            stream.append(work)
            while self._random.random() < self._haste and self._advance():
                pass
            while stream is self.compute and not self._is_compute_late and self.compute:
                assert self._step(self.compute) or self._step(self.copies), "compute waits for what was never sent"

    def _advance(self) -> bool:
        """One piece of work on a stream chosen by chance; False when none can go on."""
        if self._random.random() < self._compute_share:
            return self._step(self.compute) or self._step(self.copies)
        return self._step(self.copies) or self._step(self.compute)

    def _step(self, stream: FakeStream) -> bool:
        if not stream:
            return False
        if isinstance(stream[0], FakeEvent):
            if stream[0].at is None:
                return False
            stream.now = max(stream.now, stream.popleft().at)
        else:
            stream.popleft()()
        return True


class FakeWay:
    """Locks pages as long as `limit_bytes` lasts."""

    name, is_seen = "fake", True

    def __init__(self, limit_bytes: float = float("inf")) -> None:
        self.left_bytes, self.freed = limit_bytes, 0

    def allocate(self, num_bytes: int) -> np.ndarray:
        if num_bytes > self.left_bytes:
            raise RefusedError(f"the wall is at {self.left_bytes} bytes")
        self.left_bytes -= num_bytes
        return allocate(num_bytes)

    def free(self, array: np.ndarray) -> None:
        self.freed += 1


def fake_arena(limit_bytes: float = float("inf")) -> PinnedAllocator:
    return PinnedAllocator([FakeWay(limit_bytes)])


class ThreadStore:
    """Writes a layout's number into the slab, from threads, as `DiskReader` does; some reads take long, some fail.

    The number stands in every byte from the first weight on, which begins `lead_bytes` behind the slab's own beginning.
    """

    note, is_direct = None, True

    def __init__(self, layouts: Sequence[SlabLayout], lead_bytes: int) -> None:
        self.delay_s, self.bytes_read = 0.0, 0
        self.asked, self.failing = list[int](), set[int]()
        self.num_reading = self.most_reading = 0
        self._number_of = {id(layout): number for number, layout in enumerate(layouts)}
        self._lead_bytes = lead_bytes
        self._pool, self._lock = ThreadPoolExecutor(6), threading.Lock()

    def number_of(self, layout: SlabLayout) -> int:
        return self._number_of[id(layout)]

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        number = self.number_of(layout)
        self.asked.append(number)
        slab[:] = 0xEE
        half = len(slab) // 2
        return [self._pool.submit(self._fill, number, part) for part in (slab[self._lead_bytes : half], slab[half:])]

    def _fill(self, number: int, part: np.ndarray) -> None:
        with self._lock:
            self.num_reading += 1
            self.most_reading = max(self.most_reading, self.num_reading)
        time.sleep(self.delay_s)
        with self._lock:
            self.num_reading -= 1
        if number in self.failing:
            raise ReadError(f"block {number} cannot be read")
        part[:] = number

    def close(self) -> None:
        self._pool.shutdown()
