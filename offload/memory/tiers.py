"""Tiers of memory: the layers and experts that stay in each, and the slots for the others.

One tier after the other gets layers, and routed experts read on demand: layers come before experts,
since every sweep needs all of them, and slots for what passes through come before what stays.
Invariant: a tier never exceeds its budget. A budget too small for the slots is refused, with the
least one that works.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from offload.errors import UserError

# One layer computes while the next is read; a third slot evens out what takes longer.
MIN_SLOTS = 2
WANTED_SLOTS = 3
# Locked buffers through which layers come in that stay on a GPU.
NUM_LOADERS = 2
# Expert slots with which any pass gets through: one computes while another is read.
MIN_EXPERTS = 2
# Experts that are read ahead: a disk is busy with less, and goes on while they compute.
_AHEAD_BYTES = 32 << 20


class LayerTier(StrEnum):
    """The place of a layer between sweeps.

    It is fixed for the run: a sweep is a cycle, so a cache of recent layers would always miss.
    """

    RESIDENT = "resident"  # where it is computed
    PINNED = "host"  # pinned memory of the host, one link away from the GPU
    DISK = "disk"


def spread(layer_bytes: Sequence[int], layers: Sequence[int], budget_bytes: int) -> frozenset[int]:
    """Return as many of `layers` as the budget holds, evenly spread.

    So no long run of layers has to be streamed. Gaps at both ends are half as long: the layers that
    wait in slots when a sweep begins are the first that it needs.
    """
    # No more than this many fit, however they are chosen: larger counts need not be tried.
    smallest_bytes = accumulate(sorted(layer_bytes[layer] for layer in layers))
    most = sum(num_bytes <= budget_bytes for num_bytes in smallest_bytes)
    for count in range(most, 0, -1):
        chosen = frozenset(
            layers[(2 * index + 1) * len(layers) // (2 * count)] for index in range(count)
        )
        if sum(layer_bytes[layer] for layer in chosen) <= budget_bytes:
            return chosen
    return frozenset()


def num_passing(num_slots: int, slot_bytes: int) -> int:
    """Return the number of a pool's slots for experts that pass through.

    Some are computed with while others are read ahead. They are at most a quarter of all, so that a
    small pool keeps experts too, but no fewer than any pass needs.
    """
    return max(MIN_EXPERTS, min(MIN_EXPERTS + -(-_AHEAD_BYTES // slot_bytes), num_slots // 4))


class MemoryTier(NamedTuple):
    """One memory that layers may lie in between sweeps."""

    budget_bytes: int
    fixed_bytes: int  # held before any layer
    passing_bytes: int  # the largest piece that loading sends through it
    refusal: Callable[[int], UserError]  # takes the least room that works


class TierAllocation(NamedTuple):
    """What one tier gets."""

    layers: frozenset[int]  # layers that stay
    num_layer_slots: int  # for layers that pass through
    num_expert_slots: int = 0


class ExpertPoolSize(NamedTuple):
    """Experts that no earlier tier keeps; none are left where they come with their layers."""

    num_left: int = 0
    slot_bytes: int = 1

    @property
    def least_bytes(self) -> int:
        """Return the bytes with which every pass gets through."""
        return self.slot_bytes * min(MIN_EXPERTS, self.num_left)

    @property
    def wanted_bytes(self) -> int:
        """Return the bytes with which reading goes on while experts compute."""
        return self.slot_bytes * min(num_passing(self.num_left, self.slot_bytes), self.num_left)

    def slots_in(self, room_bytes: int) -> int:
        """Return as many slots as there is room and use for."""
        return min(self.num_left, room_bytes // self.slot_bytes)

    def kept_in(self, num_slots: int) -> int:
        """Count the experts that stay there; the other slots are for those that pass through."""
        if num_slots >= self.num_left:
            return self.num_left
        return max(0, num_slots - num_passing(num_slots, self.slot_bytes))


def fill_all(
    tiers: Sequence[MemoryTier], layer_bytes: Sequence[int], num_swept: int, pool: ExpertPoolSize
) -> list[TierAllocation]:
    """Give each tier what those before could not keep; an encoder's layers follow `num_swept`."""
    fillings = []
    left = list(range(len(layer_bytes)))
    for tier in tiers:
        fillings.append(_fill(tier, layer_bytes, left, num_swept, pool))
        left = [layer for layer in left if layer not in fillings[-1].layers]
        num_behind = max(
            pool.num_left - pool.kept_in(fillings[-1].num_expert_slots),
            min(MIN_EXPERTS, pool.num_left),
        )
        # while loading, what stays in one tier passes through the next one
        pool = pool._replace(num_left=num_behind)
    return fillings


def _fill(
    tier: MemoryTier,
    layer_bytes: Sequence[int],
    layers: Sequence[int],
    num_swept: int,
    pool: ExpertPoolSize,
) -> TierAllocation:
    """Return the layers that stay in a tier, and its slots. Raises `UserError`."""
    room_bytes = tier.budget_bytes - tier.fixed_bytes
    slot_bytes = max(layer_bytes)
    all_bytes = sum(layer_bytes[layer] for layer in layers)
    if room_bytes >= max(all_bytes + pool.least_bytes, tier.passing_bytes):
        return TierAllocation(frozenset(layers), 0, pool.slots_in(room_bytes - all_bytes))
    # few small layers take less whole than slots would
    moving_bytes = min(all_bytes, MIN_SLOTS * slot_bytes)
    least_bytes = max(moving_bytes + pool.least_bytes, tier.passing_bytes)
    if room_bytes < least_bytes:
        raise tier.refusal(least_bytes)
    has_room = room_bytes >= MIN_SLOTS * slot_bytes + pool.wanted_bytes
    layers_bytes = room_bytes - (pool.wanted_bytes if has_room else pool.least_bytes)
    num_slots = WANTED_SLOTS if layers_bytes >= WANTED_SLOTS * slot_bytes else MIN_SLOTS
    # encoder layers, which pass through once per prompt, never stay in a tier that streams
    swept = [layer for layer in layers if layer < num_swept]
    staying = spread(layer_bytes, swept, layers_bytes - num_slots * slot_bytes)
    taken_bytes = num_slots * slot_bytes + sum(layer_bytes[layer] for layer in staying)
    return TierAllocation(staying, num_slots, pool.slots_in(room_bytes - taken_bytes))
