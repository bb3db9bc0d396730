"""How experts reach a device: by way of a second pool, in locked host memory.

What is used most there is not read again. That pool counts what the device lacked: what stays on
the device is not used here, and gives way to what does not stay, without either pool knowing of the
other. Invariants are those of `carriers`.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.streaming.carriers import FeedingCarrier
from offload.streaming.device import Device, Event
from offload.streaming.disk import ByteSource, drop, finish, when_all_done
from offload.streaming.expert_cache import ExpertCache
from offload.streaming.pinned import PinnedAllocator

# host memory that is locked at once; where that is refused, smaller regions may not be
_REGION_BYTES = 1 << 30


class _Delivery(NamedTuple):
    """Where on the device an expert is wanted."""

    slot: Tensor
    # the event after which nothing reads the slot
    free: Event
    # gives the event after the copy
    ready: Future[Event]


class DeviceExpertCarrier(FeedingCarrier):
    """Brings experts to the memory of a device, by way of slots on the host.

    Args:
        cache: says which expert lies in which of the host's slots.
        num_slots: slots of the host, at least 2.
    """

    def __init__(
        self,
        source: ByteSource,
        records: Sequence[SlabLayout],
        device: Device,
        pinned: PinnedAllocator,
        cache: ExpertCache,
        num_slots: int,
    ) -> None:
        super().__init__(source, records, (), device, pinned)
        self._cache = cache
        slot_bytes = max(record.slab_bytes for record in records)
        self._slots, self._is_pinned = _slots_of(pinned, num_slots, slot_bytes)
        if not all(self._is_pinned):
            self.sender.expect_unlocked()
        # guards the cache and what is wanted
        self._lock = threading.Lock()
        # by block that is not there yet
        self._deliveries: dict[int, list[_Delivery]] = {}
        # blocks of these for which there was no slot
        self._queue = deque[int]()
        # by block
        self._reads: dict[int, Sequence[Future[None]]] = {}

    def begin_pass(self, num_rows: int) -> None:
        """Let earlier uses count for less."""
        with self._lock:
            self._cache.begin_pass(num_rows)

    def use(self, blocks: Sequence[int]) -> None:
        """Count the uses of these blocks, wherever the blocks come from."""
        with self._lock:
            self._cache.use(blocks)

    def carry(self, block: int, slot: Tensor, free: Event) -> Sequence[Future[Event]]:
        """Send an expert, or let it be sent when it can be.

        The future gives the event after its copy.
        """
        delivery = _Delivery(slot, free, Future())
        with self._lock:
            is_coming = block in self._deliveries
            lies_in = None if is_coming else self._cache.lend(block)
            if lies_in is None:
                self._deliveries.setdefault(block, []).append(delivery)
            if lies_in is None and not is_coming:
                self._queue.append(block)
        if lies_in is None:
            self._feed.submit(self._read_on)
        elif self._is_pinned[lies_in]:
            self._deliver(block, lies_in, [delivery])
        else:
            self._feed.submit(self._deliver, block, lies_in, [delivery])
        return [delivery.ready]

    def close(self) -> None:
        """Return once nothing is read or copied any more; what was asked for has been cancelled."""
        with self._lock:
            self._queue.clear()
        # returns once the thread has finished what it is doing
        self._feed.submit(int).result()
        for reads in list(self._reads.values()):
            drop(reads)
        self._feed.shutdown()
        self.device.synchronize(self.device.mark(self.device.copies))
        self._slots.clear()

    def _read_on(self) -> None:
        """Read what is wanted, as far as there are slots; in the feeding thread."""
        while (next_read := self._next_read()) is not None:
            block, slot = next_read
            try:
                self._start_read(block, slot)
            # raised where the expert is waited for
            except BaseException as error:
                self._fail(block, error)

    def _next_read(self) -> tuple[int, int] | None:
        """Return the next block to read and its slot, which is lent from now on."""
        with self._lock:
            while self._queue:
                block = self._queue[0]
                is_wanted = not all(
                    delivery.ready.cancelled() for delivery in self._deliveries[block]
                )
                slot = self._cache.make_room(block) if is_wanted else None
                if is_wanted and slot is None:
                    return None
                self._queue.popleft()
                if slot is not None:
                    return block, slot
                del self._deliveries[block]
        return None

    def _start_read(self, block: int, slot: int) -> None:
        """Read an expert into a slot of host memory, and send it on once all has arrived."""
        if (sent := self.sender.last.pop(slot, None)) is not None:
            self.device.synchronize(sent)
        record = self.layouts[block]
        reads = self.source.read(record, self._slots[slot].numpy()[: record.slab_bytes])
        self._reads[block] = reads

        def has_come(_: Future[None]) -> None:
            # a closed executor refuses; then the block is not waited for
            with suppress(RuntimeError):
                self._feed.submit(self._arrive, block, slot)

        when_all_done(reads, has_come)

    def _arrive(self, block: int, slot: int) -> None:
        """Send a block whose reads are all over; in the feeding thread."""
        try:
            finish(self._reads.pop(block))
        except BaseException as error:
            self._fail(block, error)
        else:
            with self._lock:
                deliveries = self._deliveries.pop(block)
            self._deliver(block, slot, deliveries)
        self._read_on()

    def _fail(self, block: int, error: BaseException) -> None:
        with self._lock:
            deliveries = self._deliveries.pop(block)
            self._cache.forget(block)
        for delivery in deliveries:
            if delivery.ready.set_running_or_notify_cancel():
                delivery.ready.set_exception(error)

    def _deliver(self, block: int, slot: int, deliveries: Sequence[_Delivery]) -> None:
        """Send a block that is there and lent, and release it."""
        weights = self._slots[slot][self.layouts[block].sent]
        is_locked = self._is_pinned[slot]
        for delivery in deliveries:
            if not delivery.ready.set_running_or_notify_cancel():
                continue
            try:
                where = (delivery.slot, delivery.free, weights)
                sent = self.sender.send(*where, is_locked=is_locked, host_slot=slot)
            except BaseException as error:
                delivery.ready.set_exception(error)
            else:
                delivery.ready.set_result(sent)
        with self._lock:
            self._cache.release(block)
            is_waited_for = bool(self._queue)
        if is_waited_for:
            self._feed.submit(self._read_on)


def _slots_of(
    pinned: PinnedAllocator, num_slots: int, slot_bytes: int
) -> tuple[list[Tensor], list[bool]]:
    """Return the slots, in a few regions, and whether each of them is locked."""
    slots = list[Tensor]()
    is_pinned = list[bool]()
    per_region = max(1, _REGION_BYTES // slot_bytes)
    while len(slots) < num_slots:
        size = min(per_region, num_slots - len(slots))
        region = pinned.allocate(size * slot_bytes)
        slots += region.tensor.view(size, slot_bytes).unbind()
        is_pinned += [region.is_pinned] * size
    return slots, is_pinned
