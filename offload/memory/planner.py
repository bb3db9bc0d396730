"""Plan memory from headers and budgets, for this machine or any other.

`sizes` has the bytes of each item, `tiers` fills tiers of memory with layers, `prompt_rows` chooses
a prompt pass's rows, and `planning.budget` makes budgets. Layers lie where they are computed, in
pinned host memory where that is a GPU's, or on the disk. Each tier takes first what it must hold,
then two or three slots for the layers that pass through it, then as many layers as fit. The host's
budget relies on the order of loading: what goes to a GPU passes through before memory is pinned.
Invariant: the items of a plan add up to no more than its budgets; a budget that cannot hold two
slots is refused, with the least one that would do.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from offload.checkpoint.checkpoint import (
    Checkpoint,
    ModelFiles,
    compute_dtype_name,
    remembered,
)
from offload.checkpoint.layer_sizes import ExpertShape
from offload.checkpoint.sizes import ModelShape, longest_context, shapes_of, turning_point
from offload.checkpoint.small_files import TRAINED_CONTEXT, has_encoder
from offload.encoding.base import PLAIN_OF
from offload.errors import UserError, require
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.prompt_rows import with_prompt_rows
from offload.memory.sizes import (
    FACTOR_BYTES,
    PATH_SCRATCH_BYTES,
    RUNTIME_BYTES,
    activation_bytes,
    cache_slots,
    distribution_bytes,
    draft_bytes,
    noise_bytes,
    num_logits_rows,
    states_bytes,
    taps_bytes,
)
from offload.memory.tiers import (
    MIN_EXPERTS,
    MIN_SLOTS,
    NUM_LOADERS,
    ExpertPoolSize,
    LayerTier,
    MemoryTier,
    TierAllocation,
    fill_all,
)
from offload.rules import drafting_of

# Importing numba and its first compilations: 115 to 137 MiB of RSS with an empty cache by one to
# three kinds of words (float8, integers, Q8_0; Q4_K to Q8_0), 100 to 104 MiB with a warm one, in
# bare processes with torch and transformers.
COMPILER_BYTES = 144 << 20
_HAS_COMPILER = find_spec("numba") is not None
# Usual figures, rounded up: a CUDA context with torch's kernels takes 0.3 to 0.5 GiB, cuBLAS and
# cuBLASLt a workspace of 8 to 32 MiB each per stream that multiplies, and ends of the segments of
# torch's allocator stay unused.
GPU_RUNTIME_BYTES = 1 << 30
# what the driver and its libraries keep on the host beside the program's own
HOST_RUNTIME_BYTES = 1 << 30
DEFAULT_CONTEXT = 4096
# Of the host's budget, at most, for prompts where the budget says no size: what no layer fits into.
_PROMPT_CACHE_SHARE = 0.125
# A context below this is not offered as a remedy.
_LEAST_CONTEXT = 64


def plan_memory(files: ModelFiles, budget: MemoryBudget, num_nodes: int) -> MemoryPlan:
    """Return the plan that loading follows, from headers alone.

    `num_nodes` is N of the largest tree, or of the trees of all texts together. Raises `UserError`
    for models that cannot be planned, and for too little memory.
    """
    return _plan_once(*files, budget, num_nodes)


@remembered
def _plan_once(
    target: Checkpoint, draft: Checkpoint | None, budget: MemoryBudget, num_nodes: int
) -> MemoryPlan:
    """Plan once for all that ask: compared drafts, trees, reports."""
    _check_encoders(target, draft, budget)
    target_shape, draft_shape = shapes_of(ModelFiles(target, draft), budget.dtype)
    budget = replace(budget, context=_check_context(target, budget.context))
    if budget.kv_dtype != "auto":
        target_shape = with_coded_rows(target, target_shape, budget)
    _check_experts(target, target_shape, budget.experts)
    plan = make_plan(target_shape, draft_shape, budget, num_nodes)
    turn = turning_point(target)
    return replace(plan, max_context=longest_context(target), turning_point=turn)


def make_plan(
    target: ModelShape, draft: ModelShape | None, budget: MemoryBudget, num_nodes: int
) -> MemoryPlan:
    """Fill one memory tier after the other for models of these shapes.

    Raises `UserError` with the least budget that works, and the longest context and most texts.
    """
    try:
        return _plan_experts(target, draft, num_nodes, budget)
    except TooLittleMemoryError as error:
        plan = partial(_plan_experts, target, draft, num_nodes)
        error.find_smaller = partial(_smaller_runs, plan, budget)
        raise


class TooLittleMemoryError(UserError):
    """A budget that cannot hold two slots."""

    # Returns what could be lowered instead of raising the budget. That takes some dozens of plans,
    # so it is asked when the line is read: searches for a budget raise and drop hundreds of these.
    find_smaller: Callable[[], str] | None = None
    _smaller = ""

    def __str__(self) -> str:
        if self.find_smaller is not None:
            self._smaller = self.find_smaller()
            self.find_smaller = None
        return f"{super().__str__()}{self._smaller}"


def _smaller_runs(plan: Callable[[MemoryBudget], MemoryPlan], budget: MemoryBudget) -> str:
    """Return ` or lower ...` with the largest values that work; an empty string if none does."""
    context = budget.positions
    parallel = budget.parallel
    longest = _most(lambda positions: plan(replace(budget, context=positions)), context)
    most = _most(lambda num_texts: plan(replace(budget, parallel=num_texts)), parallel)
    remedies = []
    if longest >= _LEAST_CONTEXT:
        remedies.append(f"`context` from {context} to {longest // 16 * 16}")
    if most:
        remedies.append(f"`parallel` from {parallel} to {most}")
    return f" or lower {' or '.join(remedies)}" if remedies else ""


def _most(plan: Callable[[int], object], refused: int) -> int:
    """Return the largest number below `refused` that `plan` does not refuse; 0 for none."""
    return bisect_left(range(1, refused), True, key=partial(_is_refused, plan))


def _is_refused(plan: Callable[[int], object], number: int) -> bool:
    try:
        plan(number)
    except UserError:
        return True
    return False


def with_coded_rows(target: Checkpoint, shape: ModelShape, budget: MemoryBudget) -> ModelShape:
    """Return the shape with keys and values in eight bits, a factor for each row of a head.

    The layer that runs has those of all texts expanded. Raises `UserError` for families that expand
    what they keep, or choose by an index.
    """
    layers = target.layers
    item_bytes = PLAIN_OF[compute_dtype_name(target, budget.dtype)].align_bytes
    heads = [[layer.keys, layer.values] for layer in layers]
    is_plain = not any(layer.index_width or layer.expanded_width for layer in layers)
    requirement = "`kv_dtype` needs layers with keys and values of heads alone"
    kind = f"model type {target.config.get('model_type')}"
    require(is_plain and not shape.encoder_bytes, requirement, kind, "leave it out")
    row_bytes = [sum(num * (width + FACTOR_BYTES) for num, width in kept) for kept in heads]
    expanded_bytes = item_bytes * max(sum(num * width for num, width in kept) for kept in heads)
    return replace(
        shape,
        kv_bytes_per_token=sum(row_bytes),
        column_bytes=shape.column_bytes + budget.parallel * expanded_bytes,
    )


def on_demand(shape: ModelShape) -> ModelShape:
    """Return a model whose layers are their dense parts alone; `experts` are read on demand."""
    experts = shape.experts
    assert experts is not None, "there are some"
    return replace(
        shape,
        layer_bytes=experts.dense_bytes,
        scratch_bytes=experts.scratch_bytes,
        cast_bytes=experts.cast_bytes,
        row_bytes=shape.row_bytes + experts.row_bytes,
    )


def _plan_experts(
    target: ModelShape, draft: ModelShape | None, num_nodes: int, budget: MemoryBudget
) -> MemoryPlan:
    """Return the plan in which experts come as the budget says, one by one where it is open."""
    num_nodes = max(num_nodes, budget.parallel)

    def plan_of(shape: ModelShape, draft: ModelShape | None) -> MemoryPlan:
        def in_rows(num_rows: int) -> MemoryPlan:
            return _MemoryLayout(shape, draft, budget, num_nodes, num_rows).plan()

        return with_prompt_rows(in_rows, shape, budget.positions, budget.rates)

    if target.experts is None or budget.experts == "layers":
        return plan_of(replace(target, experts=None), draft)
    plan = partial(plan_of, on_demand(target))
    is_carried = draft is not None and draft.shares_rest and budget.gpu_bytes is None
    if draft is None or draft.experts is None or not is_carried:
        return plan(draft)
    drafts = on_demand(draft)
    least = min(MIN_EXPERTS, draft.experts.num_records)
    with_least = plan(replace(drafts, num_expert_slots=least))
    num_slots = max(least, _draft_slots(with_least, draft.experts, budget))
    return plan(replace(drafts, num_expert_slots=num_slots))


def _draft_slots(with_least: MemoryPlan, experts: ExpertShape, budget: MemoryBudget) -> int:
    """Return the slots for a draft's experts: a share of what all slots take, as of all experts."""
    slot_bytes = with_least.expert_slot_bytes
    others_bytes = with_least.total_bytes - with_least.num_expert_slots * slot_bytes
    others_bytes -= with_least.num_draft_expert_slots * experts.slot_bytes
    if budget.prompt_cache_bytes is None:
        others_bytes -= with_least.prompt_cache_bytes
    room_bytes = int(budget.ram_bytes) - others_bytes
    own_bytes = experts.num_records * experts.slot_bytes
    share_bytes = room_bytes * own_bytes // (own_bytes + with_least.num_experts * slot_bytes)
    most_bytes = min(share_bytes, own_bytes, room_bytes - MIN_EXPERTS * slot_bytes)
    return most_bytes // experts.slot_bytes


class _MemoryLayout(NamedTuple):
    """What memory has to hold: models, trees of this many nodes, passes of this many prompt rows.

    The experts of `target`, if any, are read on demand.
    """

    target: ModelShape
    draft: ModelShape | None
    budget: MemoryBudget
    num_nodes: int
    prompt_rows: int

    def plan(self) -> MemoryPlan:
        """Return the plan. Raises `TooLittleMemoryError`."""
        target = self.target
        bare = self._without_layers()
        tiers = [self._computing_tier(bare)]
        if self.is_gpu:
            tiers.append(self._feeding_tier(bare))
        pool = ExpertPoolSize(bare.num_experts, max(1, bare.expert_slot_bytes))
        all_bytes = (*target.layer_bytes, *target.encoder_bytes)
        num_layers = len(target.layer_bytes)
        fillings = fill_all(tiers, all_bytes, num_layers, pool)
        here = fillings[0]
        host = fillings[1] if self.is_gpu else TierAllocation(frozenset(), 0)
        tier_of = dict.fromkeys(here.layers, LayerTier.RESIDENT)
        tier_of |= dict.fromkeys(host.layers, LayerTier.PINNED)
        plan = replace(
            bare,
            tier_L=tuple(tier_of.get(layer, LayerTier.DISK) for layer in range(num_layers)),
            layer_slot_bytes=max(all_bytes) if here.num_layer_slots else 0,
            num_layer_slots=here.num_layer_slots,
            num_host_layer_slots=host.num_layer_slots,
            encoder_bytes=0 if here.num_layer_slots else sum(target.encoder_bytes),
            num_expert_slots=here.num_expert_slots,
            num_host_expert_slots=host.num_expert_slots,
        )
        if self.is_gpu:
            hosted_bytes = plan.total_bytes - bare.total_bytes
            plan = replace(plan, staging_bytes=max(0, tiers[-1].passing_bytes - hosted_bytes))
        if self.budget.prompt_cache_bytes is None and not target.encoder_bytes:
            spare_bytes = self.budget.ram_bytes - plan.total_bytes
            most_bytes = int(_PROMPT_CACHE_SHARE * self.budget.ram_bytes)
            plan = replace(plan, prompt_cache_bytes=max(0, min(spare_bytes, most_bytes)))
        return plan

    @property
    def drafts(self) -> list[ModelShape]:
        """Return the draft, and the scout below it, as far as there are any."""
        scout = self.draft and self.draft.scout
        return [model for model in (self.draft, scout) if model is not None]

    @property
    def is_gpu(self) -> bool:
        return self.budget.gpu_bytes is not None

    @property
    def runtime_bytes(self) -> int:
        """Return the program's bytes on the host, a driver or a compiler included."""
        if self.is_gpu:
            return RUNTIME_BYTES + HOST_RUNTIME_BYTES
        is_compiled = any(model.is_compiled for model in (self.target, *self.drafts))
        return RUNTIME_BYTES + (COMPILER_BYTES if _HAS_COMPILER and is_compiled else 0)

    def _without_layers(self) -> MemoryPlan:
        """Return the plan of everything but layers, which are all on the disk."""
        target, draft, budget, num_nodes, prompt_rows = self
        context = budget.positions
        parallel = budget.parallel
        is_gpu = self.is_gpu
        source_tokens = context if target.encoder_bytes else 0
        num_logits = num_logits_rows(num_nodes, is_gpu=is_gpu)
        rest_bytes = target.head_bytes if is_gpu else target.rest_bytes
        kv_slots = source_tokens + cache_slots(context, num_nodes, parallel)
        kv_bytes = parallel * target.kv_bytes_per_token * kv_slots
        passed_rows = 0 if budget.prompt_cache_bytes == 0 else prompt_rows
        num_rows = prompt_rows + num_nodes
        pass_bytes = activation_bytes(target, num_rows, num_logits, context, is_gpu=is_gpu)
        pass_bytes += 0 if is_gpu else PATH_SCRATCH_BYTES
        pass_bytes += target.cast_bytes + target.scratch_bytes
        drafting_bytes = 0
        distributions_bytes = 0
        if draft is not None:
            drafting_bytes = draft_bytes(
                draft, context, num_nodes, is_gpu=is_gpu, parallel=parallel
            )
            drafting_bytes += taps_bytes(draft, num_rows)
            if drafting_of(budget.rule).keeps_distributions:
                distributions_bytes = distribution_bytes(target.vocab_size, num_nodes)
        return MemoryPlan(
            device="cuda" if is_gpu else "cpu",
            ram_bytes=int(budget.ram_bytes),
            gpu_bytes=None if budget.gpu_bytes is None else int(budget.gpu_bytes),
            context=context,
            num_nodes=num_nodes,
            parallel=parallel,
            kv_dtype=budget.kv_dtype,
            prompt_cache_bytes=budget.prompt_cache_bytes or 0,
            max_prompt_rows=prompt_rows,
            num_logits_rows=num_logits,
            runtime_bytes=self.runtime_bytes,
            gpu_runtime_bytes=GPU_RUNTIME_BYTES if is_gpu else 0,
            table_bytes=target.table_bytes if is_gpu else 0,
            rest_bytes=rest_bytes + target.companion_bytes,
            draft_bytes=drafting_bytes,
            distribution_bytes=distributions_bytes,
            kv_bytes=kv_bytes + states_bytes(target, num_nodes, parallel, passed_rows),
            activation_bytes=pass_bytes + parallel * noise_bytes(target.vocab_size),
            source_tokens=source_tokens,
            layer_bytes=target.layer_bytes,
            tier_L=(LayerTier.DISK,) * len(target.layer_bytes),
            layer_slot_bytes=0,
            num_layer_slots=0,
            **_expert_counts(target.experts),
            draft_experts=draft.experts if draft and draft.num_expert_slots else None,
            num_draft_expert_slots=draft.num_expert_slots if draft else 0,
        )

    def _computing_tier(self, bare: MemoryPlan) -> MemoryTier:
        """Return the tier where layers are computed: a GPU's memory, or the host's."""
        target, _, budget, *_ = self
        where = "RAM"
        argument = "ram"
        budget_bytes = budget.ram_bytes
        passing_bytes = max(model.beside_bytes for model in (target, *self.drafts))
        if budget.gpu_bytes is not None:
            where = "device memory"
            argument = "gpu_memory"
            budget_bytes = budget.gpu_bytes
            passing_bytes = 0
        fixed_bytes = bare.fixed_bytes
        drafting_bytes = bare.draft_bytes

        def refusal(slots_bytes: int) -> UserError:
            layers = (*target.layer_bytes, *target.encoder_bytes)
            slots = "two layer slots" if sum(layers) > MIN_SLOTS * max(layers) else "its layers"
            slots += " and two experts" if target.experts else ""
            of_draft = smaller = ""
            is_carried = self.draft is not None and self.draft.tap_row_bytes > 0
            if drafting_bytes and (is_carried or budget.gpu_bytes is not None):
                room_bytes = budget_bytes - fixed_bytes + drafting_bytes - slots_bytes
                of_draft = f", {budget.size(drafting_bytes)} of it for the draft"
                smaller = f", take a draft of at most {budget.size(room_bytes)}"
                smaller = smaller if room_bytes > 0 else ""
            return TooLittleMemoryError(
                f"needs {budget.size(slots_bytes)} of {where} for {slots} and "
                f"{budget.size(fixed_bytes)} for the rest{of_draft}, "
                f"budget is {budget.size(budget_bytes)}: raise `{argument}` to "
                f"{budget.format_at_least(fixed_bytes + slots_bytes)}{smaller}"
            )

        return MemoryTier(budget_bytes, fixed_bytes, passing_bytes, refusal)

    def _feeding_tier(self, bare: MemoryPlan) -> MemoryTier:
        """Return the pinned memory that feeds a GPU; loading passes where layers will lie."""
        target, _, budget, *_ = self
        fixed_bytes = bare.total_bytes
        # a head is expanded from what lies beside
        passing = [NUM_LOADERS * max(target.layer_bytes), target.head_bytes + target.beside_bytes]
        for model in self.drafts:
            passing += [*model.layer_bytes, model.rest_bytes, model.beside_bytes]

        def refusal(least_bytes: int) -> UserError:
            return TooLittleMemoryError(
                f"needs {budget.size(least_bytes)} of RAM to pass layers on to the GPU and "
                f"{budget.size(fixed_bytes)} for embeddings and program, "
                f"budget is {budget.size(budget.ram_bytes)}: raise `ram` to "
                f"{budget.format_at_least(least_bytes + fixed_bytes)}"
            )

        return MemoryTier(budget.ram_bytes, fixed_bytes, max(passing), refusal)


def _expert_counts(experts: ExpertShape | None) -> dict[str, int]:
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_records,
        "num_expert_layers": experts.num_layers,
        "experts_per_token": experts.num_layers * experts.num_chosen,
        "expert_slot_bytes": experts.slot_bytes,
    }


def least_budget(plan: Callable[[int], object]) -> int:
    """Return the least bytes that `plan` does not refuse. Raises `UserError` where none would do."""
    budgets = range(1, 1 << 50)
    plan(budgets[-1])
    return budgets[bisect_left(budgets, True, key=lambda budget: not _is_refused(plan, budget))]


def _check_experts(target: Checkpoint, shape: ModelShape, experts: str) -> None:
    kind = str(target.config.get("model_type"))
    requirement = "`experts` demand needs a mixture whose experts can be read one by one"
    is_possible = shape.experts is not None or experts != "demand"
    require(is_possible, requirement, f"model type {kind}", 'try `experts="layers"`')


def _check_encoders(target: Checkpoint, draft: Checkpoint | None, budget: MemoryBudget) -> None:
    """Raise `UserError` for options or drafts that a model with an encoder does not support."""
    requirement = "models with an encoder write one text at a time, `parallel` must be 1"
    is_one = budget.parallel == 1 or not has_encoder(target.config)
    require(is_one, requirement, budget.parallel, "leave it out")
    if draft is not None and has_encoder(target.config) != has_encoder(draft.config):
        kinds = [str(checkpoint.config.get("model_type")) for checkpoint in (target, draft)]
        mismatch = f"target and draft must both have an encoder or none, got {' and '.join(kinds)}"
        raise UserError(f"{mismatch}: choose a smaller model of the target's family")
    if has_encoder(target.config) and budget.gpu_bytes is not None:
        raise UserError(
            "models with an encoder are computed by the CPU, `device` is cuda: give `device` cpu"
        )


def _check_context(checkpoint: Checkpoint, context: int | None) -> int:
    limit = longest_context(checkpoint)
    if context is None:
        usual = TRAINED_CONTEXT if has_encoder(checkpoint.config) else DEFAULT_CONTEXT
        return min(limit or usual, usual)
    if limit and context > limit:
        why = "which this model was made for"
        raise UserError(f"`context` must be at most {limit}, {why}, got {context}: lower it")
    return context
