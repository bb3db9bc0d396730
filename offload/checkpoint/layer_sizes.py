"""What layers of some families have beside attention and one feed-forward, by headers alone.

Routed experts are stored as separate tensors, or as stacks whose first dimension counts them.
Layers that choose what they attend to keep index keys, and compressed keys and values; what others
keep beside keys and values is in `recurrent_sizes.py`. Invariants: every byte of a layer belongs to one expert or is
dense; a size is never smaller than what the cache of a text, or a pass, will take of it.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.layout import group_by_layer, slab_bytes_bound, slice_of
from offload.checkpoint.small_files import first_size
from offload.checkpoint.tensors import (
    MIXTURE,
    MOST_EXPERTS,
    Entries,
    TensorEntry,
    in_layers,
    layer_name,
)
from offload.encoding.base import ENCODINGS, Encoding, Settings
from offload.errors import UserError
from offload.families.types import EXPERTS_ONE_BY_ONE

# within a layer; not `shared_experts.`, which every row meets
_ROUTED = re.compile(rf".*?{MIXTURE}(?:(\d{{1,9}})\.)?(.+)$")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
_EXPERT = re.compile(rf"\.{MIXTURE}.*")
_SCRATCH_ALIGN_BYTES = 256
_MEND = "give the config that belongs to these weights, or download the checkpoint again"

# by layer and expert: its tensors, with their names below it
Records = Mapping[tuple[int, int], Sequence[tuple[str, TensorEntry]]]


# layer, expert (None: of all of them), and what stands below it
RoutedName = tuple[int, int | None, str]


def routed_name(name: str) -> RoutedName | None:
    """Return the parts of a tensor's name; None where it is not of routed experts."""
    own = layer_name(name)
    match = _ROUTED.match(own.inner) if own else None
    if own is None or match is None:
        return None
    return own.layer, None if match[1] is None else int(match[1]), match[2]


class ExpertShape(NamedTuple):
    """The sizes of a mixture; the record of an expert is all that it consists of."""

    num_layers: int  # with routed experts
    num_experts: int  # E of each
    num_chosen: int  # k, by a router for every row
    slot_bytes: int  # of the largest record
    dense_bytes: tuple[int, ...]  # of every layer, without routed experts
    # into which the coded weights of one module are expanded, an expert being one by itself
    scratch_bytes: int = 0
    # copies of a layer's dense part and of one expert, where another type is computed in
    cast_bytes: int = 0
    # what the chosen experts of a layer contribute to one row, kept until it is added up
    row_bytes: int = 0

    @property
    def num_records(self) -> int:
        return self.num_layers * self.num_experts


def expert_shape(
    checkpoint: Checkpoint, config: Settings, num_layers: int, computed: Encoding
) -> ExpertShape | None:
    """Return the experts of a model that computes in `computed`; None for fewer than two.

    Raises `UserError` where config and tensors disagree on their number.
    """
    num_chosen = first_size(config, *_CHOSEN, most=math.inf)
    if config.get("model_type") not in EXPERTS_ONE_BY_ONE or not num_chosen:
        return None
    names = {name: routed_name(name) for name in checkpoint.tensors}
    routed = {name: one for name, one in names.items() if one and one[0] < num_layers}
    if not routed:
        return None
    num_experts = first_size(config, *_COUNTS, most=math.inf)
    # some configs do not tell, but their tensors do
    if not num_experts:
        num_experts = max(
            next(iter(checkpoint.tensors[name].shape), 0) if expert is None else expert + 1
            for name, (_, expert, _) in routed.items()
        )
    records = _records(checkpoint, routed, num_experts)
    if records is None:
        return None
    _check(checkpoint, records, num_experts, num_chosen)
    if len(records) < 2:
        return None
    dense = {name: entry for name, entry in checkpoint.tensors.items() if name not in routed}
    layers, _ = group_by_layer(replace(checkpoint, tensors=dense), num_layers)
    experts = [[entry for _, entry in record] for record in records.values()]
    return ExpertShape(
        num_layers=len(records) // num_experts,
        num_experts=num_experts,
        num_chosen=num_chosen,
        slot_bytes=max(map(slab_bytes_bound, experts)),
        dense_bytes=tuple(map(slab_bytes_bound, layers)),
        scratch_bytes=scratch_bytes_of(
            dense, computed, max(_expanded_bytes(one, computed) for one in experts)
        ),
        cast_bytes=sum(
            max(cast_bytes_of(one, computed) for one in parts) for parts in (layers, experts)
        ),
        row_bytes=num_chosen * int(config["hidden_size"]) * computed.align_bytes,
    )


def routed_share(config: Settings) -> float:
    """Return k / E, or 1 where the config lacks either, so that no expert is left out."""
    num_experts = first_size(config, *_COUNTS)
    num_chosen = first_size(config, *_CHOSEN)
    return min(1.0, num_chosen / num_experts) if num_experts and num_chosen else 1.0


def _records(
    checkpoint: Checkpoint, routed: Mapping[str, RoutedName], num_experts: int
) -> Records | None:
    """Return the tensors of every expert; None where a stack cannot be taken apart."""
    where = checkpoint.name
    if num_experts > MOST_EXPERTS:
        rule = f"{where}: a layer must have at most {MOST_EXPERTS} experts"
        raise UserError(f"{rule}, it has {num_experts}: {_MEND}")
    records = defaultdict[tuple[int, int], list[tuple[str, TensorEntry]]](list)
    for name, (layer, number, inner) in routed.items():
        entry = checkpoint.tensors[name]
        if not entry.num_bytes:
            what = f"{name:.80} must not be empty, it has shape {list(entry.shape)}"
            raise UserError(f"{where}: {what}: {_MEND}")
        if number is not None:
            records[layer, number].append((inner, entry))
            continue
        if len(entry.shape) > 1 and entry.shape[0] != num_experts:
            raise _disagreement(checkpoint, num_experts, f"{name} has shape {list(entry.shape)}")
        if not _is_stack(entry, num_experts):
            return None
        for expert in range(num_experts):
            own = slice_of(entry, expert, num_experts)
            records[layer, expert].append((inner, own))
    return records


def _is_stack(entry: TensorEntry, num_experts: int) -> bool:
    """Return whether an expert's part, and that of its companions, is a run of bytes."""
    if len(entry.shape) < 2 or entry.num_bytes % num_experts:
        return False
    if entry.coded is None:
        return True
    coding = entry.coded.coding
    each_bytes = coding.stored_bytes((1, *entry.shape[1:]))
    is_even = coding.stored_bytes(entry.shape) == num_experts * each_bytes
    return is_even and all(one.shape[:1] == (num_experts,) for _, one in entry.companions)


def _check(checkpoint: Checkpoint, records: Records, num_experts: int, num_chosen: int) -> None:
    """Check that every layer with experts has all of them, and that all have the same tensors."""
    if num_chosen > num_experts:
        raise _disagreement(checkpoint, num_experts, f"{num_chosen} of them are to be chosen")
    for layer, found in Counter(layer for layer, _ in records).items():
        lost = [expert for expert in range(num_experts) if (layer, expert) not in records]
        if found != num_experts or lost:
            which = f", not of expert {lost[0]}" if lost else ""
            what = f"layer {layer} has tensors of {found}{which}"
            raise _disagreement(checkpoint, num_experts, what)
        names = [{name for name, _ in records[layer, expert]} for expert in range(num_experts)]
        for expert, own in enumerate(names):
            if own != names[0]:
                where = f"{checkpoint.name}: expert {expert} of layer {layer}"
                what = f"differs from expert 0 in whether it has {min(own ^ names[0])}"
                raise UserError(f"{where} {what}: download the checkpoint again")


def _disagreement(checkpoint: Checkpoint, num_experts: int, found: str) -> UserError:
    what = f"config.json and tensors must agree on the experts, it has {num_experts} and {found}"
    return UserError(f"{checkpoint.name}: {what}: {_MEND}")


def scratch_bytes_of(tensors: Entries, computed: Encoding, least_bytes: int = 0) -> int:
    """Return the expanded bytes of the module with the most coded weights, and of the one with the
    most around others.

    The experts of a layer are one module; a convolution is expanded with what is around it. What
    comes by itself takes `least_bytes` in place of a module.
    """
    sizes = Counter[str]()
    for name, entry in tensors.items():
        if entry.coded is not None and layer_name(name) is not None:
            module = name.rpartition(".")[0].removesuffix(".conv1d")
            module = _EXPERT.sub(".experts", name) if _EXPERT.search(name) else module
            sizes[module] += _expanded_bytes([entry], computed)
    outer = {module.rpartition(".")[0] for module in sizes} & sizes.keys()
    inner = [size for module, size in sizes.items() if module not in outer]
    return max([least_bytes, *inner]) + max((sizes[module] for module in outer), default=0)


def _expanded_bytes(entries: Sequence[TensorEntry], computed: Encoding) -> int:
    coded = [entry for entry in entries if entry.coded is not None]
    return sum(computed.stored_bytes(entry.shape) + _SCRATCH_ALIGN_BYTES for entry in coded)


def cast_bytes_of(entries: Iterable[TensorEntry], computed: Encoding) -> int:
    """Return the bytes of copies in the compute type; coded tensors use the scratch instead."""
    plain = (entry for entry in entries if entry.coded is None and entry.dtype in ENCODINGS)
    return sum(computed.stored_bytes(one.shape) for one in plain if one.dtype != computed.name)


_INDEX = re.compile(r"(?:self_attn|attention)\.index(?:er\.|_)(\w+)(?:\.weight)?$")
_LATENT = re.compile(r"(?:self_attn|attention)\.w?kv_a_(?:proj_)?with_mqa\.weight$")


class IndexShape(NamedTuple):
    """Counts of numbers, of all layers where nothing else is said."""

    index_width: int = 0  # of index keys of one position
    latent_width: int = 0  # of compressed keys and values of one position
    expanded_width: int = 0  # of one layer's while it runs, of each position that it may see


def index_shape(config: Settings, tensors: Entries, sizes: Mapping[str, int]) -> IndexShape:
    """Return the sizes of a model; zeros for one without such layers."""
    num_layers = sizes["num_hidden_layers"]
    index = index_layers(config, tensors, num_layers)
    if not index:
        return IndexShape()
    latents = {
        layer: entry.shape[0]
        for layer, name, entry in in_layers(tensors, num_layers)
        if _LATENT.match(name)
    }
    # of a head: keys and values as a projection gives them, once more apart, and keys with what turns
    keys_width = 3 * sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0)
    values_width = 2 * sizes.get("v_head_dim", 0)
    expanded = sizes.get("num_attention_heads", 1) * (keys_width + values_width)
    return IndexShape(sum(index.values()), sum(latents.values()), expanded if latents else 0)


def index_layers(config: Settings, tensors: Entries, num_layers: int) -> dict[int, int]:
    """Return the width of a position's index key, by layer."""
    found = dict[int, int]()
    for layer, name, entry in in_layers(tensors, num_layers):
        match = _INDEX.match(name)
        what = match[1] if match else ""
        if what in ("wk", "k_proj"):
            found[layer] = max(found.get(layer, 0), entry.shape[0])
        elif what == "index_kpool_compress_gate":  # behind each key its gate
            found[layer] = 2 * entry.shape[0]
        elif what == "index_qk_proj":
            found[layer] = first_size(config, "indexer_head_dim") or entry.shape[0]
    return found
