"""Experts to a device, by way of a second pool in locked host memory: what is used most there is not read again.

An expert that lies on the host is sent at once: a wait for the slot, a copy, an event. Others are read into a slot of
the host, several at once, and sent by a thread as soon as they are there. Whoever computes waits on the device, and on
the host only for a disk.

The host's pool counts what the device lacked. So what stays on the device is not used here, and gives way to what does
not stay, without either pool knowing of the other.

Invariant: a slot of the host is held from the read of its expert until all copies from it are enqueued, and read into
again only after the last of these is over; an expert that nobody waits for any more is not sent.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.streaming.bounces import Bounces
from offload.streaming.device import Device, Event
from offload.streaming.expert_cache import ExpertCache
from offload.streaming.expert_carrier import ExpertCarrier
from offload.streaming.pinned import PinnedAllocator
from offload.streaming.source import ByteSource, drop, finish

_REGION_BYTES = 1 << 30  # of host memory that is locked at once; what is refused then need not be all


class _Want(NamedTuple):
    """Where on the device an expert is wanted."""

    slot: Tensor
    free: Event  # after which nobody reads the slot
    ready: Future[Event]  # gives the event after the copy


class DeviceExpertCarrier(ExpertCarrier):
    """Brings experts to the memory of a device.

    Args:
        pinned: gives the memory of the host's slots; closed by whoever opened it, after this.
        cache: of the host's slots.
        num_slots: of the host, at least 2.
    """

    def __init__(
        self, source: ByteSource, records: Sequence[SlabLayout], device: Device, pinned: PinnedAllocator,
        cache: ExpertCache, num_slots: int,
    ) -> None:  # fmt: skip
        super().__init__(source, records, device)
        self.pinned, self._cache = pinned, cache
        self._slots, self._is_pinned = _slots_of(pinned, num_slots, max(record.slab_bytes for record in records))
        self._bounces = None if all(self._is_pinned) else Bounces(device, pinned)
        self._sending = threading.Lock()  # an event that is noted stands behind all copies before
        self._lock = threading.Lock()  # of the cache, and of what is wanted
        self._wants: dict[int, list[_Want]] = {}  # by block that is not there yet
        self._queue = deque[int]()  # such blocks for which there was no slot
        self._reads: dict[int, Sequence[Future[None]]] = {}  # by block
        self._sent: dict[int, Event] = {}  # by slot, after the last copy from there
        self._feed = ThreadPoolExecutor(1, thread_name_prefix="offload-experts")

    @property
    def note(self) -> str | None:
        notes = (self.pinned.note, self.source.note)
        return "; ".join(note for note in notes if note) or None

    def begin_pass(self, num_rows: int) -> None:
        """Earlier uses count for less."""
        with self._lock:
            self._cache.begin_pass(num_rows)

    def use(self, blocks: Sequence[int]) -> None:
        """These count here, wherever they come from."""
        with self._lock:
            self._cache.use(blocks)

    def carry(self, block: int, slot: Tensor, free: Event) -> Sequence[Future[Event]]:
        """Send an expert, or let it be sent when it can be; the future gives the event after its copy."""
        want = _Want(slot, free, Future())
        with self._lock:
            is_coming = block in self._wants
            lies_in = None if is_coming else self._cache.hold(block)
            if lies_in is None:
                self._wants.setdefault(block, []).append(want)
            if lies_in is None and not is_coming:
                self._queue.append(block)
        if lies_in is None:
            self._feed.submit(self._read_on)
        elif self._is_pinned[lies_in]:
            self._deliver(block, lies_in, [want])
        else:
            self._feed.submit(self._deliver, block, lies_in, [want])
        return [want.ready]

    def weights(self, block: int, slot: Tensor) -> Tensor:
        """Copies began with the first weight."""
        return slot

    def close(self) -> None:
        """On return nothing is read or copied any more; what was asked for has been cancelled."""
        with self._lock:
            self._queue.clear()
        self._feed.submit(int).result()  # behind whatever the thread is at
        for reads in list(self._reads.values()):
            drop(reads)
        self._feed.shutdown()
        self.device.synchronize(self.device.record(self.device.copies))
        self._slots.clear()

    def _read_on(self) -> None:
        """Read what is wanted, as far as there are slots; in the feeding thread."""
        while (found := self._next_read()) is not None:
            block, slot = found
            try:
                self._start_read(block, slot)
            except BaseException as error:  # whoever wants the expert hears of it
                self._fail(block, error)

    def _next_read(self) -> tuple[int, int] | None:
        """A block and its slot, held from now on."""
        with self._lock:
            while self._queue:
                block = self._queue[0]
                is_wanted = not all(want.ready.cancelled() for want in self._wants[block])
                slot = self._cache.place(block) if is_wanted else None
                if is_wanted and slot is None:
                    return None
                self._queue.popleft()
                if slot is not None:
                    return block, slot
                del self._wants[block]
        return None

    def _start_read(self, block: int, slot: int) -> None:
        if (sent := self._sent.pop(slot, None)) is not None:
            self.device.synchronize(sent)
        record, num_done = self.records[block], count(1)  # counts in one step, whichever readers meet here
        reads = self.source.read(record, self._slots[slot].numpy()[: record.slab_bytes])
        self._reads[block] = reads

        def one_done(_: Future[None]) -> None:
            if next(num_done) == len(reads):
                with suppress(RuntimeError):  # it is closed, and nobody waits for the block
                    self._feed.submit(self._arrive, block, slot)

        for read in reads:
            read.add_done_callback(one_done)

    def _arrive(self, block: int, slot: int) -> None:
        """All reads of a block are over; in the feeding thread."""
        try:
            finish(self._reads.pop(block))
        except BaseException as error:
            self._fail(block, error)
        else:
            with self._lock:
                wants = self._wants.pop(block)
            self._deliver(block, slot, wants)
        self._read_on()

    def _fail(self, block: int, error: BaseException) -> None:
        with self._lock:
            wants = self._wants.pop(block)
            self._cache.forget(block)
        for want in wants:
            if want.ready.set_running_or_notify_cancel():
                want.ready.set_exception(error)

    def _deliver(self, block: int, slot: int, wants: Sequence[_Want]) -> None:
        """Send a block that is there and held, and hold it no more."""
        for want in wants:
            if not want.ready.set_running_or_notify_cancel():
                continue
            try:
                sent = self._send(block, slot, want)
            except BaseException as error:
                want.ready.set_exception(error)
            else:
                want.ready.set_result(sent)
        with self._lock:
            self._cache.release(block)
            is_waited_for = bool(self._queue)
        if is_waited_for:
            self._feed.submit(self._read_on)

    def _send(self, block: int, slot: int, want: _Want) -> Event:
        """Enqueue the copy of an expert; returns the event after it."""
        device, source = self.device, self._slots[slot][self.records[block].sent]
        to = want.slot[: len(source)]
        if not self._is_pinned[slot]:
            assert self._bounces is not None, "they came with the first memory that is not locked"
            device.wait(device.copies, want.free)
            return self._bounces.send(to, source)  # which has copied from the slot when it returns
        with self._sending:
            device.wait(device.copies, want.free)
            device.copy(to, source, device.copies)
            self._sent[slot] = sent = device.record(device.copies)
        return sent


def _slots_of(pinned: PinnedAllocator, num_slots: int, slot_bytes: int) -> tuple[list[Tensor], list[bool]]:
    """So many slots in a few regions, and whether each of them is locked."""
    slots, is_pinned, per_region = list[Tensor](), list[bool](), max(1, _REGION_BYTES // slot_bytes)
    while len(slots) < num_slots:
        size = min(per_region, num_slots - len(slots))
        region = pinned.allocate(size * slot_bytes)
        slots += torch.from_numpy(region.array).view(size, slot_bytes).unbind()
        is_pinned += [region.is_pinned] * size
    return slots, is_pinned
