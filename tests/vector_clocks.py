"""Who may race with whom, by vector clocks: two accesses that nothing orders are a race, whatever a schedule does.

Streams of a device and threads of the host each have a clock; an event, a future, a lock or a queue of tasks brings one
up to the other. Work is done at once, so numbers are right and nothing depends on luck: what is looked at is whether
it *had* to come in this order. Memory is known by blocks, and each remembers who has written and read it last.
"""

import bisect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_device import DeviceOfNothing, FakeWay
from torch import Tensor

from offload.checkpoint.layout import allocate
from offload.streaming import expert_carrier, sender
from offload.streaming.pinned import PinnedAllocator

Clock = dict[str, int]
BLOCK = 256
_THREADS, _HOST = count(), torch.device("cpu")


class Access(NamedTuple):
    """One access to one block, by a stream or a thread."""

    actor: str
    count: int  # of its clock
    deed: str


class Region(NamedTuple):
    """Memory that is looked after."""

    lo: int
    hi: int
    block: int
    writes: dict[int, Access]  # by block
    reads: dict[int, dict[str, Access]]  # by block and actor


class Clocks:
    """All clocks, and what has been found.

    Attributes:
        races: how often these two met without an order, by what they did.
    """

    def __init__(self) -> None:
        self._clock_of, self._regions, self._lock = dict[str, Clock](), list[Region](), threading.RLock()
        self.races, self.num_accesses = Counter[tuple[str, str]](), 0

    @staticmethod
    def thread(thread: threading.Thread | None = None) -> str:
        """The actor that this thread is, or another one; numbers of threads that have ended are given out again."""
        known: Any = thread or threading.current_thread()
        if not hasattr(known, "actor"):
            known.actor = f"{known.name}, {next(_THREADS)}"
        return str(known.actor)

    def know(self, memory: Tensor | np.ndarray, block: int = BLOCK) -> None:
        """From now on look after it."""
        lo, num_bytes = address_of(memory)
        with self._lock:
            index = bisect.bisect_left(self._regions, lo, key=lambda region: region.hi - 1)
            while index < len(self._regions) and self._regions[index].lo < lo + num_bytes:
                del self._regions[index]  # memory that was let go
            if num_bytes:
                self._regions.insert(index, Region(lo, lo + num_bytes, block, {}, {}))

    def now(self, actor: str | None = None) -> Clock:
        """A copy of an actor's clock, of this thread's where none is named; it goes on."""
        with self._lock:
            actor = actor or self.thread()
            clock = self._clock_of.setdefault(actor, {})
            clock[actor] = clock.get(actor, 0) + 1
            return dict(clock)

    def join(self, seen: Clock, actor: str | None = None) -> None:
        """What an actor does from now on comes behind all that `seen` tells of."""
        with self._lock:
            clock = self._clock_of.setdefault(actor or self.thread(), {})
            for actor_seen, count in seen.items():
                clock[actor_seen] = max(clock.get(actor_seen, 0), count)

    def launch(self, stream: str) -> None:
        """What is enqueued on a stream comes behind what this thread has done."""
        self.join(self.now(), stream)

    def access(self, actor: str, memory: Tensor | np.ndarray, deed: str, *, writes: bool) -> None:
        """Note it, and every race that it runs."""
        lo, num_bytes = address_of(memory)
        with self._lock:
            index = bisect.bisect_right(self._regions, lo, key=lambda region: region.lo) - 1
            if not num_bytes or index < 0 or lo >= self._regions[index].hi:
                return
            region, seen = self._regions[index], self.now(actor)
            access = Access(actor, seen[actor], deed)
            self.num_accesses += 1
            first, last = (lo - region.lo) // region.block, (lo + num_bytes - 1 - region.lo) // region.block
            for block in range(first, last + 1):
                before = [region.writes[block]] if block in region.writes else []
                readers = region.reads.setdefault(block, {})
                for earlier in [*before, *readers.values()] if writes else before:
                    if seen.get(earlier.actor, 0) < earlier.count:
                        self.races[earlier.deed, deed] += 1
                if writes:
                    region.writes[block] = access
                    readers.clear()
                else:
                    readers[actor] = access

    def use(self, stream: str, memory: Tensor, deed: str, *, writes: bool = False) -> None:
        """A kernel of this stream."""
        self.launch(stream)
        self.access(stream, memory, deed, writes=writes)


def address_of(memory: Tensor | np.ndarray) -> tuple[int, int]:
    """Where it begins, and how many bytes it spans."""
    if isinstance(memory, Tensor):
        last = sum((size - 1) * step for size, step in zip(memory.shape, memory.stride(), strict=True))
        return memory.data_ptr(), (last + 1) * memory.element_size() if memory.numel() else 0
    return memory.ctypes.data, memory.nbytes


class ClockEvent(NamedTuple):
    """What a stream had behind it where it was recorded, and at which place of the program."""

    seen: Clock
    site: str


class ClockDevice(DeviceOfNothing):
    """Does everything at once, and tells the clocks.

    Args:
        forgets: a place of the program, as in `sites`, that is taken to have been forgotten.

    Attributes:
        sites: places where the program waits, for a stream or a thread, or records what is waited for.
    """

    name, copies, compute = "clocks", "copies", "compute"

    def __init__(
        self, clocks: Clocks, *, forgets: str | None = None, limit_bytes: float = float("inf"),
        torch_device: torch.device = _HOST,
    ) -> None:  # fmt: skip
        self.clocks, self._forgets, self._limit_bytes, self.sites = clocks, forgets, limit_bytes, set[str]()
        self._memory, self._own, self.torch_device = list[Tensor](), threading.local(), torch_device

    def allocate(self, num_bytes: int) -> Tensor:
        """As torch's allocator does it: what has computed with this memory before may still be at it."""
        memory = torch.from_numpy(allocate(num_bytes)).to(self.torch_device)
        self.clocks.know(memory)
        self._memory.append(memory)
        self.clocks.use(self.compute, memory, "another program before", writes=True)
        return memory

    def open_allocator(self) -> PinnedAllocator:
        return PinnedAllocator([ClockWay(self.clocks, self._limit_bytes)])

    def copy(self, to: Tensor, source: Tensor, stream: str) -> None:
        with self._moving():
            self.clocks.launch(stream)
            self.clocks.access(stream, source, "a copy reads", writes=False)
            self.clocks.access(stream, to, "a copy writes", writes=True)
            to.copy_(source)

    def fill(self, tensor: Tensor, value: int, stream: str) -> None:
        with self._moving():
            self.clocks.use(stream, tensor, "poison", writes=True)
            tensor.fill_(value)

    def mark(self, stream: str, *, is_timed: bool = False) -> ClockEvent:
        site = f"record at {caller()}"
        self.clocks.launch(stream)
        return ClockEvent({} if site == self._forgets else self.clocks.now(stream), site)

    def wait(self, stream: str, event: ClockEvent) -> None:
        if self._remembers(f"wait at {caller()}", event):
            self.clocks.launch(stream)
            self.clocks.join(event.seen, stream)

    def synchronize(self, event: ClockEvent) -> None:
        if self._remembers(f"synchronize at {caller()}", event):
            self.clocks.join(event.seen)

    def elapsed_s(self, before: ClockEvent, after: ClockEvent) -> float:
        return 0.0

    def give_back(self) -> None:
        """All memory goes to the next that computes."""
        for memory in self._memory:
            self.clocks.use(self.compute, memory, "another program behind", writes=True)

    def wait_stream(self, stream: str, other: str, site: str) -> None:
        """What a stream does from now on comes behind what another one has to do so far."""
        self.sites.add(site)
        if site != self._forgets:
            self.clocks.launch(stream)
            self.clocks.join(self.clocks.now(other), stream)

    def hear(self, future: Any, site: str) -> None:
        """What this thread does from now on comes behind a future's end."""
        self.sites.add(site)
        if site != self._forgets:
            self.clocks.join(getattr(future, "seen", {}))

    def _remembers(self, site: str, event: ClockEvent) -> bool:
        self.sites |= {site, event.site}
        return site != self._forgets

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """What is run meanwhile is no kernel of the compute stream."""
        self._own.is_moving = True
        yield
        self._own.is_moving = False

    @property
    def is_moving(self) -> bool:
        """Whether what this thread runs is the device's own work."""
        return getattr(self._own, "is_moving", False)


def caller(depth: int = 2) -> str:
    """The place in the program that has called the asking function, or `depth` calls above."""
    frame = sys._getframe(depth)
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}"


class ClockWay(FakeWay):
    """Locked memory, looked after until it is unlocked."""

    name = "clocks"

    def __init__(self, clocks: Clocks, limit_bytes: float) -> None:
        super().__init__(limit_bytes)
        self._clocks = clocks

    def allocate(self, num_bytes: int) -> np.ndarray:
        array = super().allocate(num_bytes)
        self._clocks.know(array)
        return array

    def free(self, array: np.ndarray) -> None:
        self._clocks.access(self._clocks.thread(), array, "it is unlocked", writes=True)


class _Locked:
    """A lock whose next holder comes behind the last."""

    def __init__(self, clocks: Clocks) -> None:
        self._lock, self._clocks, self._seen = threading.Lock(), clocks, Clock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._clocks.join(self._seen)

    def __exit__(self, *_: object) -> None:
        self._seen = self._clocks.now()
        self._lock.release()


def follow_threads(patch: pytest.MonkeyPatch, device: ClockDevice) -> None:
    """Futures, tasks and locks of the carriers order the threads that use them; bounce buffers are written there."""
    clocks = device.clocks
    submit, shutdown, call = ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown, Future.add_done_callback
    result, exception = Future.result, Future.exception

    def ended(name: str) -> None:
        end = getattr(Future, name)

        def noted(self: Any, value: Any) -> None:
            self.seen = clocks.now()
            end(self, value)

        patch.setattr(Future, name, noted)

    def heard(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(self: Any, timeout: float | None = None) -> Any:
            try:
                return ask(self, timeout)
            finally:
                device.hear(self, f"{ask.__name__} at {caller()}")

        return asked

    def submitted(self: Any, work: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        seen = clocks.now()

        def begun() -> Any:
            clocks.join(seen)
            return work(*args, **options)

        return submit(self, begun)

    def shut(self: Any, wait: bool = True, **options: Any) -> None:
        shutdown(self, wait, **options)
        for thread in self._threads if wait else ():
            clocks.join(clocks.now(clocks.thread(thread)))

    def called(self: Any, tell: Callable[[Any], Any]) -> None:
        def heard_of(future: Any) -> None:
            clocks.join(getattr(future, "seen", {}))
            tell(future)

        call(self, heard_of)

    ended("set_result")
    ended("set_exception")
    patch.setattr(Future, "result", heard(result))
    patch.setattr(Future, "exception", heard(exception))
    patch.setattr(Future, "add_done_callback", called)
    patch.setattr(ThreadPoolExecutor, "submit", submitted)
    patch.setattr(ThreadPoolExecutor, "shutdown", shut)
    for kind, lock in ((sender.Sender, "_sending"), (expert_carrier.DeviceExpertCarrier, "_lock")):
        _behind(patch, kind, lambda carrier, lock=lock: setattr(carrier, lock, _Locked(clocks)))
    # where no memory could be locked for them, too
    _behind(patch, sender.Bounces, lambda bounces: [clocks.know(buffer.array) for buffer in bounces.buffers])
    patch.setattr(sender.Bounces, "send", _with_writes(sender.Bounces.send, clocks))


def _behind(patch: pytest.MonkeyPatch, kind: Any, act: Callable[[Any], object]) -> None:
    """Let `act` follow the making of an object of this kind."""
    make = kind.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        act(self)

    patch.setattr(kind, "__init__", made)


def _with_writes(send: Callable[..., Any], clocks: Clocks) -> Callable[..., Any]:
    """The host fills a bounce buffer just before it is copied from, in the thread that enqueues the copy."""

    def sent(self: Any, to: Tensor, source: Tensor, **options: Any) -> Any:
        copy = self._device.copy

        def filled(part: Tensor, bounce: Tensor, stream: str) -> None:
            clocks.access(clocks.thread(), bounce, "the host fills a bounce buffer", writes=True)
            copy(part, bounce, stream)

        self._device.copy = filled
        try:
            return send(self, to, source, **options)
        finally:
            del self._device.copy

    return sent
