"""Where every byte goes: arithmetic from header sizes and budgets to a memory plan, for this machine or any other.

Pure functions of numbers, so that a plan for a 70B model on a machine nobody here owns can be tested. Invariant: the
items of a plan add up to no more than its budget, and a plan that cannot hold two slots is refused with the least that
works.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from offload.checkpoint import ITEM_BYTES, Checkpoint, TensorEntry, compute_dtype_name
from offload.config import DTYPES, drafting_of, format_bytes, parse_size
from offload.errors import UserError
from offload.layout import group_by_layer, slab_bytes_bound
from offload.machine import available_ram_bytes

RUNTIME_BYTES = 112 << 20  # code that runs for the first time, tokenizer, scratch of the matrix library: measured
READ_BUFFER_BYTES = 5 << 20  # per reader, where a layer must be regrouped
MAX_PROMPT_ROWS = 512  # committed tokens that one sweep takes in
DEFAULT_CONTEXT = 4096
DRAW_BYTES = 16 << 20  # scratch of one draw: a block of float64 numbers, their keys, their order
_RESERVE_SHARE, _RESERVE_BYTES = 0.05, 1 << 30  # of free memory, left to everything else
_STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_MIN_SLOTS, _WANTED_SLOTS = 2, 3
_KV_NAME = re.compile(r"\blayers\.\d+\.(.*\.)?[kv]_proj\.weight$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of one model that matter for memory."""

    layer_bytes: tuple[int, ...]
    rest_bytes: int  # embeddings, norm, head
    kv_bytes_per_token: int
    row_bytes: int  # activations of one row of a forward pass
    logits_row_bytes: int
    vocab_size: int = 0
    cast_bytes: int = 0  # copy of one layer in the compute type, where that is not the stored one

    @property
    def num_bytes(self) -> int:
        """All weights."""
        return sum(self.layer_bytes) + self.rest_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Which layers stay, how many slots the others pass through, and what everything else takes."""

    ram_bytes: int
    context: int
    num_nodes: int
    max_prompt_rows: int
    runtime_bytes: int
    rest_bytes: int
    draft_bytes: int
    law_bytes: int
    kv_bytes: int
    activation_bytes: int
    slot_bytes: int
    num_slots: int
    layer_bytes: tuple[int, ...]
    is_resident: tuple[bool, ...]

    @property
    def num_resident(self) -> int:
        """Layers that stay."""
        return sum(self.is_resident)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the layers that stay."""
        return sum(size for size, stays in zip(self.layer_bytes, self.is_resident, strict=True) if stays)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that every sweep moves over the link."""
        return sum(self.layer_bytes) - self.resident_bytes

    @property
    def total_bytes(self) -> int:
        """What the plan takes of the budget."""
        return self.fixed_bytes + self.num_slots * self.slot_bytes + self.resident_bytes

    @property
    def cache_slots(self) -> int:
        """S: committed positions and the rows of the largest sweep."""
        return self.context + self.num_nodes + self.max_prompt_rows

    @property
    def fixed_bytes(self) -> int:
        """Everything but layers and slots."""
        models_bytes = self.rest_bytes + self.draft_bytes + self.law_bytes
        return self.runtime_bytes + models_bytes + self.kv_bytes + self.activation_bytes

    def as_dict(self) -> dict[str, object]:
        """The plan by the names that `--json` uses."""
        num_streamed = len(self.layer_bytes) - self.num_resident
        return {
            "tiers": {
                "resident": {"num_layers": self.num_resident, "num_bytes": self.resident_bytes},
                "disk": {"num_layers": num_streamed, "num_bytes": self.streamed_bytes},
            },
            "slots": {"num_slots": self.num_slots, "slot_bytes": self.slot_bytes},
            "budgets": {"ram_bytes": self.ram_bytes, "planned_bytes": self.total_bytes},
            "runtime_bytes": self.runtime_bytes,
            "embedding_and_head_bytes": self.rest_bytes,
            "draft_bytes": self.draft_bytes,
            "law_bytes": self.law_bytes,
            "kv_bytes": self.kv_bytes,
            "activation_bytes": self.activation_bytes,
            "context": self.context,
            "resident_layers": [index for index, stays in enumerate(self.is_resident) if stays],
        }


def plan_memory(
    target: Checkpoint,
    draft: Checkpoint | None,
    *,
    ram: str | int | None,
    dtype: str,
    context: int | None,
    num_nodes: int,
    rule: str = "match",
) -> MemoryPlan:
    """The plan that loading follows, from headers alone.

    Args:
        ram: budget; None takes what is free now, less a reserve.
        dtype: to compute in, one of `DTYPES`.
        context: positions; None takes the model's limit, at most `DEFAULT_CONTEXT`.
        num_nodes: N of the largest tree.
        rule: of acceptance; some need the laws that a tree's tokens were drawn from.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return make_plan(
        model_shape(target, dtype),
        model_shape(draft, dtype) if draft else None,
        ram_bytes=default_ram_bytes() if ram is None else parse_size(ram, "--ram"),
        context=_check_context(target, context),
        num_nodes=num_nodes,
        keeps_laws=drafting_of(rule).keeps_laws,
    )


def model_shape(checkpoint: Checkpoint, dtype: str = "auto") -> ModelShape:
    """Sizes of a model that computes in `dtype`, from its headers and config alone.

    Raises:
        UserError: config.json lacks the sizes of a decoder.
    """
    sizes = _sizes(checkpoint)
    num_layers = sizes["num_hidden_layers"]
    # A config may claim any number: one layer more than there are tensors shows that it is wrong.
    layers, rest = group_by_layer(checkpoint, min(num_layers, len(checkpoint.tensors) + 1))
    empty = next((index for index, entries in enumerate(layers) if not entries), None)
    if empty is not None:
        raise UserError(f"{checkpoint.directory.name}: no tensors for layer {empty} of {num_layers}: {_LOOK}")
    dtype = _STORED_AS[compute_dtype_name(checkpoint, dtype)]
    item_bytes = ITEM_BYTES[dtype]
    return ModelShape(
        layer_bytes=tuple(slab_bytes_bound(entries) for entries in layers),
        rest_bytes=slab_bytes_bound(rest) + _cast_bytes(rest, dtype),
        kv_bytes_per_token=(_projected_kv_width(checkpoint) or num_layers * _kv_width(sizes)) * item_bytes,
        row_bytes=_row_bytes(sizes, item_bytes),
        logits_row_bytes=sizes.get("vocab_size", 0) * (item_bytes + 4),
        vocab_size=sizes.get("vocab_size", 0),
        cast_bytes=max(_cast_bytes(entries, dtype) for entries in layers),
    )


def _cast_bytes(entries: Iterable[TensorEntry], dtype: str) -> int:
    """What the copies of these tensors take that are not stored in the compute type."""
    others = (entry for entry in entries if entry.dtype != dtype and entry.dtype in ITEM_BYTES)
    return sum(math.prod(entry.shape) * ITEM_BYTES[dtype] for entry in others)


_LOOK = "a decoder needs model.layers.0, 1, 2, ..."
_NEEDED = ("num_hidden_layers", "hidden_size")
_OPTIONAL = ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "num_experts_per_tok", "max_position_embeddings", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
             "v_head_dim", "kv_channels")  # fmt: skip


def make_plan(
    target: ModelShape,
    draft: ModelShape | None,
    *,
    ram_bytes: int,
    context: int,
    num_nodes: int,
    keeps_laws: bool = False,
) -> MemoryPlan:
    """Divide the budget: what must be there first, then slots, then as many resident layers as fit.

    Raises:
        UserError: not even two slots fit; names the least budget that works.
    """
    prompt_rows = min(MAX_PROMPT_ROWS, context)
    fixed = {
        "runtime_bytes": RUNTIME_BYTES,
        "rest_bytes": target.rest_bytes,
        "draft_bytes": _draft_bytes(draft, context, num_nodes) if draft else 0,
        "law_bytes": _law_bytes(target.vocab_size, num_nodes) if keeps_laws else 0,
        "kv_bytes": target.kv_bytes_per_token * (context + num_nodes + prompt_rows),
        "activation_bytes": _activation_bytes(target, prompt_rows + num_nodes, num_nodes, context) + target.cast_bytes,
    }
    left_bytes, slot_bytes = ram_bytes - sum(fixed.values()), max(target.layer_bytes)
    if left_bytes >= sum(target.layer_bytes):
        num_slots, is_resident = 0, (True,) * len(target.layer_bytes)
    else:
        _require_two_slots(ram_bytes, sum(fixed.values()), slot_bytes, context)
        num_slots = _WANTED_SLOTS if left_bytes >= _WANTED_SLOTS * slot_bytes else _MIN_SLOTS
        is_resident = _spread_resident(target.layer_bytes, left_bytes - num_slots * slot_bytes)
    return MemoryPlan(
        ram_bytes=ram_bytes,
        context=context,
        num_nodes=num_nodes,
        max_prompt_rows=prompt_rows,
        slot_bytes=slot_bytes if num_slots else 0,
        num_slots=num_slots,
        layer_bytes=target.layer_bytes,
        is_resident=is_resident,
        **fixed,
    )


def default_ram_bytes() -> int:
    """What is free now, less a reserve for everything else."""
    free_bytes = available_ram_bytes()
    return free_bytes - max(int(_RESERVE_SHARE * free_bytes), _RESERVE_BYTES)


def _check_context(checkpoint: Checkpoint, context: int | None) -> int:
    turning_point = _turning_point(checkpoint)
    limit = turning_point or _sizes(checkpoint).get("max_position_embeddings")
    if context is None:
        return min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if context < 1:
        raise UserError(f"--context must be 1 or more, got {context}: prompt and new tokens have to fit")
    if limit and context > limit:
        why = "beyond which longrope turns all positions anew" if turning_point else "which this model was made for"
        raise UserError(f"--context must be at most {limit}, {why}, got {context}: lower it")
    return context


def _turning_point(checkpoint: Checkpoint) -> int | None:
    """Where a longrope model changes the frequencies of all positions at once, so that no cached key fits any more."""
    config = _text_config(checkpoint)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or "long_factor" not in rope:
        return None
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return original if type(original) is int and original > 0 else None


def _require_two_slots(ram_bytes: int, fixed_bytes: int, slot_bytes: int, context: int) -> None:
    least_bytes = fixed_bytes + _MIN_SLOTS * slot_bytes
    if ram_bytes < least_bytes:
        raise UserError(
            f"needs {format_bytes(_MIN_SLOTS * slot_bytes)} of RAM for two layer slots and {format_bytes(fixed_bytes)} "
            f"for the rest, budget is {format_bytes(ram_bytes)}: raise --ram to {math.ceil(least_bytes / 2**20)}MiB"
            f" or lower --context from {context}"
        )


def _spread_resident(layer_bytes: Sequence[int], budget_bytes: int) -> tuple[bool, ...]:
    """As many layers as the budget holds, evenly spread, so that the stream never has to hurry through a long gap."""
    num_layers = len(layer_bytes)
    for count in range(num_layers - 1, 0, -1):
        chosen = {index * num_layers // count for index in range(count)}
        if sum(layer_bytes[index] for index in chosen) <= budget_bytes:
            return tuple(index in chosen for index in range(num_layers))
    return (False,) * num_layers


def _draft_bytes(draft: ModelShape, context: int, num_nodes: int) -> int:
    rows = max(MAX_PROMPT_ROWS, num_nodes)
    kv_bytes = draft.kv_bytes_per_token * (context + num_nodes + MAX_PROMPT_ROWS)
    return (
        draft.num_bytes
        + draft.cast_bytes * len(draft.layer_bytes)
        + kv_bytes
        + _activation_bytes(draft, rows, num_nodes, context)
    )


def _law_bytes(vocab_size: int, num_nodes: int) -> int:
    """Laws in float32 for every node that may have children: all but one, since a chain is a tree of that size too."""
    return 4 * vocab_size * (num_nodes - 1) + DRAW_BYTES if num_nodes > 1 else 0


def _activation_bytes(shape: ModelShape, num_rows: int, num_logits: int, context: int) -> int:
    """Activations of the widest pass, its logits, and its mask in the largest form that attention makes of it."""
    mask_bytes = 2 * num_rows * (context + num_rows)
    return shape.row_bytes * num_rows + shape.logits_row_bytes * num_logits + mask_bytes


def _row_bytes(sizes: dict[str, int], item_bytes: int) -> int:
    """What one row holds at once inside a layer: residual, norms (partly in fp32), heads, feed-forward."""
    width = sizes["hidden_size"]
    feed_forward = sizes.get("intermediate_size", 4 * width) * sizes.get("num_experts_per_tok", 1)
    heads_width = sizes.get("num_attention_heads", 1) * _head_dim(sizes)
    return item_bytes * (4 * width + 3 * feed_forward + 3 * heads_width) + 4 * 3 * width


def _projected_kv_width(checkpoint: Checkpoint) -> int:
    """Numbers per token in the keys and values of all layers, by the projections that make them; 0 where fused."""
    rows = {name: math.prod(entry.shape[:1]) for name, entry in checkpoint.tensors.items() if _KV_NAME.search(name)}
    keys = {name: width for name, width in rows.items() if name.endswith("k_proj.weight")}
    return sum(width + rows.get(name.replace("k_proj", "v_proj"), width) for name, width in keys.items())


def _kv_width(sizes: dict[str, int]) -> int:
    """Numbers per token and layer in keys and values together; compressed ones are kept expanded, head by head."""
    if "kv_lora_rank" in sizes:
        expanded = sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0) + sizes.get("v_head_dim", 0)
        return sizes.get("num_attention_heads", 1) * expanded
    return 2 * sizes.get("num_key_value_heads", sizes.get("num_attention_heads", 1)) * _head_dim(sizes)


def _head_dim(sizes: dict[str, int]) -> int:
    usual = sizes["hidden_size"] // sizes.get("num_attention_heads", 1)
    return sizes.get("head_dim") or sizes.get("kv_channels") or usual


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    text_config = checkpoint.config.get("text_config")
    return text_config if isinstance(text_config, dict) else checkpoint.config


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """The numbers of config.json that memory depends on, as far as it has them; of one per layer the largest."""
    where, config = checkpoint.directory.name, _text_config(checkpoint)
    given = {key: config[key] for key in (*_NEEDED, *_OPTIONAL) if config.get(key)}
    for key in _NEEDED:
        if key not in given:
            kind = checkpoint.config.get("model_type", "unknown")
            raise UserError(f"{where}: config.json has no {key} (model type {kind}): {_LOOK}")
    each = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
    for key, values in each.items():
        if not all(type(value) is int and value > 0 for value in values):
            raise UserError(f"{where}: {key} in config.json must be a whole number above 0, got {given[key]!r}: fix it")
    return {key: max(values) for key, values in each.items()}
