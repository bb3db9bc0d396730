"""The routed experts of all layers in one pool of slots, where the most used stay.

A pass names a layer's experts once its router has chosen. Those in the pool are handed out first,
while the others are read, several at once. A pass of many rows needs nearly all of them, so experts
of the coming layers are read *ahead*, in order, and those that no row chose give their slots back.

`ExpertCache` decides which block lies in which slot, and a carrier moves missing ones: from a disk
if a CPU computes; through a second pool in host memory to a device, where everything is only
enqueued.

Invariant: a slot is only written while its block is not lent, and after the event of its last use.
After a pass that did not finish, for any reason, the pool is empty.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.interrupts import held_back
from offload.memory.tiers import num_passing
from offload.planning.cost_model import NEVER
from offload.streaming.carriers import Carrier
from offload.streaming.device import POISON, Device, Event, Stall
from offload.streaming.disk import ByteSource, drop, when_all_done
from offload.streaming.expert_cache import ExpertCache, warm_order
from offload.streaming.expert_carrier import DeviceExpertCarrier
from offload.streaming.slot_cycle import arrived, carried

# rows after which the usual use of experts is known
_KNOWN_ROWS = 64
# reading ahead pays if at least this share of it is expected to be needed
_LEAST_SHARE = 0.4
# the experts' slabs of every layer
Records = Sequence[Sequence[SlabLayout]]


class _Arrival(NamedTuple):
    """An expert on its way into a slot."""

    parts: Sequence[Future[Any]]
    # not empty once all parts have arrived, which is asked often: a future would take its lock
    landed: list[bool]


class ExpertPool:
    """Hands out experts, `block` = place of the layer x E + expert.

    Args:
        records: their layouts, layer by layer.
        slots: flat bytes (num_slots, slot_bytes), where the carrier's device computes.
        carrier: moves blocks into slots; it has the layouts by block.
        cache: says which block lies in which of the slots.
        ahead_rows: from this many rows on a pass reads ahead.

    Attributes:
        uses_LE: how often rows have chosen each expert, since the pool was opened.
        num_rows: how many rows these were.
        num_hits, num_misses: requested experts that were in the pool, or were not.
        bytes_read: bytes moved for passes, from disk or host memory.
    """

    def __init__(
        self,
        records: Records,
        slots: Tensor,
        carrier: Carrier,
        cache: ExpertCache,
        ahead_rows: int,
    ) -> None:
        self.layouts = carrier.layouts
        self.carrier = carrier
        self._slots = slots
        self._carry = carrier.carry
        self._cache = cache
        self.ahead_rows = ahead_rows
        self._device = carrier.device
        self._stall = Stall(carrier.device)
        # whether the last pass was finished
        self._is_whole = True
        self._num_experts = len(records[0])
        self.uses_LE = np.zeros((len(records), self._num_experts), np.int64)
        self.num_rows = self.num_hits = self.num_misses = self.bytes_read = 0
        # tests fill slots with NaN before anything is read into them
        self.poison_released = False
        # by slot
        self._arriving: dict[int, _Arrival] = {}
        # slots lie in memory that other work used before
        self._opened = self._device.mark(self._device.compute)
        # by slot
        self._free: dict[int, Event] = {}
        # blocks to read ahead
        self._schedule = deque[int]()
        # blocks that were read ahead and are lent, in order
        self._guessed = dict[int, None]()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its slots."""
        return self._slots.nbytes

    @property
    def stall_s(self) -> float:
        """Return the seconds that passes have waited for experts."""
        return self._stall.known_s

    def begin_pass(self, num_rows: int) -> None:
        """Prepare for a pass of `num_rows`."""
        if not self._is_whole:
            self._empty()
        self._is_whole = False
        self._give_up(self._guessed.copy())
        self._cache.begin_pass(num_rows)
        self.carrier.begin_pass(num_rows)
        self._schedule = deque(range(len(self.layouts)) if self._is_for_all(num_rows) else ())
        self.num_rows += num_rows
        self._read_ahead()

    def bring(
        self, layer: int, experts: Sequence[int], uses: Sequence[int]
    ) -> Iterator[tuple[int, SlabLayout, Tensor]]:
        """Yield each of `experts` with its slab, valid until the next is asked for.

        Raises `ReadError`.

        Args:
            experts: of one layer, rising; later layers follow.
            uses: how many rows have chosen each.
        """
        first = layer * self._num_experts
        cache = self._cache
        self.uses_LE[layer, np.asarray(experts, np.intp)] += np.asarray(uses, np.int64)
        blocks = [first + expert for expert in experts]
        cache.use(blocks, uses)
        slots = {block: slot for block in blocks if (slot := cache.lend(block)) is not None}
        # the routers of these layers have run
        end = first + self._num_experts
        while self._schedule and self._schedule[0] < end:
            self._schedule.popleft()
        self._give_up([block for block in self._guessed if block < end])
        wanted = deque(block for block in blocks if block not in slots)
        self.num_hits += len(slots)
        self.num_misses += len(wanted)
        coming = [block for block, slot in slots.items() if slot in self._arriving]
        self.carrier.use([*wanted, *coming])
        queue = deque(slots)
        self._ask(wanted, slots, queue)
        while queue:
            block = next((block for block in queue if self._has_come(slots[block])), queue[0])
            queue.remove(block)
            yield block - first, self.layouts[block], self._arrived(block, slots[block])
            self._free[slots[block]] = self._device.mark(self._device.compute)
            cache.release(block)
            self._ask(wanted, slots, queue)
        assert not wanted, "a slot is free where nothing is lent"
        self._is_whole = layer + 1 == len(self.uses_LE)

    def warm(
        self, uses_B: Sequence[float], num_kept: int, on_bytes: Callable[[int, int], None]
    ) -> None:
        """Read the most used blocks before the first pass, as many as have room.

        `on_bytes` is called with the bytes that have come, and all of them. Raises `ReadError`.
        """
        blocks = warm_order(uses_B)[:num_kept].tolist()
        total_bytes = sum(self.layouts[block].slab_bytes for block in blocks)
        num_bytes = 0
        asked = list[int]()
        self._is_whole = False
        for block in blocks[: len(self._slots)]:
            if (slot := self._cache.make_room(block)) is None:
                break
            self._start(block, slot)
            asked.append(block)
        for block in asked:
            slot = self._cache.lend(block)
            assert slot is not None, "it is lent since"
            self._arrived(block, slot)
            num_bytes += self.layouts[block].slab_bytes
            on_bytes(num_bytes, total_bytes)
            self._cache.release(block)
            self._cache.release(block)
        self.bytes_read = 0
        self._is_whole = True

    def stop(self) -> None:
        """Return once nothing is read any more."""
        self._empty()
        self.carrier.close()

    def _ask(self, wanted: deque[int], slots: dict[int, int], queue: deque[int]) -> None:
        """Start reading missing experts, as many as have slots, then those that may come next."""
        while wanted:
            slot = self._cache.make_room(wanted[0])
            if slot is None and not queue and self._guessed:
                self._give_up([next(reversed(self._guessed))])
                continue
            if slot is None:
                return
            block = wanted.popleft()
            slots[block] = slot
            self._start(block, slot)
            queue.append(block)
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._schedule:
            block = self._schedule[0]
            if self._cache.lend(block) is not None:
                self._cache.release(block)
            elif (slot := self._cache.make_room(block)) is not None:
                self._guessed[block] = None
                self._start(block, slot)
            else:
                return
            self._schedule.popleft()

    def _is_for_all(self, num_rows: int) -> bool:
        """Return True if all missing experts are read, as a pass is likely to need most."""
        if num_rows < self.ahead_rows:
            return False
        is_known = self.num_rows >= _KNOWN_ROWS
        return not is_known or self._cache.missing_share(num_rows) >= _LEAST_SHARE

    def _empty(self) -> None:
        """Empty the pool: a stopped pass leaves it half done."""
        self._schedule.clear()
        self._guessed.clear()
        for slot in list(self._arriving):
            self._drop(slot)
        self._free.clear()
        # kernels of that pass may still run
        self._opened = self._device.mark(self._device.compute)
        self._cache = self._cache.emptied()

    def _give_up(self, blocks: Sequence[int] | dict[int, None]) -> None:
        for block in blocks:
            del self._guessed[block]
            self._cache.release(block)

    def _start(self, block: int, slot: int) -> None:
        """Start a block's transfer into its slot, after any earlier one into that slot."""
        self._drop(slot)
        if self.poison_released:
            # After the copy of an abandoned guess, which may still be running.
            self._device.wait(self._device.copies, self._free.get(slot, self._opened))
            self._device.fill(self._slots[slot], POISON, self._device.copies)
        # an unrecorded transfer would overwrite later content of the slot
        with held_back():
            free = self._free.get(slot, self._opened)
            parts = carried(self._carry, block, self._slots[slot], free)
            coming = self._arriving[slot] = _Arrival(parts, [])
            when_all_done(parts, lambda _: coming.landed.append(True))
        self.bytes_read += self.layouts[block].slab_bytes

    def _drop(self, slot: int) -> None:
        """Wait until no transfer into a slot is running."""
        if slot in self._arriving:
            drop(self._arriving[slot].parts)
            del self._arriving[slot]

    def _has_come(self, slot: int) -> bool:
        return slot not in self._arriving or bool(self._arriving[slot].landed)

    def _arrived(self, block: int, slot: int) -> Tensor:
        """Return the slab, for work enqueued from now on, once it has arrived."""
        if slot in self._arriving:
            device = self._device
            before = device.mark(device.compute, is_timed=True)
            ready = arrived(self._arriving[slot].parts)
            del self._arriving[slot]
            device.wait(device.compute, ready)
            self._stall.add(before, device.mark(device.compute, is_timed=True))
        return self.carrier.weights(block, self._slots[slot])


def open_pool(
    source: ByteSource,
    records: Records,
    num_slots: int,
    device: Device,
    resources: ExitStack,
    *,
    num_host_slots: int = 0,
    ahead_rows: int = NEVER,
    uses_B: np.ndarray | None = None,
) -> ExpertPool:
    """Open an empty pool of `num_slots` where `device` computes; `resources` closes it.

    `uses_B` is the expected use of each block, if known. `num_host_slots` are the slots of the
    second pool, through which a device gets its experts.
    """
    flat = [record for layer in records for record in layer]
    slot_bytes = max(record.slab_bytes for record in flat)
    if not device.has_own_memory:
        carrier = Carrier(source, flat, (), device)
    else:
        pinned = device.open_allocator()
        resources.callback(pinned.close)
        passing = num_passing(num_host_slots, slot_bytes)
        behind = ExpertCache(len(flat), num_host_slots, num_passing=passing)
        carrier = DeviceExpertCarrier(source, flat, device, pinned, behind, num_host_slots)
    slots = device.allocate(num_slots * slot_bytes).view(num_slots, slot_bytes)
    passing = num_passing(num_slots, slot_bytes)
    cache = ExpertCache(len(flat), num_slots, uses_B=uses_B, num_passing=passing)
    pool = ExpertPool(records, slots, carrier, cache, ahead_rows)
    resources.callback(pool.stop)
    return pool
