"""One slot cycle: blocks pass through a few slots, each moved ahead of its use.

From a disk into host memory, from there to a device: a slot is free, filling, ready, in use, and
free again. When the last block of a pass gives its slot back, the first ones of the next are on their
way already, so the link works while the drafter does. A cycle runs no thread and knows no device; a
carrier moves the bytes (`Carry`).

Invariant: a block is moved into a slot only after the one before it was released, and handed out
only when its transfer is complete or bound to complete before the event that is handed out with it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, cycle
from typing import Any, NamedTuple

from torch import Tensor

from offload.streaming.device import Event
from offload.streaming.disk import drop

# Starts moving a block into a slot, which nothing reads any more once the event is reached. The
# block is there once all futures are done and the event that the last of them gives is reached.
# Without an event nothing has to be waited for.
Carry = Callable[[int, Tensor, Event], Sequence[Future[Any]]]


def carried(carry: Carry, block: int, slot: Tensor, free: Event) -> Sequence[Future[Any]]:
    """Start moving a block; what cannot be started raises where the block is waited for."""
    try:
        return carry(block, slot, free)
    except Exception as error:
        failed = Future[None]()
        failed.set_exception(error)
        return [failed]


def arrived(parts: Iterable[Future[Any]]) -> Event:
    """Return the event behind a block's copy, None where it is complete, once all parts are over.

    Raises what moving it has raised, `ReadError` mostly.
    """
    ready = None
    for part in parts:
        ready = part.result()
    return ready


class _Transfer(NamedTuple):
    """A block on its way into a slot."""

    block: int
    slot: Tensor
    parts: Sequence[Future[Any]]


class SlotCycle:
    """The cycle of `blocks`, in the order of their use, through `slots`.

    Slots are flat bytes, each large enough for every block. Only `cancel` may be called by another
    thread than the one that uses the cycle.

    Args:
        carry: see `Carry`; it may wait for the event that it is given.
        is_cycle: whether the first block follows the last.

    Attributes:
        lent: the slots of blocks that were acquired and not released.
    """

    def __init__(
        self, carry: Carry, blocks: Sequence[int], slots: Sequence[Tensor], *, is_cycle: bool = True
    ) -> None:
        self.slots = list(slots)
        self.lent = dict[int, Tensor]()
        self._carry = carry
        self._blocks = blocks
        self._is_cycle = is_cycle
        self._order: Iterator[int] = iter(())
        self._transfers: list[_Transfer] = []

    @property
    def is_at_start(self) -> bool:
        """Return True if the first block comes next, all slots are filling, and none failed."""
        if not self._blocks:
            return not self._transfers
        is_whole = len(self._transfers) == len(self.slots)
        is_first = not self._transfers or self._transfers[0].block == self._blocks[0]
        return is_whole and is_first and not any(map(_has_failed, self._transfers))

    def start(self, free: Event = None, once: Iterable[int] = ()) -> None:
        """Begin with the blocks `once`, then the first; slots are empty after the event `free`."""
        self._order = chain(once, cycle(self._blocks) if self._is_cycle else self._blocks)
        for slot in self.slots:
            self._fill(slot, free)

    def acquire(self, block: int) -> tuple[Tensor, Event]:
        """Return the slot of the next block, until its release, and the event behind its copy.

        Raises what `arrived` does.
        """
        is_next = bool(self._transfers) and self._transfers[0].block == block
        assert is_next, f"block {block} acquired out of order"
        transfer = self._transfers[0]
        ready = arrived(transfer.parts)
        del self._transfers[0]
        self.lent[block] = transfer.slot
        return transfer.slot, ready

    def release(self, block: int, free: Event = None) -> None:
        """Give the slot of `block` back: it is filled again once `free` is reached."""
        self._fill(self.lent.pop(block), free)

    def cancel(self) -> None:
        """Let no transfer begin that has not begun; `acquire` raises where it waits for one."""
        for transfer in self._transfers.copy():
            for part in transfer.parts:
                part.cancel()

    def stop(self) -> None:
        """Cancel running transfers; afterwards none writes into a slot."""
        self.cancel()
        for transfer in self._transfers:
            drop(transfer.parts)
        self._transfers.clear()
        self.lent.clear()

    def _fill(self, slot: Tensor, free: Event) -> None:
        block = next(self._order, None)
        if block is None:
            return
        parts = carried(self._carry, block, slot, free)
        self._transfers.append(_Transfer(block, slot, parts))


def _has_failed(transfer: _Transfer) -> bool:
    return any(
        part.done() and (part.cancelled() or part.exception() is not None)
        for part in transfer.parts
    )
