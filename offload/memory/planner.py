"""Where every byte goes: from headers and budgets to a memory plan, for this machine or any other.

Pure functions of numbers, so that a plan for a 70B model on a machine nobody here owns can be tested. Invariant: the
items of a plan add up to no more than its budget, and a plan that cannot hold two slots is refused with the least that
works.
"""

import math
from typing import NamedTuple

from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.sizes import ModelShape, config_sizes, model_shape, text_config
from offload.config import DTYPES, drafting_of, format_bytes, parse_size, require
from offload.errors import UserError
from offload.machine import available_gpu_bytes, available_ram_bytes
from offload.memory.device_planner import HOST_RUNTIME_BYTES, Budgets, make_device_plan
from offload.memory.plan import (
    MAX_PROMPT_ROWS,
    MIN_SLOTS,
    WANTED_SLOTS,
    MemoryPlan,
    Tier,
    activation_bytes,
    distribution_bytes,
    draft_bytes,
    noise_bytes,
    spread,
)

RUNTIME_BYTES = 112 << 20  # code that runs for the first time, tokenizer, scratch of the matrix library: measured
DEFAULT_CONTEXT = 4096
_RESERVE_SHARE, _RESERVE_BYTES = 0.05, 1 << 30  # of free memory, left to everything else
_GPU_RESERVE_SHARE = 0.02  # of a GPU's free memory: what else shows on its screen


class Files(NamedTuple):
    """Both checkpoints."""

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
    device: str = "cpu",
    gpu: str | int | None = None,
) -> MemoryPlan:
    """The plan that loading follows, from headers alone.

    Args:
        files: of the target and of the draft, if there is one.
        ram: budget; None takes what is free now, less a reserve.
        dtype: to compute in, one of `DTYPES`.
        context: positions; None takes the model's limit, at most `DEFAULT_CONTEXT`.
        num_nodes: N of the largest tree.
        rule: of acceptance; some need the distributions that a tree's tokens were drawn from.
        device: `cpu`, `cuda` or `cuda:N`.
        gpu: budget on the GPU; None takes what is free on it now, less a reserve.
    """
    require(dtype in DTYPES, f"`dtype` must be one of {', '.join(DTYPES)}", repr(dtype), "try `dtype` auto")
    target, draft = files
    shapes = (model_shape(target, dtype), model_shape(draft, dtype) if draft else None)
    ram_bytes = default_ram_bytes() if ram is None else parse_size(ram, "`ram`")
    positions, keeps_distributions = _check_context(target, context), drafting_of(rule).keeps_distributions
    if device == "cpu":
        return make_plan(
            *shapes,
            ram_bytes=ram_bytes,
            context=positions,
            num_nodes=num_nodes,
            keeps_distributions=keeps_distributions,
        )
    gpu_bytes = default_gpu_bytes(device) if gpu is None else parse_size(gpu, "`gpu_memory`")
    return make_device_plan(
        *shapes,
        Budgets(gpu_bytes, ram_bytes),
        context=positions,
        num_nodes=num_nodes,
        keeps_distributions=keeps_distributions,
        runtime_bytes=RUNTIME_BYTES + HOST_RUNTIME_BYTES,
    )


def make_plan(
    target: ModelShape,
    draft: ModelShape | None,
    *,
    ram_bytes: int,
    context: int,
    num_nodes: int,
    keeps_distributions: bool = False,
) -> MemoryPlan:
    """Divide the budget of a CPU: what must be there first, then slots, then as many resident layers as fit.

    Raises:
        UserError: not even two slots fit; names the least budget that works.
    """
    prompt_rows = min(MAX_PROMPT_ROWS, context)
    fixed = {
        "runtime_bytes": RUNTIME_BYTES,
        "rest_bytes": target.rest_bytes,
        "draft_bytes": draft_bytes(draft, context, num_nodes) if draft else 0,
        "distribution_bytes": distribution_bytes(target.vocab_size, num_nodes) if keeps_distributions else 0,
        "kv_bytes": target.kv_bytes_per_token * (context + num_nodes + prompt_rows),
        "activation_bytes": activation_bytes(target, prompt_rows + num_nodes, num_nodes, context)
        + target.cast_bytes
        + noise_bytes(target.vocab_size),
    }
    left_bytes, slot_bytes, layers = ram_bytes - sum(fixed.values()), max(target.layer_bytes), target.layer_bytes
    if left_bytes >= sum(layers):
        num_slots, resident = 0, frozenset(range(len(layers)))
    else:
        _require_two_slots(ram_bytes, sum(fixed.values()), slot_bytes, context)
        num_slots = WANTED_SLOTS if left_bytes >= WANTED_SLOTS * slot_bytes else MIN_SLOTS
        resident = spread(layers, range(len(layers)), left_bytes - num_slots * slot_bytes)
    return MemoryPlan(
        device="cpu",
        ram_bytes=ram_bytes,
        context=context,
        num_nodes=num_nodes,
        max_prompt_rows=prompt_rows,
        num_logits_rows=num_nodes,
        slot_bytes=slot_bytes if num_slots else 0,
        num_slots=num_slots,
        layer_bytes=layers,
        tier_L=tuple(Tier.RESIDENT if layer in resident else Tier.DISK for layer in range(len(layers))),
        **fixed,
    )


def default_ram_bytes() -> int:
    """What is free now, less a reserve for everything else."""
    free_bytes = available_ram_bytes()
    return free_bytes - max(int(_RESERVE_SHARE * free_bytes), _RESERVE_BYTES)


def ram_warning(ram: str | int) -> str | None:
    """A line for the user who allows more than there is."""
    wanted_bytes, free_bytes = parse_size(ram, "`ram`"), available_ram_bytes()
    if wanted_bytes <= free_bytes:
        return None
    return f"`ram` {format_bytes(wanted_bytes)} is more than the {format_bytes(free_bytes)} free here: it may not hold"


def default_gpu_bytes(device: str) -> int:
    """What is free on a GPU now, less a reserve."""
    return int((1 - _GPU_RESERVE_SHARE) * available_gpu_bytes(device))


def require_positions(context: int) -> None:
    """Raises `UserError` where nothing can be written into so many positions, whatever the model."""
    require(context >= 1, "`context` must be 1 or more", context, "prompt and new tokens have to fit")


def _check_context(checkpoint: Checkpoint, context: int | None) -> int:
    turning_point = _turning_point(checkpoint)
    limit = turning_point or config_sizes(checkpoint).get("max_position_embeddings")
    if context is None:
        return min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    require_positions(context)
    if limit and context > limit:
        why = "beyond which longrope turns all positions anew" if turning_point else "which this model was made for"
        raise UserError(f"`context` must be at most {limit}, {why}, got {context}: lower it")
    return context


def _turning_point(checkpoint: Checkpoint) -> int | None:
    """Where a longrope model changes the frequencies of all positions at once, so that no cached key fits any more."""
    config = text_config(checkpoint)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or "long_factor" not in rope:
        return None
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return original if type(original) is int and original > 0 else None


def _require_two_slots(ram_bytes: int, fixed_bytes: int, slot_bytes: int, context: int) -> None:
    least_bytes = fixed_bytes + MIN_SLOTS * slot_bytes
    if ram_bytes < least_bytes:
        raise UserError(
            f"needs {format_bytes(MIN_SLOTS * slot_bytes)} of RAM for two layer slots and {format_bytes(fixed_bytes)} "
            f"for the rest, budget is {format_bytes(ram_bytes)}: raise `ram` to {math.ceil(least_bytes / 2**20)}MiB"
            f" or lower `context` from {context}"
        )
