"""Plan memory from headers and budgets, for this machine or any other.

Layers lie where they are computed, in pinned host memory where that is a GPU's, or on the disk.
Each tier takes first what it must hold, then two or three slots for the layers that pass through
it, then as many layers as fit. The host's budget relies on the order of loading: what goes to a GPU
passes through before memory is pinned. Invariant: the items of a plan add up to no more than its
budgets; a budget that cannot hold two slots is refused, with the least one that would do.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.sizes import ExpertShape, ModelShape, config_sizes, model_shape, text_config
from offload.checkpoint.t5 import TRAINED_CONTEXT, has_encoder
from offload.errors import UserError
from offload.machine import available_gpu_bytes, available_ram_bytes
from offload.memory.plan import (
    PATH_SCRATCH_BYTES,
    PROMPT_ROWS,
    LayerTier,
    MemoryPlan,
    activation_bytes,
    distribution_bytes,
    draft_bytes,
    noise_bytes,
    num_slots,
    states_bytes,
)
from offload.memory.prompt_rows import Rates, with_prompt_rows
from offload.memory.tiers import ExpertPoolSize, Filling, MemoryTier, fill_all
from offload.units import (
    DTYPES,
    EXPERTS,
    ByteSize,
    drafting_of,
    format_bytes,
    is_decimal,
    parse_size,
    require,
    whole_number,
)

# code that runs for the first time, tokenizer, scratch of the matrix library: measured
RUNTIME_BYTES = 112 << 20
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
# The head is read once per chunk. From about this many rows on multiplying takes longer than
# reading it (110 TFLOP/s over 0.86 TB/s on an L40), so smaller chunks would pay for reading and
# larger ones only take memory.
MAX_LOGITS_ROWS = 128
DEFAULT_CONTEXT = 4096
_LEAST_CONTEXT = 64  # a shorter one is no remedy
# of free memory, left to other work on the machine
_RESERVE_SHARE = 0.25
_RESERVE_BYTES = 1 << 30
_GPU_RESERVE_SHARE = 0.02  # of a GPU's free memory, left to what else it shows


class ModelFiles(NamedTuple):
    """The checkpoints of target and draft."""

    target: Checkpoint
    draft: Checkpoint | None = None


def plan_memory(
    files: tuple[Checkpoint, Checkpoint | None],
    *,
    ram: str | int | None,
    dtype: str,
    context: int | None,
    num_nodes: int,
    rule: str = "match",
    gpu: str | int | None = None,
    experts: str = "auto",
    parallel: int = 1,
    rates: Rates | None = None,
) -> MemoryPlan:
    """Return the plan that loading follows, from headers alone.

    Args:
        ram: budget; None takes what is free now, less a reserve.
        gpu: of the device that computes; None is the CPU.
        context: positions; None takes the model's limit, at most `DEFAULT_CONTEXT`.
        num_nodes: N of the largest tree, or of those of all texts together.
        experts: one of `EXPERTS`, see `make_plan`.
        parallel: texts that are written at a time, each with keys and values of its own.
        rates: of the machine, where they are known: they decide how many rows a pass over a prompt
            has.
    """
    require_dtype(dtype)
    target, draft = files
    _check_encoders(target, draft, is_gpu=gpu is not None, parallel=parallel)
    shapes = (model_shape(target, dtype), model_shape(draft, dtype) if draft else None)
    ram_bytes = default_ram_bytes() if ram is None else parse_size(ram, "`ram`")
    positions = _check_context(target, context)
    keeps_distributions = drafting_of(rule).keeps_distributions
    _check_experts(target, shapes[0], experts)
    gpu_bytes = None if gpu is None else parse_size(gpu, "`gpu_memory`")
    budgets = Budgets(ram_bytes, gpu_bytes, is_decimal(ram) or is_decimal(gpu), rates)
    plan = make_plan(
        *shapes,
        budgets,
        context=positions,
        num_nodes=num_nodes,
        keeps_distributions=keeps_distributions,
        experts=experts,
        parallel=parallel,
    )
    return replace(plan, max_context=_longest_context(target))


def require_no_states(files: "ModelFiles", dtype: str) -> None:
    """Raises `UserError` for models that ranks cannot share, since layers keep states or choose."""
    for checkpoint in files:
        if checkpoint is None:
            continue
        shape = model_shape(checkpoint, dtype)
        if shape.recurrent.state_bytes:
            what = "has recurrent or convolutional layers, whose states stay on one rank"
            raise UserError(f"{checkpoint.directory.name} {what}: leave `ranks` out")
        if shape.index_bytes_per_token:
            what = "has layers that choose by an index what they attend to, which stays on one rank"
            raise UserError(f"{checkpoint.directory.name} {what}: leave `ranks` out")


class Budgets(NamedTuple):
    """The budgets of a run and the machine that they belong to."""

    ram_bytes: int
    gpu_bytes: int | None = None  # None: layers are computed by the CPU, in the host's memory
    is_decimal: bool = False  # whether they were given in GB, not in GiB
    rates: Rates | None = None  # of the machine, where they are known

    def size(self, num_bytes: float) -> str:
        """Return a size in words, in the units of the budgets."""
        return format_bytes(num_bytes, is_decimal=self.is_decimal)

    def enough(self, num_bytes: float) -> str:
        """Return a size as a flag takes it, rounded up."""
        unit_bytes, unit = (10**6, "MB") if self.is_decimal else (2**20, "MiB")
        return f"{math.ceil(num_bytes / unit_bytes)}{unit}"


def make_plan(
    target: ModelShape,
    draft: ModelShape | None,
    budgets: Budgets,
    *,
    context: int,
    num_nodes: int,
    keeps_distributions: bool = False,
    experts: str = "auto",
    parallel: int = 1,
) -> MemoryPlan:
    """Fill one tier after the other; `num_nodes` is N of the largest tree, or of all texts' trees.

    Routed experts come one by one with `experts` demand, within their layers with layers; auto is
    demand where that is possible and not everything stays.

    Raises:
        UserError: a place cannot hold two slots; names the least budget that works, and the longest
            context and the most texts that do.
    """

    def plan(context: int, parallel: int) -> MemoryPlan:
        nodes = max(num_nodes, parallel)
        sizes = _Sizes(context, nodes, keeps_distributions, parallel, PROMPT_ROWS)
        return _plan_in(target, draft, budgets, sizes, experts)

    try:
        return plan(context, parallel)
    except TooLittleMemoryError as error:
        error.find_smaller = partial(_smaller_runs, plan, context, parallel)
        raise


class TooLittleMemoryError(UserError):
    """A budget that cannot hold two slots.

    Attributes:
        find_smaller: returns what could be lowered instead of raising the budget. That takes some
            dozens of plans, so it is asked when the line is read: searches for a budget raise and
            drop hundreds of these.
    """

    find_smaller: Callable[[], str] | None = None
    _smaller = ""

    def __str__(self) -> str:
        if self.find_smaller is not None:
            self._smaller = self.find_smaller()
            self.find_smaller = None
        return f"{super().__str__()}{self._smaller}"


def _smaller_runs(plan: Callable[[int, int], MemoryPlan], context: int, parallel: int) -> str:
    """Return ` or lower ...`, with the largest values that work; nothing where none does."""
    longest = _most(lambda positions: plan(positions, parallel), context)
    most = _most(lambda num_texts: plan(context, num_texts), parallel)
    remedies = []
    if longest >= _LEAST_CONTEXT:
        remedies.append(f"`context` from {context} to {longest // 16 * 16}")
    if most:
        remedies.append(f"`parallel` from {parallel} to {most}")
    return f" or lower {' or '.join(remedies)}" if remedies else ""


def _most(plan: Callable[[int], MemoryPlan], refused: int) -> int:
    """Return the largest number below `refused` that `plan` does not refuse; 0 for none."""
    works = 0
    while refused - works > 1:
        middle = (works + refused) // 2
        try:
            plan(middle)
            works = middle
        except UserError:
            refused = middle
    return works


def _plan_in(
    target: ModelShape,
    draft: ModelShape | None,
    budgets: Budgets,
    sizes: "_Sizes",
    experts: str,
) -> MemoryPlan:
    """Return the plan for these sizes, with experts as they are asked for."""

    def plan_of(shape: ModelShape) -> MemoryPlan:
        in_rows = lambda rows: _make_plan(shape, draft, budgets, sizes._replace(prompt_rows=rows))  # noqa: E731
        return with_prompt_rows(in_rows, shape, sizes.context, budgets.rates)

    whole = replace(target, experts=None)
    if target.experts is None or experts == "layers":
        return plan_of(whole)
    staying = _staying(partial(plan_of, whole)) if experts == "auto" else None
    return staying or plan_of(on_demand(target))


class _Sizes(NamedTuple):
    """What a run has to have room for."""

    context: int
    num_nodes: int
    keeps_distributions: bool
    parallel: int
    prompt_rows: int


def _staying(plan: Callable[[], MemoryPlan]) -> MemoryPlan | None:
    """Return the plan if all layers stay where they are computed."""
    try:
        found = plan()
    except UserError:
        return None
    return None if found.num_slots else found


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


def _make_plan(
    target: ModelShape, draft: ModelShape | None, budgets: Budgets, sizes: _Sizes
) -> MemoryPlan:
    """Return the plan in which the experts of `target`, if any, are read on demand."""
    context, num_nodes, keeps_distributions, parallel, rows = sizes
    is_gpu = budgets.gpu_bytes is not None
    source_tokens = context if target.encoder_bytes else 0
    num_logits = min(num_nodes, MAX_LOGITS_ROWS) if is_gpu else num_nodes
    kv_slots = source_tokens + num_slots(context, num_nodes, parallel)
    items = {
        "rest_bytes": (target.head_bytes if is_gpu else target.rest_bytes) + target.companion_bytes,
        "draft_bytes": draft_bytes(draft, context, num_nodes, is_gpu=is_gpu, parallel=parallel)
        if draft
        else 0,
        "distribution_bytes": distribution_bytes(target.vocab_size, num_nodes)
        if keeps_distributions and draft
        else 0,
        "kv_bytes": parallel * target.kv_bytes_per_token * kv_slots
        + states_bytes(target, num_nodes, parallel),
        "activation_bytes": (0 if is_gpu else PATH_SCRATCH_BYTES)
        + activation_bytes(target, rows + num_nodes, num_logits, context, is_gpu=is_gpu)
        + target.cast_bytes
        + target.scratch_bytes
        + parallel * noise_bytes(target.vocab_size),
    }
    is_compiled = (
        not is_gpu and _HAS_COMPILER and any(one.is_compiled for one in (target, draft) if one)
    )
    runtime_bytes = RUNTIME_BYTES + (
        HOST_RUNTIME_BYTES if is_gpu else COMPILER_BYTES if is_compiled else 0
    )
    beside_bytes = max(target.beside_bytes, draft.beside_bytes if draft else 0)
    own_bytes = GPU_RUNTIME_BYTES if is_gpu else runtime_bytes
    experts = target.experts
    pool = ExpertPoolSize(experts.num_records, experts.slot_bytes) if experts else ExpertPoolSize()
    slots = "two layer slots and two experts" if experts else "two layer slots"
    places = [
        _computing_place(
            budgets, items, own_bytes, slots, passing_bytes=0 if is_gpu else beside_bytes
        )
    ]
    if is_gpu:
        places.append(_feeding_place(budgets, runtime_bytes + target.table_bytes, target, draft))
    all_bytes = (*target.layer_bytes, *target.encoder_bytes)
    num_layers = len(target.layer_bytes)
    fillings = fill_all(places, all_bytes, num_layers, pool)
    tier_of = {
        layer: tier
        for tier, filling in zip(LayerTier, fillings, strict=False)
        for layer in filling.layers
    }
    tier_L = tuple(tier_of.get(layer, LayerTier.DISK) for layer in range(num_layers))
    slot_bytes = max(all_bytes) if fillings[0].num_slots else 0
    host = fillings[1] if is_gpu else Filling(frozenset(), 0)
    hosted_bytes = (
        sum(target.layer_bytes[layer] for layer in host.layers) + host.num_slots * slot_bytes
    )
    hosted_bytes += host.num_expert_slots * pool.slot_bytes
    return MemoryPlan(
        device="cuda" if is_gpu else "cpu",
        ram_bytes=budgets.ram_bytes,
        gpu_bytes=budgets.gpu_bytes,
        context=context,
        num_nodes=num_nodes,
        parallel=parallel,
        max_prompt_rows=rows,
        num_logits_rows=num_logits,
        runtime_bytes=runtime_bytes,
        gpu_runtime_bytes=GPU_RUNTIME_BYTES if is_gpu else 0,
        table_bytes=target.table_bytes if is_gpu else 0,
        staging_bytes=max(0, places[1].passing_bytes - hosted_bytes) if is_gpu else 0,
        num_slots=fillings[0].num_slots,
        num_host_slots=host.num_slots,
        slot_bytes=slot_bytes,
        layer_bytes=target.layer_bytes,
        tier_L=tier_L,
        source_tokens=source_tokens,
        encoder_bytes=0 if fillings[0].num_slots else sum(target.encoder_bytes),
        num_expert_slots=fillings[0].num_expert_slots,
        num_host_expert_slots=host.num_expert_slots,
        **items,
        **_expert_counts(experts),
    )


def _expert_counts(experts: ExpertShape | None) -> dict[str, int]:
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_records,
        "num_expert_layers": experts.num_layers,
        "experts_per_token": experts.num_layers * experts.num_chosen,
        "expert_slot_bytes": experts.slot_bytes,
    }


def _computing_place(
    budgets: Budgets,
    items: dict[str, int],
    runtime_bytes: int,
    slots: str,
    *,
    passing_bytes: int,
) -> MemoryTier:
    """Return the tier where layers are computed: a GPU's memory, or the host's."""
    where = "RAM"
    argument = "ram"
    budget_bytes = budgets.ram_bytes
    if budgets.gpu_bytes is not None:
        where = "device memory"
        argument = "gpu_memory"
        budget_bytes = budgets.gpu_bytes
    fixed_bytes = runtime_bytes + sum(items.values())
    drafting_bytes = items["draft_bytes"]

    def refusal(slots_bytes: int) -> UserError:
        draft = smaller = ""
        if budgets.gpu_bytes is not None and drafting_bytes:
            room_bytes = budget_bytes - fixed_bytes + drafting_bytes - slots_bytes
            draft = f", {budgets.size(drafting_bytes)} of it for the draft"
            smaller = (
                f", take a draft of at most {budgets.size(room_bytes)}" if room_bytes > 0 else ""
            )
        return TooLittleMemoryError(
            f"needs {budgets.size(slots_bytes)} of {where} for {slots} and {budgets.size(fixed_bytes)} for the "
            f"rest{draft}, budget is {budgets.size(budget_bytes)}: raise `{argument}` to "
            f"{budgets.enough(fixed_bytes + slots_bytes)}{smaller}"
        )

    return MemoryTier(budget_bytes, fixed_bytes, passing_bytes, refusal)


def _feeding_place(
    budgets: Budgets, fixed_bytes: int, target: ModelShape, draft: ModelShape | None
) -> MemoryTier:
    """Return the tier of pinned host memory that feeds a GPU.

    What loading passes through it lies where layers will.
    """
    slabs_of_draft = [*draft.layer_bytes, draft.rest_bytes, draft.beside_bytes] if draft else []

    def refusal(least_bytes: int) -> UserError:
        return TooLittleMemoryError(
            f"needs {budgets.size(least_bytes)} of RAM to pass layers on to the GPU and {budgets.size(fixed_bytes)} "
            f"for embeddings and program, budget is {budgets.size(budgets.ram_bytes)}: raise `ram` to "
            f"{budgets.enough(least_bytes + fixed_bytes)}"
        )

    # a head is expanded from these
    slabs_of_target = [*target.layer_bytes, target.head_bytes + target.beside_bytes]
    return MemoryTier(
        budgets.ram_bytes, fixed_bytes, max(slabs_of_target + slabs_of_draft), refusal
    )


def default_ram_bytes() -> int:
    """Return the free memory less a reserve for everything else: at most three quarters."""
    free_bytes = available_ram_bytes()
    return free_bytes - max(int(_RESERVE_SHARE * free_bytes), _RESERVE_BYTES)


def least_budget(plan: Callable[[int], MemoryPlan]) -> int:
    """Return the smallest budget in bytes that `plan` does not refuse."""
    too_small = 0
    enough = 1 << 50
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        try:
            plan(middle)
            enough = middle
        except UserError:
            too_small = middle
    return enough


def ram_warning(ram: str | int) -> str | None:
    """Return a line for the user who allows more than there is."""
    wanted = ByteSize.parse(ram, "`ram`")
    free_bytes = available_ram_bytes()
    if wanted <= free_bytes:
        return None
    free = format_bytes(free_bytes, is_decimal=wanted.is_decimal)
    return f"`ram` {wanted} is more than the {free} free here: it may not hold"


def default_gpu_bytes(device: str) -> int:
    """Return the free memory of a GPU less a reserve."""
    return int((1 - _GPU_RESERVE_SHARE) * available_gpu_bytes(device))


def require_positions(context: int) -> None:
    """Raise `UserError` where a context is too short for any model."""
    require(
        whole_number(context, "`context`") >= 1,
        "`context` must be 1 or more",
        context,
        "prompt and new tokens have to fit",
    )


def require_dtype(dtype: str) -> None:
    """Raise `UserError` for a type that is not computed in."""
    require(
        dtype in DTYPES,
        f"`dtype` must be one of {', '.join(DTYPES)}",
        repr(dtype),
        'try `dtype="auto"`',
    )


def require_experts(experts: str) -> None:
    """Raise `UserError` for an unknown way of reading experts."""
    require(
        experts in EXPERTS,
        f"`experts` must be one of {', '.join(EXPERTS)}",
        repr(experts),
        'try `experts="auto"`',
    )


def _check_experts(target: Checkpoint, shape: ModelShape, experts: str) -> None:
    """Raise `UserError` where experts cannot be read as requested."""
    require_experts(experts)
    kind = str(target.config.get("model_type"))
    rule = "`experts` demand needs a mixture whose experts can be read one by one"
    require(
        shape.experts is not None or experts != "demand",
        rule,
        f"model type {kind}",
        'try `experts="layers"`',
    )


def _check_encoders(
    target: Checkpoint, draft: Checkpoint | None, *, is_gpu: bool, parallel: int
) -> None:
    rule = "models with an encoder write one text at a time, `parallel` must be 1"
    require(parallel == 1 or not has_encoder(target.config), rule, parallel, "leave it out")
    if draft is not None and has_encoder(target.config) != has_encoder(draft.config):
        kinds = [str(one.config.get("model_type")) for one in (target, draft)]
        what = f"target and draft must both have an encoder or none, got {' and '.join(kinds)}"
        raise UserError(f"{what}: choose a smaller model of the target's family")
    if has_encoder(target.config) and is_gpu:
        raise UserError(
            "models with an encoder are computed by the CPU, `device` is cuda: give `device` cpu"
        )


def _check_context(checkpoint: Checkpoint, context: int | None) -> int:
    limit = _longest_context(checkpoint)
    if context is None:
        usual = TRAINED_CONTEXT if has_encoder(checkpoint.config) else DEFAULT_CONTEXT
        return min(limit or usual, usual)
    require_positions(context)
    if limit and context > limit:
        is_turn = _turning_point(checkpoint) is not None
        why = (
            "beyond which longrope turns all positions anew"
            if is_turn
            else "which this model was made for"
        )
        raise UserError(f"`context` must be at most {limit}, {why}, got {context}: lower it")
    return context


def _longest_context(checkpoint: Checkpoint) -> int | None:
    return _turning_point(checkpoint) or config_sizes(checkpoint).get("max_position_embeddings")


def _turning_point(checkpoint: Checkpoint) -> int | None:
    """Return the position where a longrope model changes the frequencies of all positions at once.

    No cached key fits any more from there on.
    """
    config = text_config(checkpoint)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or "long_factor" not in rope:
        return None
    original = rope.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    return original if type(original) is int and original > 0 else None
