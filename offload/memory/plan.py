"""The memory plan as a value: what lies where, its sums, and how tiers of memory are filled.

With a GPU, what is computed with counts against `gpu_bytes` and only what feeds the GPU against
`ram_bytes`. One tier after the other gets layers, and routed experts read on demand: layers come
before experts, since every sweep needs all of them, and slots for what passes through come before
what stays. Invariants: every byte of a plan is in exactly one of the two sums, `total_bytes` and
`gpu_total_bytes`; a tier is given no more than its budget, and one that cannot hold what has to
pass through is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from offload.checkpoint.sizes import ModelShape
from offload.errors import UserError
from offload.sampling_options import NOISE_POSITIONS
from offload.trees.topology import PACES, most_rows
from offload.units import format_bytes

# committed tokens that one sweep takes in where nothing speaks for more, see `prompt_rows`
PROMPT_ROWS = 512
# Rows that a feed-forward on a CPU takes at a time, and the most of one product.
INNER_ROWS = 256
# scores, keys and values in float32 while rows attend in the order of their paths
PATH_SCRATCH_BYTES = 16 << 20
# One layer computes while the next is read; a third slot evens out what takes longer.
MIN_SLOTS = 2
WANTED_SLOTS = 3
# Expert slots with which any pass gets through: one computes while another is read.
MIN_EXPERTS = 2
# Experts that are read ahead: a disk is busy with less, and goes on while they compute.
_AHEAD_BYTES = 32 << 20
# Copies of a pass's scores while a tree grows: perturbed, joined, weighted, as chances.
_RANKING_COPIES = 4
# States of all rows of a pass up to which they take steps together; else row by row.
WIDE_STATES_BYTES = 16 << 20
# A text keeps a state behind its committed rows, one behind its last prompt, and a new one.
_KEPT_STATES = 3
# Copies of a state while it takes a step.
_STATE_COPIES = 6
# Scratch of one draw: a block of float64 numbers, their keys, their order.
DRAW_BYTES = 16 << 20


class LayerTier(StrEnum):
    """The place of a layer between sweeps.

    It is fixed for the run: a sweep is a cycle, so a cache of recent layers would always miss.
    """

    RESIDENT = "resident"  # where it is computed
    HOST = "host"  # pinned memory of the host, one link away from the GPU
    DISK = "disk"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryPlan:
    """The layers that stay, the slots for the others, and what everything else takes."""

    ram_bytes: int
    context: int
    num_nodes: int
    max_prompt_rows: int
    runtime_bytes: int  # of the program, on the host
    rest_bytes: int  # weights outside the layers that lie where layers are computed
    draft_bytes: int
    distribution_bytes: int
    kv_bytes: int
    activation_bytes: int
    slot_bytes: int  # of the largest layer, on the device as on the host
    num_slots: int  # where layers are computed
    layer_bytes: tuple[int, ...]
    tier_L: tuple[LayerTier, ...]
    num_logits_rows: int  # rows that are scored at once
    # texts that are written at a time; `context` is of each, `num_nodes` of all together
    parallel: int = 1
    device: str = "cpu"  # or "cuda"
    gpu_bytes: int | None = None  # budget of the GPU; None on a CPU
    gpu_runtime_bytes: int = 0  # of the driver and its libraries, on the GPU
    # embedding table that stays on the host while layers are computed on the GPU
    table_bytes: int = 0
    # that loading needs on the host beyond what the pinned allocator has room for
    staging_bytes: int = 0
    num_host_slots: int = 0  # pinned read-ahead slots for layers that go from the disk to the GPU
    max_context: int | None = None  # that the model was made for; None where it does not say
    source_tokens: int = 0  # of a prompt that an encoder may read; 0 without one
    # of its layers where they stay; else they pass through the slots, once per prompt
    encoder_bytes: int = 0
    # Where routed experts come one by one `layer_bytes` are of the dense parts alone; else these
    # are all 0.
    num_experts: int = 0  # of all layers
    num_expert_layers: int = 0
    experts_per_token: int = 0  # that one row needs, of all layers
    expert_slot_bytes: int = 0  # of the largest expert
    num_expert_slots: int = 0  # where layers are computed
    # of a second pool in pinned memory, for experts that a GPU does not keep
    num_host_expert_slots: int = 0

    @property
    def has_experts(self) -> bool:
        """Return whether routed experts are read on demand."""
        return self.num_experts > 0

    @property
    def num_kept_experts(self) -> int:
        """Return how many experts may stay where layers are computed."""
        pool = ExpertPoolSize(self.num_experts, self.expert_slot_bytes)
        return pool.kept_in(self.num_expert_slots)

    @property
    def is_streamed(self) -> bool:
        """Return whether any weight of a layer still has to come when a sweep needs it."""
        return self.streamed_bytes > 0 or self.num_kept_experts < self.num_experts

    @property
    def has_longest_context(self) -> bool:
        """Return whether the model allows no more positions."""
        return self.max_context is not None and self.context >= self.max_context

    def __repr__(self) -> str:
        used = f"{format_bytes(self.total_bytes)} of {format_bytes(self.ram_bytes)} of memory"
        if self.gpu_bytes is not None:
            used = (
                f"{format_bytes(self.gpu_total_bytes)} of {format_bytes(self.gpu_bytes)} on the "
                f"GPU, {used}"
            )
        tiers = ", ".join(
            f"{self.num_layers_in(tier)} {tier}" for tier in LayerTier if self.num_layers_in(tier)
        )
        moved = format_bytes(self.streamed_bytes)
        lines = [f"MemoryPlan({used}", f"  {len(self.tier_L)} layers: {tiers}; {moved} a sweep"]
        if self.has_experts:
            slots = format_bytes(self.num_expert_slots * self.expert_slot_bytes)
            kept = f"{self.num_kept_experts} of {self.num_experts} stay"
            lines.append(f"  experts: {kept}, {slots} of slots")
        draft = format_bytes(self.draft_bytes) if self.draft_bytes else "none"
        what = f"context {self.context}, largest tree {self.num_nodes}, {draft} for a draft"
        return "\n".join([*lines, f"  {what})"])

    @property
    def is_resident(self) -> tuple[bool, ...]:
        return tuple(tier is LayerTier.RESIDENT for tier in self.tier_L)

    @property
    def num_resident(self) -> int:
        return self.num_layers_in(LayerTier.RESIDENT)

    @property
    def resident_bytes(self) -> int:
        return self.bytes_in(LayerTier.RESIDENT)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of pinned memory: slabs of layers that every sweep sends to the GPU."""
        return self.bytes_in(LayerTier.HOST)

    @property
    def disk_streamed_bytes(self) -> int:
        return self.bytes_in(LayerTier.DISK)

    @property
    def streamed_bytes(self) -> int:
        """Return what every sweep moves to where layers are computed, without experts on demand."""
        return self.host_bytes + self.disk_streamed_bytes

    @property
    def pass_bytes(self) -> int:
        """Return what a pass of many rows moves: all that does not stay, experts included."""
        num_moved = self.num_experts - self.num_kept_experts
        return self.streamed_bytes + num_moved * self.expert_slot_bytes

    @property
    def pass_disk_bytes(self) -> int:
        """Return the part of `pass_bytes` that comes from the disk; the host has experts too."""
        num_far = self.num_experts - self.num_kept_experts - self.num_host_expert_slots
        return self.disk_streamed_bytes + max(0, num_far) * self.expert_slot_bytes

    @property
    def total_bytes(self) -> int:
        """Return what the plan takes of `ram_bytes`."""
        if self.gpu_bytes is None:
            return self._computing_bytes
        slots_bytes = (
            self.num_host_slots * self.slot_bytes
            + self.num_host_expert_slots * self.expert_slot_bytes
        )
        return (
            self.runtime_bytes
            + self.table_bytes
            + self.staging_bytes
            + self.host_bytes
            + slots_bytes
        )

    @property
    def gpu_total_bytes(self) -> int:
        """Return what the plan takes of `gpu_bytes`; 0 on a CPU."""
        return 0 if self.gpu_bytes is None else self._computing_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return everything but layers and slots, in the memory where layers are computed."""
        runtime_bytes = self.runtime_bytes if self.gpu_bytes is None else self.gpu_runtime_bytes
        models_bytes = (
            self.rest_bytes + self.encoder_bytes + self.draft_bytes + self.distribution_bytes
        )
        return runtime_bytes + models_bytes + self.kv_bytes + self.activation_bytes

    @property
    def cache_slots(self) -> int:
        """Return S: a text's committed positions and all rows of the largest sweep."""
        return num_slots(self.context, self.num_nodes, self.parallel)

    @property
    def draft_slots(self) -> int:
        """Return the draft's S, which includes rows that it runs and no tree takes."""
        return num_slots(self.context, most_rows(self.num_nodes), self.parallel)

    @property
    def _computing_bytes(self) -> int:
        slots_bytes = (
            self.num_slots * self.slot_bytes + self.num_expert_slots * self.expert_slot_bytes
        )
        return self.fixed_bytes + self.resident_bytes + slots_bytes

    def num_prompt_sweeps(self, num_tokens: int) -> int:
        """Return the sweeps that take in a prompt; the last one also scores the first tree."""
        return 1 if self.source_tokens else max(1, -(-(num_tokens - 1) // self.max_prompt_rows))

    def num_layers_in(self, tier: LayerTier) -> int:
        """Return the number of layers in one tier."""
        return self.tier_L.count(tier)

    def bytes_in(self, tier: LayerTier) -> int:
        """Return the bytes of the layers in one tier."""
        return sum(
            size for size, own in zip(self.layer_bytes, self.tier_L, strict=True) if own is tier
        )

    def as_dict(self) -> dict[str, object]:
        """Return the plan under the names of `--json`."""
        budgets = {"ram_bytes": self.ram_bytes, "planned_bytes": self.total_bytes}
        if self.gpu_bytes is not None:
            budgets |= {"gpu_bytes": self.gpu_bytes, "gpu_planned_bytes": self.gpu_total_bytes}
        slots = ("num_slots", "num_host_slots", "slot_bytes")
        sizes = (
            "runtime_bytes",
            "gpu_runtime_bytes",
            "staging_bytes",
            "draft_bytes",
            "kv_bytes",
            "activation_bytes",
        )
        layers = {
            tier: [layer for layer, own in enumerate(self.tier_L) if own is tier]
            for tier in LayerTier
        }
        return {
            "device": self.device,
            "tiers": {
                str(tier): {"num_layers": len(layers[tier]), "num_bytes": self.bytes_in(tier)}
                for tier in LayerTier
            },
            "slots": {name: getattr(self, name) for name in slots},
            "budgets": budgets,
            **{
                name: getattr(self, name)
                for name in (*sizes, "num_logits_rows", "context", "parallel")
            },
            "prompt_rows": self.max_prompt_rows,
            "embedding_and_head_bytes": self.rest_bytes,
            **({"encoder_bytes": self.encoder_bytes} if self.source_tokens else {}),
            "host_embedding_bytes": self.table_bytes,
            "distribution_bytes": self.distribution_bytes,
            "law_bytes": self.distribution_bytes,  # the first name of the key, kept for readers
            "resident_layers": layers[LayerTier.RESIDENT],
            "disk_layers": layers[LayerTier.DISK],
            **({"experts": self._experts_dict()} if self.has_experts else {}),
        }

    def _experts_dict(self) -> dict[str, object]:
        names = (
            "num_experts",
            "experts_per_token",
            "num_expert_slots",
            "num_host_expert_slots",
            "expert_slot_bytes",
        )
        return {"num_kept": self.num_kept_experts, **{name: getattr(self, name) for name in names}}


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
    """Return how many of a pool's slots are for experts that pass through.

    Some are computed with while others are read ahead. They are at most a quarter of all, so that a
    small pool keeps experts too, but no fewer than any pass needs.
    """
    return max(MIN_EXPERTS, min(MIN_EXPERTS + -(-_AHEAD_BYTES // slot_bytes), num_slots // 4))


def num_slots(context: int, num_nodes: int, parallel: int) -> int:
    """Return the positions and rows of one text's cache.

    Prompts lie within its context. With one text at a time there is also room for branches that are
    scored.
    """
    return context + num_nodes + (min(PROMPT_ROWS, context) if parallel == 1 else 0)


def states_bytes(shape: ModelShape, num_rows: int, parallel: int) -> int:
    """Return what texts keep of recurrent layers, see `model.recurrent_cache`."""
    kept = shape.recurrent
    return parallel * (_KEPT_STATES * kept.state_bytes + num_rows * kept.kept_bytes)


def stepping_bytes(shape: ModelShape, num_rows: int) -> int:
    """Return a recurrent layer's states while a tree passes through, see `model.recurrent_rows`."""
    largest_bytes = shape.recurrent.largest_bytes
    if num_rows * largest_bytes <= WIDE_STATES_BYTES:
        return _STATE_COPIES * num_rows * largest_bytes
    return (num_rows.bit_length() + 2 + _STATE_COPIES) * largest_bytes


def draft_bytes(
    draft: ModelShape, context: int, num_nodes: int, *, is_gpu: bool, parallel: int = 1
) -> int:
    """Return the bytes of a draft that stays whole; CUDA graphs keep activations of their own."""
    source_tokens = context if draft.encoder_bytes else 0
    slots = source_tokens + num_slots(context, most_rows(num_nodes), parallel)
    kv_bytes = parallel * draft.kv_bytes_per_token * slots + states_bytes(
        draft, most_rows(num_nodes), parallel
    )
    weights_bytes = draft.num_bytes + draft.cast_bytes * len(
        (*draft.layer_bytes, *draft.encoder_bytes)
    )
    weights_bytes += draft.scratch_bytes
    if draft.shares_rest:  # but for a table that the target keeps on the host
        weights_bytes -= draft.head_bytes if is_gpu else draft.rest_bytes
    pass_bytes = activation_bytes(
        draft, max(PROMPT_ROWS, num_nodes), num_nodes, context, is_gpu=is_gpu
    )
    return (
        weights_bytes
        + kv_bytes
        + (2 if is_gpu else 1) * pass_bytes
        + growth_bytes(draft.vocab_size, num_nodes)
    )


def growth_bytes(vocab_size: int, num_nodes: int) -> int:
    """Return the bytes of ranking in dynamic trees: float32 scores of all rows, and copies."""
    widest = max(pace.rows_per_pass(num_nodes) for pace in PACES)
    num_rows = most_rows(num_nodes) + _RANKING_COPIES * widest
    return 4 * vocab_size * num_rows if num_nodes > 1 else 0


def distribution_bytes(vocab_size: int, num_nodes: int) -> int:
    """Return the bytes of float32 distributions, one for every node but the last of a chain."""
    return 4 * vocab_size * (num_nodes - 1) + DRAW_BYTES if num_nodes > 1 else 0


def noise_bytes(vocab_size: int) -> int:
    """Return the bytes of the noise that a sampler keeps, in float64."""
    return 8 * vocab_size * NOISE_POSITIONS


def activation_bytes(
    shape: ModelShape, num_rows: int, num_logits: int, context: int, *, is_gpu: bool
) -> int:
    """Return the widest pass: activations, logits, and pairs of a row and a position it may see."""
    num_pairs = num_rows * (context + num_rows)
    num_inner_rows = num_rows if is_gpu else min(num_rows, INNER_ROWS)
    rows_bytes = (
        shape.row_bytes - shape.inner_row_bytes
    ) * num_rows + shape.inner_row_bytes * num_inner_rows
    pass_bytes = rows_bytes + shape.logits_row_bytes * num_logits + shape.pair_bytes * num_pairs
    source_bytes = (
        context * (shape.row_bytes + shape.pair_bytes * context) if shape.encoder_bytes else 0
    )
    pass_bytes += stepping_bytes(shape, num_rows) + shape.column_bytes * (context + num_rows)
    return max(pass_bytes, source_bytes)  # an encoder takes in its prompt at once


class MemoryTier(NamedTuple):
    """One memory that layers may lie in between sweeps."""

    budget_bytes: int
    fixed_bytes: int  # held before any layer
    passing_bytes: int  # the largest piece that loading sends through it
    refusal: Callable[[int], UserError]  # takes the least room that works


class Filling(NamedTuple):
    """What one tier gets."""

    layers: frozenset[int]  # layers that stay
    num_slots: int  # for layers that pass through
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
        """Return how many experts stay there; the other slots are for those that pass through."""
        if num_slots >= self.num_left:
            return self.num_left
        return max(0, num_slots - num_passing(num_slots, self.slot_bytes))


def fill_all(
    tiers: Sequence[MemoryTier], layer_bytes: Sequence[int], num_swept: int, pool: ExpertPoolSize
) -> list[Filling]:
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
) -> Filling:
    room_bytes = tier.budget_bytes - tier.fixed_bytes
    slot_bytes = max(layer_bytes)
    all_bytes = sum(layer_bytes[layer] for layer in layers)
    if room_bytes >= max(all_bytes + pool.least_bytes, tier.passing_bytes):
        return Filling(frozenset(layers), 0, pool.slots_in(room_bytes - all_bytes))
    least_bytes = max(
        (MIN_SLOTS * slot_bytes if layers else 0) + pool.least_bytes, tier.passing_bytes
    )
    if room_bytes < least_bytes:
        raise tier.refusal(least_bytes)
    has_room = room_bytes >= MIN_SLOTS * slot_bytes + pool.wanted_bytes
    layers_bytes = room_bytes - (pool.wanted_bytes if has_room else pool.least_bytes)
    num_slots = WANTED_SLOTS if layers_bytes >= WANTED_SLOTS * slot_bytes else MIN_SLOTS
    # encoder layers, which pass through once per prompt, never stay in a tier that streams
    swept = [layer for layer in layers if layer < num_swept]
    staying = spread(layer_bytes, swept, layers_bytes - num_slots * slot_bytes)
    taken_bytes = num_slots * slot_bytes + sum(layer_bytes[layer] for layer in staying)
    return Filling(staying, num_slots, pool.slots_in(room_bytes - taken_bytes))
