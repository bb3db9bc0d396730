"""The memory budget of a run and its plan, as values: the bytes of every item, and their sums.

With a GPU, everything that it computes with counts against `gpu_bytes`, and only what feeds it
against `ram_bytes`. `planner` makes plans, by what things take (`sizes`) and how tiers are filled
(`tiers`). Invariant: every byte of a plan is in exactly one of the two sums, `total_bytes` and
`gpu_total_bytes`.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.layer_sizes import ExpertShape
from offload.checkpoint.sizes import model_shape
from offload.memory.sizes import cache_slots
from offload.memory.tiers import ExpertPoolSize, LayerTier
from offload.trees.topology import most_rows, tier_rows
from offload.units import format_bytes, is_decimal

_ROOMY_BYTES = 1 << 59


class Rates(NamedTuple):
    """The rates of a machine."""

    link_bytes_per_s: float  # to the memory where layers are computed
    flops_per_s: float  # floating-point rate in passes of some hundred rows
    disk_bytes_per_s: float = math.inf  # to host memory, if the link begins there


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """The budgets of a run in bytes, and the sizes of its texts."""

    ram_bytes: int  # host memory; a `ByteSize` if the user gave it
    gpu_bytes: int | None = None  # memory of the device that computes; None on a CPU
    dtype: str = "auto"
    # positions of a text; None takes the model's limit, up to `DEFAULT_CONTEXT`
    context: int | None = None
    rule: str = "match"
    # how routed experts come: demand, one by one, or with their layers; auto, which is open, plans
    # as demand does until `planning.budget.with_experts` has settled it
    experts: str = "auto"
    parallel: int = 1  # texts that are written at a time, each with its own keys and values
    # for prompts that were read, besides the texts' own; None takes what layers leave, see `planner`
    prompt_cache_bytes: int | None = 0
    kv_dtype: str = "auto"  # type of the target's keys and values; auto is the compute type
    rates: Rates | None = None  # if they are known, they decide the rows of a prompt's pass

    @property
    def positions(self) -> int:
        """Return the context, which is settled where a plan is made."""
        assert self.context is not None, "a model's limit is known by now"
        return self.context

    def experts_of(self, files: ModelFiles) -> ExpertShape | None:
        """Return the target's routed experts if they are read on demand."""
        return model_shape(files.target, self.dtype).experts if self.experts == "demand" else None

    def unlimited(self) -> "MemoryBudget":
        """Return a budget without limits, to see what everything except layers takes."""
        return replace(self, ram_bytes=_ROOMY_BYTES, gpu_bytes=self.gpu_bytes and _ROOMY_BYTES)

    def size(self, num_bytes: float) -> str:
        """Return a size in words, in the units in which the budgets were given."""
        return format_bytes(num_bytes, is_decimal=self._is_decimal)

    def format_at_least(self, num_bytes: float) -> str:
        """Return a size as a flag takes it, rounded up."""
        unit_bytes, unit = (10**6, "MB") if self._is_decimal else (2**20, "MiB")
        return f"{math.ceil(num_bytes / unit_bytes)}{unit}"

    @property
    def _is_decimal(self) -> bool:
        return is_decimal(self.ram_bytes, self.gpu_bytes)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryPlan:
    """The layers that stay, the slots for the others, and the bytes of everything else."""

    ram_bytes: int
    context: int
    num_nodes: int
    max_prompt_rows: int
    runtime_bytes: int  # the program's own, on the host
    rest_bytes: int  # weights outside the layers, where layers are computed
    draft_bytes: int
    distribution_bytes: int
    kv_bytes: int
    activation_bytes: int
    layer_slot_bytes: int  # of the largest layer, on the device as on the host
    num_layer_slots: int  # where layers are computed
    layer_bytes: tuple[int, ...]
    tier_L: tuple[LayerTier, ...]
    num_logits_rows: int  # rows that are scored at once
    kv_dtype: str = "auto"  # of the target's keys and values; others than auto change numbers
    prompt_cache_bytes: int = 0  # host memory for prompts that were read
    # texts that are written at a time; `context` is of each, `num_nodes` of all together
    parallel: int = 1
    device: str = "cpu"  # or "cuda"
    gpu_bytes: int | None = None  # budget of the GPU; None on a CPU
    gpu_runtime_bytes: int = 0  # of the driver and its libraries, on the GPU
    # embedding table that stays on the host while layers are computed on the GPU
    table_bytes: int = 0
    # host memory that loading needs beyond the room of the pinned allocator
    staging_bytes: int = 0
    num_host_layer_slots: int = (
        0  # pinned read-ahead slots for layers that go from the disk to the GPU
    )
    max_context: int | None = None  # that the model was made for; None where it does not say
    # a longer text has its positions rotated by other factors, see `sizes.turning_point`
    turning_point: int | None = None
    source_tokens: int = 0  # of a prompt that an encoder may read; 0 without one
    # its layers, if they stay; else they pass through the slots, once per prompt
    encoder_bytes: int = 0
    # Where routed experts come one by one `layer_bytes` are of the dense parts alone; else these
    # are all 0.
    num_experts: int = 0  # of all layers
    num_expert_layers: int = 0
    experts_per_token: int = 0  # that one row needs, of all layers
    expert_slot_bytes: int = 0  # of the largest expert
    num_expert_slots: int = 0  # where layers are computed
    # slots of a second pool, in pinned memory, for experts that a GPU does not keep
    num_host_expert_slots: int = 0
    # of a draft that the target's files carry, if they come on demand as well
    draft_experts: ExpertShape | None = None
    num_draft_expert_slots: int = 0

    @property
    def has_experts(self) -> bool:
        """Return True if routed experts are read on demand."""
        return self.num_experts > 0

    @property
    def num_kept_experts(self) -> int:
        """Return the number of experts that may stay where layers are computed."""
        pool = ExpertPoolSize(self.num_experts, self.expert_slot_bytes)
        return pool.kept_in(self.num_expert_slots)

    @property
    def num_kept_draft_experts(self) -> int:
        """Return the number of the draft's experts on demand that may stay."""
        if self.draft_experts is None:
            return 0
        pool = ExpertPoolSize(self.draft_experts.num_records, self.draft_experts.slot_bytes)
        return pool.kept_in(self.num_draft_expert_slots)

    @property
    def is_streamed(self) -> bool:
        """Return True if any weight of a layer still has to come when a sweep needs it."""
        return self.streamed_bytes > 0 or self.num_kept_experts < self.num_experts

    @property
    def has_longest_context(self) -> bool:
        """Return True if the model allows no more positions."""
        return self.max_context is not None and self.context >= self.max_context

    @property
    def turns(self) -> bool:
        """Return True if the context has room for a text beyond the turning point."""
        return self.turning_point is not None and self.context > self.turning_point

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
        summary = f"context {self.context}, largest tree {self.num_nodes}, {draft} for a draft"
        return "\n".join([*lines, f"  {summary})"])

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
    def pinned_bytes(self) -> int:
        """Return the bytes of pinned memory: slabs of layers that every sweep sends to the GPU."""
        return self.bytes_in(LayerTier.PINNED)

    @property
    def disk_streamed_bytes(self) -> int:
        return self.bytes_in(LayerTier.DISK)

    @property
    def streamed_bytes(self) -> int:
        """Return the bytes that every sweep moves to the layers' device, experts on demand aside."""
        return self.pinned_bytes + self.disk_streamed_bytes

    @property
    def pass_bytes(self) -> int:
        """Return the bytes that a pass of many rows moves: all but the resident, with experts."""
        num_moved = self.num_experts - self.num_kept_experts
        return self.streamed_bytes + num_moved * self.expert_slot_bytes

    @property
    def pass_disk_bytes(self) -> int:
        """Return the part of `pass_bytes` that comes from the disk; the host has experts too."""
        num_far = self.num_experts - self.num_kept_experts - self.num_host_expert_slots
        return self.disk_streamed_bytes + max(0, num_far) * self.expert_slot_bytes

    @property
    def total_bytes(self) -> int:
        """Return the bytes that the plan takes of `ram_bytes`."""
        if self.gpu_bytes is None:
            return self._computing_bytes
        slots_bytes = (
            self.num_host_layer_slots * self.layer_slot_bytes
            + self.num_host_expert_slots * self.expert_slot_bytes
        )
        return (
            self.runtime_bytes
            + self.table_bytes
            + self.staging_bytes
            + self.pinned_bytes
            + self.prompt_cache_bytes
            + slots_bytes
        )

    @property
    def gpu_total_bytes(self) -> int:
        """Return the bytes that the plan takes of `gpu_bytes`; 0 on a CPU."""
        return 0 if self.gpu_bytes is None else self._computing_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return everything but layers and slots, in the memory where layers are computed."""
        if self.gpu_bytes is None:
            runtime_bytes = self.runtime_bytes + self.prompt_cache_bytes
        else:
            runtime_bytes = self.gpu_runtime_bytes
        models_bytes = (
            self.rest_bytes + self.encoder_bytes + self.draft_bytes + self.distribution_bytes
        )
        return runtime_bytes + models_bytes + self.kv_bytes + self.activation_bytes

    @property
    def cache_slots(self) -> int:
        """Return S: a text's committed positions and all rows of the largest sweep."""
        return cache_slots(self.context, self.num_nodes, self.parallel)

    @property
    def draft_slots(self) -> int:
        """Return the draft's S, which includes rows that it runs and no tree takes."""
        return cache_slots(self.context, most_rows(self.num_nodes), self.parallel)

    @property
    def tier_slots(self) -> int:
        """Return the S of a copy and of its scout, with guesses that the copy did not share."""
        return cache_slots(self.context, tier_rows(self.num_nodes), self.parallel)

    @property
    def _computing_bytes(self) -> int:
        slots_bytes = (
            self.num_layer_slots * self.layer_slot_bytes
            + self.num_expert_slots * self.expert_slot_bytes
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
            size
            for size, layer_tier in zip(self.layer_bytes, self.tier_L, strict=True)
            if layer_tier is tier
        )

    def as_dict(self) -> dict[str, object]:
        """Return the plan under the names of `--json`."""
        budgets = {"ram_bytes": self.ram_bytes, "planned_bytes": self.total_bytes}
        if self.gpu_bytes is not None:
            budgets |= {"gpu_bytes": self.gpu_bytes, "gpu_planned_bytes": self.gpu_total_bytes}
        sizes = (
            "runtime_bytes",
            "gpu_runtime_bytes",
            "staging_bytes",
            "draft_bytes",
            "kv_bytes",
            "activation_bytes",
        )
        layers = {
            tier: [layer for layer, layer_tier in enumerate(self.tier_L) if layer_tier is tier]
            for tier in LayerTier
        }
        return {
            "device": self.device,
            "tiers": {
                str(tier): {"num_layers": len(layers[tier]), "num_bytes": self.bytes_in(tier)}
                for tier in LayerTier
            },
            "slots": {
                "num_slots": self.num_layer_slots,
                "num_host_slots": self.num_host_layer_slots,
                "slot_bytes": self.layer_slot_bytes,
            },
            "budgets": budgets,
            **{
                name: getattr(self, name)
                for name in (*sizes, "num_logits_rows", "context", "parallel")
            },
            "prompt_rows": self.max_prompt_rows,
            "embedding_and_head_bytes": self.rest_bytes,
            **({"encoder_bytes": self.encoder_bytes} if self.source_tokens else {}),
            **({"kv_dtype": self.kv_dtype} if self.kv_dtype != "auto" else {}),
            **({"prompt_cache_bytes": self.prompt_cache_bytes} if self.prompt_cache_bytes else {}),
            "host_embedding_bytes": self.table_bytes,
            "distribution_bytes": self.distribution_bytes,
            "law_bytes": self.distribution_bytes,  # the first name of the key, kept for readers
            "resident_layers": layers[LayerTier.RESIDENT],
            "disk_layers": layers[LayerTier.DISK],
            **({"experts": self._experts_dict()} if self.has_experts else {}),
            **({"draft_experts": self._draft_experts_dict()} if self.draft_experts else {}),
        }

    def _draft_experts_dict(self) -> dict[str, int]:
        assert self.draft_experts is not None, "some come on demand"
        return {
            "num_experts": self.draft_experts.num_records,
            "num_kept": self.num_kept_draft_experts,
            "num_expert_slots": self.num_draft_expert_slots,
            "expert_slot_bytes": self.draft_experts.slot_bytes,
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
