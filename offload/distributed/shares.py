"""How a model is divided among ranks: fractions of every layer, or consecutive layers.

A rank streams what does not stay in its memory, over its own link, while all ranks compute. Hence
within T seconds it manages (m + l T) / B of B bytes, and the shares are those of the least T at
which all of them make up the whole; memory in proportion to a share (slots, keys and values) is
counted with it. No torch, no clock. Invariant: fractions add up to 1; stages follow each other,
cover all layers, and none is empty.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add, itemgetter
from typing import Any, NamedTuple

from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.tiers import MIN_SLOTS, WANTED_SLOTS
from offload.units import format_bytes

_HALVINGS = 60  # of an interval of seconds: more digits than a float64 has
_LONGEST_S = 1e12  # of any pass
Cost = tuple[float, ...]  # compared number by number
Cuts = dict[int, tuple[Cost, tuple[range, ...]]]  # by the number of layers taken so far


class RankCapacity(NamedTuple):
    """The memory and rates of one rank for its part of the layers."""

    memory_bytes: int  # where layers are computed: for layers that stay, slots, and keys and values
    link_bytes_per_s: float  # to that memory
    # what this rank alone would need to compute all layers in one pass; 0: unknown
    compute_s: float = 0.0
    host_bytes: int = 0  # pinned memory at the other end of the link
    disk_bytes_per_s: float = math.inf  # for layers that are not in host memory either
    name: str = ""  # in refusals, which else use its number

    @classmethod
    def beside(
        cls,
        held: MemoryPlan,
        kv_bytes: int,
        *,
        ram_bytes: int,
        gpu_bytes: int | None,
        **labels: Any,
    ) -> "RankCapacity":
        """Return the capacity that is left after a plan's fixed parts and other keys and values."""
        held_bytes = held.fixed_bytes - held.kv_bytes + kv_bytes
        if gpu_bytes is None:
            return cls(ram_bytes - held_bytes, **labels)
        host_bytes = max(0, ram_bytes - held.runtime_bytes - held.table_bytes)
        return cls(gpu_bytes - held_bytes, host_bytes=host_bytes, **labels)


@dataclass(frozen=True)
class Load:
    """What is divided among ranks."""

    layer_bytes: Sequence[int]
    kv_bytes: int = 0  # of all layers
    num_slots: int = WANTED_SLOTS  # of a rank that streams

    @cached_property
    def num_bytes(self) -> int:
        """Return B, the bytes of all layers."""
        return sum(self.layer_bytes)

    @cached_property
    def slots_bytes(self) -> int:
        """Return the bytes of the slots, each for a whole layer."""
        return self.num_slots * max(self.layer_bytes)

    @cached_property
    def least_slots_bytes(self) -> int:
        """Return the bytes of the fewest slots that a rank can stream with."""
        return min(self.num_slots, MIN_SLOTS) * max(self.layer_bytes)


def shard_fractions(ranks: Sequence[RankCapacity], load: Load) -> tuple[float, ...]:
    """Return each rank's share of every layer, such that the slowest rank finishes earliest.

    Where everything stays in memory, shares follow computing speed, or memory where that is
    unknown. Raises `UserError` where all ranks together have no room for two slots.
    """
    _check(ranks)
    most = [_most_share(rank, load, _LONGEST_S) for rank in ranks]
    if sum(most) < 1:
        needed_bytes = load.least_slots_bytes + load.kv_bytes
        room_bytes = sum(max(0, rank.memory_bytes) for rank in ranks)
        has = format_bytes(room_bytes)
        least = format_bytes(needed_bytes)
        shortage = f"all ranks together have {has} for layers, and {least} is the least that works"
        raise UserError(
            f"{shortage}: give them {format_bytes(needed_bytes - room_bytes)} more, or lower `context`"
        )
    seconds = _least(lambda limit_s: sum(_most_share(rank, load, limit_s) for rank in ranks) >= 1)
    shares = [_most_share(rank, load, seconds) for rank in ranks]
    return tuple(share / sum(shares) for share in shares)


def stage_layers(ranks: Sequence[RankCapacity], load: Load) -> tuple[range, ...]:
    """Return each rank's layers: least time of the slowest stage, then least time in all.

    Remaining freedom evens out memory. Raises `UserError` where there are more ranks than layers,
    or where memory is too small for any division.
    """
    _check(ranks)
    num_layers = len(load.layer_bytes)
    ends = [0, *accumulate(load.layer_bytes)]
    if len(ranks) > num_layers:
        raise UserError(
            f"{len(ranks)} stages need as many layers, got {num_layers}: take fewer ranks"
        )

    def seconds(rank: int, layers: range) -> Cost:
        return (_stage_s(ranks[rank], load, ends[layers.stop] - ends[layers.start]),)

    def effort(rank: int, layers: range) -> Cost:
        (own_s,) = seconds(rank, layers)
        own_bytes = ends[layers.stop] - ends[layers.start]
        if own_s > slowest_s:
            return math.inf, math.inf
        # the sum is least where all ranks are equally full
        fullness = own_bytes**2 / max(1, ranks[rank].memory_bytes)
        return round(own_s / slowest_s, 9) if slowest_s else 0.0, fullness

    (slowest_s,), _ = _best_cut(len(ranks), num_layers, seconds, max)
    if math.isinf(slowest_s):
        raise _no_room(ranks, load)
    return _best_cut(len(ranks), num_layers, effort, _sum)[1]


def stage_link_s(rank: RankCapacity, load: Load, own_bytes: int) -> float:
    """Return the seconds that a rank's link needs in every pass for layers of `own_bytes`."""
    kv_bytes = load.kv_bytes * own_bytes / load.num_bytes
    return _link_s(rank, own_bytes, kv_bytes, load.slots_bytes + kv_bytes)


def _stage_s(rank: RankCapacity, load: Load, own_bytes: int) -> float:
    """Return the seconds of one stage by itself; infinite where there is no room for it."""
    share = own_bytes / load.num_bytes
    if min(own_bytes, load.least_slots_bytes) + share * load.kv_bytes > rank.memory_bytes:
        return math.inf
    return max(rank.compute_s * share, stage_link_s(rank, load, own_bytes))


def _best_cut(
    num_ranks: int,
    num_layers: int,
    cost: Callable[[int, range], Cost],
    join: Callable[[Cost, Cost], Cost],
) -> tuple[Cost, tuple[range, ...]]:
    """Return the least joined cost of ranks with consecutive layers, and the layers of each.

    By dynamic programming: to take as many as one may from the first rank on is not best where
    layers are uneven, since the last ones must not be left without any.
    """
    best: Cuts = {
        hi: (cost(0, range(hi)), (range(hi),)) for hi in range(1, num_layers - num_ranks + 2)
    }
    for rank in range(1, num_ranks):
        cuts: Cuts = {}
        for hi in range(rank + 1, num_layers - num_ranks + rank + 2):
            options = [
                (join(best[lo][0], cost(rank, range(lo, hi))), (*best[lo][1], range(lo, hi)))
                for lo in best
                if lo < hi
            ]
            cuts[hi] = min(options, key=itemgetter(0))
        best = cuts
    return best[num_layers]


def _sum(cost: Cost, other: Cost) -> Cost:
    return tuple(map(add, cost, other))


def _no_room(ranks: Sequence[RankCapacity], load: Load) -> UserError:
    least_bytes = load.least_slots_bytes + load.kv_bytes * max(load.layer_bytes) // load.num_bytes
    worst, rank = min(enumerate(ranks), key=lambda pair: pair[1].memory_bytes)
    has = format_bytes(rank.memory_bytes)
    least = format_bytes(least_bytes)
    least_needs = f"two slots with a layer's keys and values take {least}"
    shortage = f"rank {rank.name or worst} has {has} for layers, and {least_needs}"
    return UserError(f"{shortage}: give it {format_bytes(least_bytes - rank.memory_bytes)} more")


def _link_s(rank: RankCapacity, own_bytes: float, kv_bytes: float, held_bytes: float) -> float:
    """Return the seconds that a rank's link needs for these layers: 0 if all of them stay."""
    if own_bytes + kv_bytes <= rank.memory_bytes * (1 + 1e-12):  # by rounding it may be more
        return 0.0
    streamed_bytes = own_bytes - max(0.0, rank.memory_bytes - held_bytes)
    disk_s = max(0.0, streamed_bytes - rank.host_bytes) / rank.disk_bytes_per_s
    return max(0.0, streamed_bytes / rank.link_bytes_per_s, disk_s)


def _most_share(rank: RankCapacity, load: Load, limit_s: float) -> float:
    """Return the largest share, up to 1, of a rank within `limit_s`; it never falls with time."""
    memory_bytes = max(0, rank.memory_bytes)
    carried_bytes = _carried_bytes(rank, limit_s)
    whole_bytes = load.num_bytes + load.kv_bytes
    # something stays beside the slots
    with_slots = (memory_bytes + carried_bytes) / (whole_bytes + load.slots_bytes)
    streamed = max(carried_bytes / load.num_bytes, with_slots)
    least_bytes = load.least_slots_bytes + load.kv_bytes
    room = memory_bytes / least_bytes if least_bytes else math.inf
    share = min(1.0, max(memory_bytes / whole_bytes, min(room, streamed)))
    return min(share, limit_s / rank.compute_s) if rank.compute_s else share


def _carried_bytes(rank: RankCapacity, limit_s: float) -> float:
    """Return the bytes that reach a rank within `limit_s`, by its link, its host and its disk."""
    carried_bytes = rank.link_bytes_per_s * limit_s
    if math.isinf(rank.disk_bytes_per_s):
        return carried_bytes
    return min(carried_bytes, rank.host_bytes + rank.disk_bytes_per_s * limit_s)


def _least(holds: Callable[[float], bool]) -> float:
    """Return the least seconds for which a monotone condition holds."""
    if holds(0.0):
        return 0.0
    lo = _LONGEST_S
    while holds(lo) and lo > 1e-12:
        hi = lo
        lo = lo / 2
    for _ in range(_HALVINGS):
        middle = (lo + hi) / 2
        lo, hi = (lo, middle) if holds(middle) else (middle, hi)
    return hi


def _check(ranks: Sequence[RankCapacity]) -> None:
    assert ranks, "there is one rank at least"
    assert all(rank.link_bytes_per_s > 0 and rank.compute_s >= 0 for rank in ranks), (
        "a link carries something"
    )
    known = [rank.compute_s > 0 for rank in ranks]
    assert all(known) or not any(known), "computing is known of all ranks or of none"
