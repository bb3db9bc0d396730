"""The sizes of experts and other parts of a mixture's layers, from headers alone.

Routed experts are stored as separate tensors, or as stacks whose first dimension counts them.
Invariant: every byte of a layer belongs to one expert or is dense.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.layout import group_by_layer, slab_bytes_bound, slice_of
from offload.checkpoint.tensors import MIXTURE, Entries, TensorEntry, layer_name
from offload.encoding.base import ENCODINGS, StorageType

# names within a layer; not `shared_experts.`, which every row passes
_ROUTED = re.compile(rf".*?{MIXTURE}(?:(\d{{1,9}})\.)?(.+)$")
_EXPERT = re.compile(rf"\.{MIXTURE}.*")
_SCRATCH_ALIGN_BYTES = 256

# layer, expert (None: all experts in a stack), and the rest of the name
RoutedName = tuple[int, int | None, str]


def routed_name(name: str) -> RoutedName | None:
    """Return the parts of a tensor's name; None unless it belongs to routed experts."""
    place = layer_name(name)
    match = _ROUTED.match(place.inner) if place else None
    if place is None or match is None:
        return None
    return place.layer, None if match[1] is None else int(match[1]), match[2]


class ExpertShape(NamedTuple):
    """The sizes of a mixture; an expert's record is all of its tensors."""

    num_layers: int  # layers with routed experts
    num_experts: int  # E, experts of each layer
    num_chosen: int  # k, experts that the router chooses for a row
    slot_bytes: int  # bytes of the largest record
    dense_bytes: tuple[int, ...]  # bytes of every layer without its routed experts
    # room for the expanded weights of one module; an expert is a module
    scratch_bytes: int = 0
    # copies of a layer's dense part and of one expert in the compute type, if it is another
    cast_bytes: int = 0
    # what a layer's chosen experts add to one row, kept until it is summed
    row_bytes: int = 0

    @property
    def num_records(self) -> int:
        return self.num_layers * self.num_experts


def expert_shape(
    checkpoint: Checkpoint, width: int, num_layers: int, computed: StorageType
) -> ExpertShape | None:
    """Return the experts of a model that computes in `computed`; None if it has fewer than two.

    `width` is the width of a row.
    """
    num_experts, num_chosen = chosen_experts(checkpoint)
    names = {name: routed_name(name) for name in checkpoint.tensors}
    routed = {name: place for name, place in names.items() if place and place[0] < num_layers}
    if not routed or not num_chosen:
        return None
    experts = _records(checkpoint, routed, num_experts)
    if experts is None or len(experts) < 2:
        return None
    dense = {name: entry for name, entry in checkpoint.tensors.items() if name not in routed}
    layers, _ = group_by_layer(replace(checkpoint, tensors=dense), num_layers)
    return ExpertShape(
        num_layers=len({layer for layer, *_ in routed.values()}),
        num_experts=num_experts,
        num_chosen=num_chosen,
        slot_bytes=max(map(slab_bytes_bound, experts)),
        dense_bytes=tuple(map(slab_bytes_bound, layers)),
        scratch_bytes=scratch_bytes_of(
            dense, computed, max(_expanded_bytes(expert, computed) for expert in experts)
        ),
        cast_bytes=sum(
            max(cast_bytes_of(part, computed) for part in parts) for parts in (layers, experts)
        ),
        row_bytes=num_chosen * width * computed.align_bytes,
    )


def chosen_experts(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return E and k of a layer; zeros if every row is multiplied with every expert."""
    counts = [(spec.num_experts, spec.num_chosen) for spec in checkpoint.layers]
    return max(filter(all, counts), default=(0, 0))


def _records(
    checkpoint: Checkpoint, routed: Mapping[str, RoutedName], num_experts: int
) -> list[list[TensorEntry]] | None:
    """Return the tensors of every expert; None where a stack cannot be taken apart."""
    records = defaultdict[tuple[int, int], list[TensorEntry]](list)
    for name, (layer, number, _) in routed.items():
        entry = checkpoint.tensors[name]
        if number is not None:
            records[layer, number].append(entry)
        elif not _is_stack(entry, num_experts):
            return None
        else:
            for expert in range(num_experts):
                records[layer, expert].append(slice_of(entry, expert, num_experts))
    return [*records.values()]


def _is_stack(entry: TensorEntry, num_experts: int) -> bool:
    """Return True if an expert's part, and that of its companions, is a run of bytes."""
    is_even = len(entry.shape) > 1 and entry.shape[0] == num_experts
    is_even = is_even and entry.num_bytes % num_experts == 0
    if entry.coded is None or not is_even:
        return is_even
    coding = entry.coded.coding
    each_bytes = coding.stored_bytes((1, *entry.shape[1:]))
    is_even = coding.stored_bytes(entry.shape) == num_experts * each_bytes
    return is_even and all(
        companion.shape[:1] == (num_experts,) for _, companion in entry.companions
    )


def scratch_bytes_of(tensors: Entries, computed: StorageType, least_bytes: int = 0) -> int:
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


def _expanded_bytes(entries: Sequence[TensorEntry], computed: StorageType) -> int:
    coded = [entry for entry in entries if entry.coded is not None]
    return sum(computed.stored_bytes(entry.shape) + _SCRATCH_ALIGN_BYTES for entry in coded)


def cast_bytes_of(entries: Iterable[TensorEntry], computed: StorageType) -> int:
    """Return the bytes of copies in the compute type; coded tensors use the scratch instead."""
    plain = (entry for entry in entries if entry.coded is None and entry.dtype in ENCODINGS)
    return sum(
        computed.stored_bytes(entry.shape) for entry in plain if entry.dtype != computed.name
    )
