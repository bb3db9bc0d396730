"""Where every byte goes on a machine with a GPU: two budgets, three tiers.

The GPU holds what is computed with: the draft, norms and head, keys and values, activations, two or three slots, and
as many layers as then fit. The host holds what feeds it: the other layers in one pinned memory, the embedding
table, of which a sweep needs a few rows, and read-ahead slots for layers that not even the pinned allocator has room
for. Pure arithmetic.

Loading has an order that the host's budget counts on: what goes to the GPU passes before the pinned allocator is
pinned, so that both never lie in memory at once.
"""

import math
from typing import NamedTuple

from offload.checkpoint.sizes import ModelShape
from offload.config import format_bytes
from offload.errors import UserError
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

# A CUDA context with the kernels of torch is 0.3 to 0.5 GiB, growing with the number of multiprocessors; cuBLAS takes a
# workspace of 8 MiB (32 MiB on Hopper) per stream that multiplies, cuBLASLt as much again; and torch's allocator hands
# out segments of 2 or 20 MiB, of which ends stay unused. Usual figures, rounded up; no GPU was at hand to measure one.
GPU_RUNTIME_BYTES = 1 << 30
# What the driver and its libraries keep on the host beside the program's own.
HOST_RUNTIME_BYTES = 1 << 30
# The head is read once per chunk. From about this many rows on multiplying takes longer than reading it (110 TFLOP/s
# over 0.86 TB/s on an L40), so smaller chunks would pay for reading and larger ones only take memory.
MAX_LOGITS_ROWS = 128
_DRAFT_ACTIVATIONS = 2  # those of captured graphs, which keep their buffers, and those of prompts


class Budgets(NamedTuple):
    """What a run may take on a machine with a GPU."""

    gpu_bytes: int
    ram_bytes: int


def make_device_plan(
    target: ModelShape,
    draft: ModelShape | None,
    card: Budgets,
    *,
    context: int,
    num_nodes: int,
    keeps_distributions: bool = False,
    runtime_bytes: int = HOST_RUNTIME_BYTES,
) -> MemoryPlan:
    """Divide both budgets: what must be there first, then slots, then layers, the GPU before the host before the disk.

    Args:
        runtime_bytes: of the program on the host, the driver's part included.

    Raises:
        UserError: the GPU cannot hold two slots, or the host cannot; names the least that works.
    """
    fixed = _fixed_on_card(target, draft, context, num_nodes, keeps_distributions)
    num_slots, resident = _fill_card(target, card.gpu_bytes, fixed, draft is not None, context)
    streamed = [layer for layer in range(len(target.layer_bytes)) if layer not in resident]
    host = _fill_host(target, draft, card.ram_bytes - runtime_bytes, streamed, runtime_bytes)
    tiers = dict.fromkeys(resident, Tier.RESIDENT) | dict.fromkeys(host.layers, Tier.HOST)
    return MemoryPlan(
        ram_bytes=card.ram_bytes,
        gpu_bytes=card.gpu_bytes,
        device="cuda",
        context=context,
        num_nodes=num_nodes,
        max_prompt_rows=min(MAX_PROMPT_ROWS, context),
        num_logits_rows=min(num_nodes, MAX_LOGITS_ROWS),
        runtime_bytes=runtime_bytes,
        gpu_runtime_bytes=GPU_RUNTIME_BYTES,
        table_bytes=target.table_bytes,
        staging_bytes=host.staging_bytes,
        num_host_slots=host.num_slots,
        slot_bytes=max(target.layer_bytes) if streamed else 0,
        num_slots=num_slots,
        layer_bytes=target.layer_bytes,
        tier_L=tuple(tiers.get(layer, Tier.DISK) for layer in range(len(target.layer_bytes))),
        **fixed,
    )


class _Hosting(NamedTuple):
    """How the host feeds the GPU."""

    layers: frozenset[int]  # in the pinned allocator
    num_slots: int  # for the others
    staging_bytes: int


def _fixed_on_card(
    target: ModelShape, draft: ModelShape | None, context: int, num_nodes: int, keeps_distributions: bool
) -> dict[str, int]:
    """By name in `MemoryPlan`, what the GPU holds before any layer of the target."""
    rows = min(MAX_PROMPT_ROWS, context)
    activations = activation_bytes(target, rows + num_nodes, min(num_nodes, MAX_LOGITS_ROWS), context)
    return {
        "rest_bytes": target.head_bytes,
        "draft_bytes": _draft_on_card(draft, context, num_nodes) if draft else 0,
        "distribution_bytes": distribution_bytes(target.vocab_size, num_nodes) if keeps_distributions else 0,
        "kv_bytes": target.kv_bytes_per_token * (context + num_nodes + rows),
        "activation_bytes": activations + target.cast_bytes + noise_bytes(target.vocab_size),
    }


def _draft_on_card(draft: ModelShape, context: int, num_nodes: int) -> int:
    rows = max(MAX_PROMPT_ROWS, num_nodes)
    more_bytes = (_DRAFT_ACTIVATIONS - 1) * activation_bytes(draft, rows, num_nodes, context)
    return draft_bytes(draft, context, num_nodes) + more_bytes


def _fill_card(
    target: ModelShape, gpu_bytes: int, fixed: dict[str, int], has_draft: bool, context: int
) -> tuple[int, frozenset[int]]:
    """Slots, and the layers that stay."""
    fixed_bytes, slot_bytes = GPU_RUNTIME_BYTES + sum(fixed.values()), max(target.layer_bytes)
    left_bytes, layers = gpu_bytes - fixed_bytes, range(len(target.layer_bytes))
    if left_bytes >= sum(target.layer_bytes):
        return 0, frozenset(layers)
    if left_bytes < MIN_SLOTS * slot_bytes:
        raise _card_too_small(gpu_bytes, fixed_bytes, fixed["draft_bytes"] if has_draft else 0, slot_bytes, context)
    num_slots = WANTED_SLOTS if left_bytes >= WANTED_SLOTS * slot_bytes else MIN_SLOTS
    return num_slots, spread(target.layer_bytes, layers, left_bytes - num_slots * slot_bytes)


def _fill_host(
    target: ModelShape, draft: ModelShape | None, left_bytes: int, streamed: list[int], runtime_bytes: int
) -> _Hosting:
    """Pinned layers, and slots for the others; what loading passes through may lie where pinned layers will."""
    passing_bytes = max([*target.layer_bytes, target.head_bytes, *_slabs_of(draft)])
    left_bytes -= target.table_bytes
    arena_bytes = sum(target.layer_bytes[layer] for layer in streamed)
    if left_bytes >= max(arena_bytes, passing_bytes):
        return _Hosting(frozenset(streamed), 0, max(0, passing_bytes - arena_bytes))
    slot_bytes = max(target.layer_bytes)
    least_bytes = max(MIN_SLOTS * slot_bytes, passing_bytes) if streamed else passing_bytes
    if left_bytes < least_bytes:
        raise _host_too_small(left_bytes, least_bytes, target.table_bytes + runtime_bytes)
    num_slots = WANTED_SLOTS if left_bytes >= WANTED_SLOTS * slot_bytes else MIN_SLOTS
    layers = spread(target.layer_bytes, streamed, left_bytes - num_slots * slot_bytes)
    arena_bytes = sum(target.layer_bytes[layer] for layer in layers) + num_slots * slot_bytes
    return _Hosting(layers, num_slots, max(0, passing_bytes - arena_bytes))


def _slabs_of(draft: ModelShape | None) -> list[int]:
    """What a draft is read in."""
    return [*draft.layer_bytes, draft.rest_bytes] if draft else []


def _card_too_small(gpu_bytes: int, fixed_bytes: int, drafting_bytes: int, slot_bytes: int, context: int) -> UserError:
    slots_bytes = MIN_SLOTS * slot_bytes
    room_bytes = gpu_bytes - fixed_bytes + drafting_bytes - slots_bytes
    draft = f", {format_bytes(drafting_bytes)} of it for the draft" if drafting_bytes else ""
    smaller = f", take a draft of at most {format_bytes(room_bytes)}" if drafting_bytes and room_bytes > 0 else ""
    return UserError(
        f"needs {format_bytes(slots_bytes)} of device memory for two layer slots and {format_bytes(fixed_bytes)} for "
        f"the rest{draft}, budget is {format_bytes(gpu_bytes)}: raise `gpu_memory` to "
        f"{math.ceil((fixed_bytes + slots_bytes) / 2**20)}MiB{smaller} or lower `context` from {context}"
    )


def _host_too_small(left_bytes: int, least_bytes: int, other_bytes: int) -> UserError:
    return UserError(
        f"needs {format_bytes(least_bytes)} of RAM to pass layers on to the card and {format_bytes(other_bytes)} for "
        f"embeddings and program, budget is {format_bytes(left_bytes + other_bytes)}: raise `ram` to "
        f"{math.ceil((least_bytes + other_bytes) / 2**20)}MiB"
    )
