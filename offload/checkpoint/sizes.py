"""The sizes of a model that memory and time depend on, from its config and tensor headers alone.

No weights are read and no model is built. Invariant: a size is never smaller than what loading will
take.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from offload.checkpoint.checkpoint import (
    Carried,
    Checkpoint,
    ModelFiles,
    compute_dtype_name,
    remembered,
    unsupported,
)
from offload.checkpoint.held import FEW_ROWS, Held, HeldSizes, held_sizes, is_residual, is_shared
from offload.checkpoint.layer_sizes import (
    ExpertShape,
    cast_bytes_of,
    chosen_experts,
    expert_shape,
    routed_name,
    scratch_bytes_of,
)
from offload.checkpoint.layout import group_by_layer, slab_bytes_bound
from offload.checkpoint.small_files import decoder_config, first_size, has_encoder, of_text
from offload.checkpoint.spec import FLOAT_BYTES, PLAIN, RecurrentLayer
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import PLAIN_OF, Settings, StorageType
from offload.encoding.residuals import Residual
from offload.errors import UserError
from offload.families.types import MISCOMPUTED, REFUSED

# Gemma 3n and 4 have a table of inputs to every layer.
_PER_LAYER = "embed_tokens_per_layer"
_TABLE_NAME = re.compile(
    rf"\b(embed_tokens|{_PER_LAYER}|embed_in|word_embeddings|wte|shared)\.weight$"
)
# A row lies in a feed-forward three times: the gate, what it lets through, and up.
_INNER_COPIES = 3
_LOOK = "a decoder needs model.layers.0, 1, 2, ..."
# Products of larger numbers could not be told in words any more.
_MAX_SIZE = 1 << 63
_MAX_STREAMS = (1 << 16) - 1
_NEEDED = ("num_hidden_layers", "hidden_size")
_OPTIONAL = (
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "max_position_embeddings",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "kv_channels",
    "num_encoder_layers",
)


class RecurrentShape(NamedTuple):
    """The sizes of recurrent states, summed over all layers unless a name says otherwise."""

    state_bytes: int = 0  # of one text behind one of its positions
    kept_bytes: int = 0  # of one row of a tree, so that its path can be run again
    largest_bytes: int = 0  # of one layer's state
    row_bytes: int = 0  # of a row that passes through a layer


NO_STATES = RecurrentShape()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of one model that matter for memory."""

    layer_bytes: tuple[int, ...]
    rest_bytes: int  # embeddings, norm, head
    kv_bytes_per_token: int  # and index keys
    row_bytes: int  # activations of one row of a forward pass
    logits_row_bytes: int
    # bytes for each pair of a row and a position: masks, and scores where a family keeps them
    pair_bytes: int = 3
    # part of `row_bytes`, within feed-forwards that take rows part by part
    inner_row_bytes: int = 0
    vocab_size: int = 0
    cast_bytes: int = 0  # copy of one layer in the compute type, where that is not the stored one
    table_bytes: int = 0  # of the rest, the embedding tables, of which a pass reads a few rows
    # part of the rest, which lies where layers are computed; a tied head is the table
    head_bytes: int = 0
    num_weights: int = 0  # numbers in the layers and the head, with which rows are multiplied
    # part of these, in routed experts: a row meets a few of them
    routed_weights: int = 0
    routed_bytes: int = 0  # of the layers
    routed_share: float = 1.0  # of the experts that one row meets, k / E
    encoder_bytes: tuple[int, ...] = ()  # of layers that run once per prompt
    companion_bytes: int = 0  # of coded weights in layers, which stay
    scratch_bytes: int = 0  # into which the coded weights of one module are expanded
    beside_bytes: int = 0  # read at once before layers, turned into something else, and let go
    layer_weights: int = 0  # numbers in the layers
    # part of these, expanded in every pass: coded, or held in fewer bits
    expanded_weights: int = 0
    product_rows: int = 0  # up to this many rows a CPU multiplies without expanding them
    # whether numba may compile what expands or rounds its weights
    is_compiled: bool = False
    # with the target, whose embeddings and head it uses; of the rest these bytes are its own
    shares_rest: bool = False
    own_rest_bytes: int = 0
    tap_row_bytes: int = 0  # of the target's hidden states that a row is fed with
    index_bytes_per_token: int = 0  # of keys by which layers choose what they attend to
    # bytes of a visible position in the layer that runs: its keys and values, expanded
    column_bytes: int = 0
    recurrent: RecurrentShape = NO_STATES  # of layers that keep states beside keys and values
    # experts that may come on demand; None if there are none, or all are always used
    experts: ExpertShape | None = None
    num_expert_slots: int = 0  # of a draft whose experts come on demand; 0 for one that stays whole
    scout: "ModelShape | None" = None  # of a copy: the smaller draft below it

    @property
    def num_bytes(self) -> int:
        layers = (*self.layer_bytes, *self.encoder_bytes)
        return sum(layers) + self.rest_bytes + self.companion_bytes


def model_shape(checkpoint: Checkpoint, dtype: str = "auto") -> ModelShape:
    """Return the sizes of a model that computes in `dtype`. Raises `UserError` for no decoder."""
    shape = _shape_in(checkpoint, compute_dtype_name(checkpoint, dtype))
    scout = checkpoint.scout
    return shape if scout is None else replace(shape, scout=model_shape(scout, dtype))


def shapes_of(files: ModelFiles, dtype: str) -> tuple[ModelShape, ModelShape | None]:
    """Return the sizes of both models; None for a missing draft."""
    target, draft = files
    return model_shape(target, dtype), None if draft is None else model_shape(draft, dtype)


@remembered
def _shape_in(checkpoint: Checkpoint, dtype: str) -> ModelShape:
    """Return the sizes of a model that computes in this type, which is no longer `auto`."""
    sizes = config_sizes(checkpoint)
    config = text_config(checkpoint)
    computed = PLAIN_OF[dtype]
    item_bytes = computed.align_bytes
    num_layers = sizes["num_hidden_layers"]
    vocab_size = sizes.get("vocab_size", 0)
    layers, rest = _all_layers(checkpoint, sizes)
    decoder_layers = layers[:num_layers]
    entries = [entry for layer in layers for entry in layer]
    coded = [entry for entry in entries if entry.coded is not None]
    routed = [entry for name, entry in checkpoint.tensors.items() if routed_name(name)]
    table, head = table_and_head(checkpoint, rest, vocab_size)
    kept = _kept_sizes(checkpoint, item_bytes)
    # others would expand their weights for each part
    is_in_parts = not coded and checkpoint.held is None
    is_in_parts = is_in_parts and all(layer.feed_forward == PLAIN for layer in checkpoint.layers)
    inner_bytes = item_bytes * _INNER_COPIES * sizes.get("intermediate_size", 0)
    layer_weights = sum(map(_num_weights, decoder_layers))
    # transformers keeps some of T5 in float32 where float16 is asked for
    is_mixed = has_encoder(checkpoint.config) and dtype == "float16"
    types = [computed, PLAIN_OF["float32"]] if is_mixed else [computed]
    cast_bytes = max(cast_bytes_of(layer, encoding) for layer in layers for encoding in types)
    shape = ModelShape(
        layer_bytes=tuple(map(slab_bytes_bound, decoder_layers)),
        encoder_bytes=tuple(map(slab_bytes_bound, layers[num_layers:])),
        rest_bytes=_rest_bytes(rest, computed),
        row_bytes=_row_bytes(config, sizes, item_bytes) + kept["recurrent"].row_bytes,
        inner_row_bytes=inner_bytes if is_in_parts else 0,
        logits_row_bytes=vocab_size * (item_bytes + 4),
        pair_bytes=_pair_bytes(config, sizes, item_bytes),
        vocab_size=vocab_size,
        cast_bytes=cast_bytes,
        table_bytes=_rest_bytes(table, computed),
        head_bytes=_rest_bytes(head, computed),
        num_weights=layer_weights + _num_weights(head),
        routed_weights=_num_weights(routed),
        routed_bytes=sum(entry.num_bytes for entry in routed),
        companion_bytes=sum(map(_companion_bytes, coded)),
        scratch_bytes=scratch_bytes_of(checkpoint.tensors, computed),
        beside_bytes=_beside_bytes(layers, rest, checkpoint.held),
        layer_weights=layer_weights,
        expanded_weights=_num_weights(coded),
        is_compiled=not all(map(is_residual, coded)),
        **kept,
    )
    held = checkpoint.held
    if checkpoint.carried is not None:
        unshared = [
            entry
            for name, entry in checkpoint.tensors.items()
            if entry in rest and not checkpoint.shares(name)
        ]
        own_bytes = _rest_bytes(unshared, computed)
        shape = _carried_shape(shape, checkpoint.carried, own_bytes, item_bytes)
    if held is None:
        experts = expert_shape(checkpoint, sizes["hidden_size"], num_layers, computed)
        return replace(shape, experts=experts)
    return _held_shape(shape, held, held_sizes(checkpoint.tensors, layers, held, computed))


def _companion_bytes(entry: TensorEntry) -> int:
    return entry.coded.coding.companion_bytes(entry.shape) if entry.coded else 0


def _carried_shape(
    shape: ModelShape, carried: Carried, own_rest_bytes: int, item_bytes: int
) -> ModelShape:
    """Return the sizes of a draft that stands beside its target; one that is lent keys has none."""
    return replace(
        shape,
        shares_rest=True,
        own_rest_bytes=own_rest_bytes,
        tap_row_bytes=carried.num_taps * carried.target_width * item_bytes,
        kv_bytes_per_token=0 if carried.lent else shape.kv_bytes_per_token,
    )


def _kept_sizes(checkpoint: Checkpoint, item_bytes: int) -> dict[str, Any]:
    """Return the sizes that layers keep of a text, and those of the experts that a row meets."""
    layers = checkpoint.layers
    num_layers = config_sizes(checkpoint)["num_hidden_layers"]
    assert len(layers) == num_layers, "its layers are described, see `model.headers.specified`"
    num_experts, num_chosen = chosen_experts(checkpoint)
    return {
        "kv_bytes_per_token": sum(layer.cache_width for layer in layers) * item_bytes,
        "index_bytes_per_token": sum(layer.index_width for layer in layers) * item_bytes,
        "column_bytes": max(layer.expanded_width for layer in layers) * item_bytes,
        "recurrent": _recurrent_shape((layer.states for layer in layers), item_bytes),
        "routed_share": num_chosen / num_experts if num_experts else 1.0,
    }


def _recurrent_shape(layers: Iterable[RecurrentLayer | None], item_bytes: int) -> RecurrentShape:
    """Return the sizes of a model that computes in this many bytes; zeros for most."""
    kept = [layer for layer in layers if layer is not None]
    return RecurrentShape(
        state_bytes=sum(layer.state_bytes(item_bytes) for layer in kept),
        kept_bytes=sum(item_bytes * layer.kept + FLOAT_BYTES * layer.kept_floats for layer in kept),
        largest_bytes=max((FLOAT_BYTES * layer.state for layer in kept), default=0),
        row_bytes=max((FLOAT_BYTES * layer.row_floats for layer in kept), default=0),
    )


def _held_shape(shape: ModelShape, held: Held, sizes: HeldSizes) -> ModelShape:
    """Return the sizes of a draft of this shape that is quantised in memory."""
    num_layers = len(shape.layer_bytes)
    return replace(
        shape,
        layer_bytes=sizes.layer_bytes[:num_layers],
        encoder_bytes=sizes.layer_bytes[num_layers:],
        cast_bytes=0,
        companion_bytes=0,
        scratch_bytes=sizes.scratch_bytes,
        beside_bytes=shape.beside_bytes + sizes.passing_bytes,
        expanded_weights=sizes.expanded_weights,
        product_rows=FEW_ROWS,
        is_compiled=shape.is_compiled or (held.bits == 4 and sizes.rounds),
        shares_rest=shape.shares_rest or held.is_copy,
    )


def copy_obstacle(checkpoint: Checkpoint) -> str | None:
    """Return the reason that a model cannot be its own draft in fewer bits; None where it can."""
    if has_encoder(checkpoint.config):
        return "an encoder"
    return "fused experts" if any(map(routed_name, checkpoint.tensors)) else None


def _all_layers(
    checkpoint: Checkpoint, sizes: Mapping[str, int]
) -> tuple[list[list[TensorEntry]], list[TensorEntry]]:
    """Return tensors by layer, an encoder's last, and the rest. Raises `UserError`."""
    counts = (sizes["num_hidden_layers"], sizes.get("num_encoder_layers", 0))
    # A config may claim any number: one layer more than there are tensors shows that it is wrong.
    layers, rest = group_by_layer(
        checkpoint, *(min(count, len(checkpoint.tensors) + 1) for count in counts)
    )
    empty = next((index for index, entries in enumerate(layers) if not entries), None)
    if empty is not None:
        where = checkpoint.name
        raise UserError(f"{where}: no tensors for layer {empty} of {sum(counts)}: {_LOOK}")
    return layers, rest


def require_layers(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for a config that claims layers of which the files have no tensors."""
    _all_layers(checkpoint, config_sizes(checkpoint))


def _num_weights(entries: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.shape) for entry in entries)


def text_config(checkpoint: Checkpoint) -> Settings:
    """Return the part of the config that describes the decoder of text."""
    return decoder_config(of_text(checkpoint.config))


def config_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the numbers that memory depends on; of a list with one per layer, the largest."""
    kinds = (
        str(config.get("model_type")) for config in (checkpoint.config, of_text(checkpoint.config))
    )
    reasons = REFUSED | MISCOMPUTED
    why = next((reasons[kind] for kind in kinds if kind in reasons), None)
    if why is not None:
        raise unsupported(checkpoint, why)
    where = checkpoint.name
    config = text_config(checkpoint)
    given = {key: config[key] for key in (*_NEEDED, *_OPTIONAL) if config.get(key)}
    for key in _NEEDED:
        if key not in given:
            kind = checkpoint.config.get("model_type", "unknown")
            raise UserError(f"{where}: config.json has no {key} (model type {kind}): {_LOOK}")
    each = {
        key: value if isinstance(value, list) and key not in _NEEDED else [value]
        for key, value in given.items()
    }
    for key, values in each.items():
        if not all(type(value) is int and 0 < value < _MAX_SIZE for value in values):
            requirement = f"{key} in config.json must be a whole number above 0 and below 2^63"
            raise UserError(f"{where}: {requirement}, got {given[key]!r:.80}: fix it")
    return {key: max(values) for key, values in each.items()}


def longest_context(checkpoint: Checkpoint) -> int | None:
    """Return the number of positions that a config states for a model; None if it states none."""
    return config_sizes(checkpoint).get("max_position_embeddings") or turning_point(checkpoint)


def turning_point(checkpoint: Checkpoint) -> int | None:
    """Return the longest text whose positions longrope turns by its short factors.

    Longer texts have all of their positions turned by the long ones, so no key that was computed
    for a shorter text fits.
    """
    config = text_config(checkpoint)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or "long_factor" not in rope:
        return None
    name = "original_max_position_embeddings"
    return first_size(rope if rope.get(name) else config, name, most=math.inf) or None


def head_dim(sizes: dict[str, int]) -> int:
    """Return K, the width of one attention head."""
    usual = sizes["hidden_size"] // sizes.get("num_attention_heads", 1)
    return sizes.get("head_dim") or sizes.get("kv_channels") or usual


def table_and_head(
    checkpoint: Checkpoint, rest: list[TensorEntry], vocab_size: int
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Return embedding tables and what follows the layers: a tied head is the first table."""
    tensors = checkpoint.tensors.items()
    named = {name: entry for name, entry in tensors if _TABLE_NAME.search(name) and entry in rest}
    tables = list(named.values())
    others = [entry for entry in rest if entry not in tables]
    heads = [
        entry for entry in others if len(entry.shape) == 2 and entry.shape[0] >= max(vocab_size, 1)
    ]
    is_tied = bool(others) and not heads
    as_head = [entry for name, entry in named.items() if _PER_LAYER not in name] if is_tied else []
    return tables, others + as_head


def _rest_bytes(entries: list[TensorEntry], computed: StorageType) -> int:
    """Return the bytes of tensors as stored, and of copies in the compute type where needed."""
    plain = [entry for entry in entries if entry.coded is None]
    expanded = (computed.stored_bytes(entry.shape) for entry in entries if entry.coded is not None)
    return slab_bytes_bound(plain) + cast_bytes_of(plain, computed) + sum(expanded)


def _beside_bytes(
    layers: list[list[TensorEntry]], rest: list[TensorEntry], held: Held | None
) -> int:
    """Return the largest slab of companions: copies are read one by one, all else at once."""
    beside = [entry for entry in rest if entry.coded]
    largest_bytes = 0
    for entry in (each for entries in (*layers, rest) for each in entries):
        companions = [companion for _, companion in entry.companions]
        if entry.coded is None or not isinstance(entry.coded.coding, Residual):
            beside += companions
        elif not is_shared(entry, held):
            largest_bytes = max(largest_bytes, slab_bytes_bound(companions))
    return max(largest_bytes, slab_bytes_bound(beside))


def _row_bytes(config: Settings, sizes: dict[str, int], item_bytes: int) -> int:
    """Return a row's bytes inside a layer: residual streams, norms, heads and feed-forward."""
    num_streams = first_size(config, "hc_mult", "hc_count", most=_MAX_STREAMS) or 1
    width = sizes["hidden_size"] * num_streams
    inner = sizes.get("intermediate_size", 4 * sizes["hidden_size"])
    feed_forward = inner * sizes.get("num_experts_per_tok", 1)
    heads_width = sizes.get("num_attention_heads", 1) * head_dim(sizes)
    return item_bytes * (4 * width + _INNER_COPIES * feed_forward + 3 * heads_width) + 4 * 3 * width


def _pair_bytes(config: Settings, sizes: dict[str, int], item_bytes: int) -> int:
    """Return the bytes of a row and a position that it may see.

    Masks for each kind of layer and the bits of the last one; where scores are capped, those of all
    heads. A T5's bias by distance is looked up by integers, masked, and laid out again by the
    attention, for every head.
    """
    if has_encoder(config):
        return 64 + sizes.get("num_attention_heads", 1) * (3 * item_bytes + 4)
    num_masks = 2 if config.get("sliding_window") or config.get("attention_chunk_size") else 1
    is_capped = bool(config.get("attn_logit_softcapping"))
    scores_bytes = sizes.get("num_attention_heads", 1) * (item_bytes + 8) if is_capped else 0
    return num_masks * item_bytes + 1 + scores_bytes


def name_of(model: str) -> str:
    """Return the name as it was given, without the folders around it."""
    # a hub id has no folder here, and its last part is its name all the same
    path = Path(os.path.abspath(model))
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


class ModelFacts(NamedTuple):
    """What one model is, on any machine: its name and its size, from headers."""

    name: str
    num_parameters: int
    num_bytes: int  # as stored, or as held in memory
    is_held: bool = False  # in fewer bits than it is stored in
    # bytes of towers and extra layers, which are never read
    left_out: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def from_checkpoint(cls, model: str, checkpoint: Checkpoint) -> "ModelFacts":
        """Return the facts that headers tell."""
        num_bytes = checkpoint.num_bytes
        shape = model_shape(checkpoint) if checkpoint.held else None
        if shape is not None:
            num_bytes = shape.num_bytes - (shape.rest_bytes if shape.shares_rest else 0)
        # layers may share some
        apart = {(entry.shard, entry.lo): entry for entry in checkpoint.tensors.values()}
        count = sum(math.prod(entry.shape) for entry in apart.values())
        return cls(
            name_of(model),
            count,
            num_bytes,
            is_held=shape is not None,
            left_out=dict(checkpoint.left_out),
        )
