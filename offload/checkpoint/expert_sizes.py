"""The sizes of a mixture's routed experts, from its config and tensor headers alone.

Experts are stored as separate tensors, or as stacks whose first dimension counts them, coded or
not. Invariant: every byte of a layer belongs to one expert or is dense.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.families import ON_DEMAND
from offload.checkpoint.layout import group_by_layer, slab_bytes_bound, slice_of
from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.tensors import MIXTURE, MOST_EXPERTS, TensorEntry, first_size
from offload.encoding.base import ENCODINGS, Encoding, Settings
from offload.errors import UserError

# Not `shared_experts.`, which every row meets.
ROUTED_NAME = re.compile(rf"^(?:.*?\.)?layers\.(\d{{1,9}})\..*?{MIXTURE}(?:(\d{{1,9}})\.)?(.+)$")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
SCRATCH_ALIGN_BYTES = 256
_MEND = "give the config that belongs to these weights, or download the checkpoint again"

Record = tuple[int, int]  # layer and expert
# tensors of each, with their names below it
Records = Mapping[Record, Sequence[tuple[str, TensorEntry]]]


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
    if config.get("model_type") not in ON_DEMAND or not num_chosen:
        return None
    matches = {name: ROUTED_NAME.match(name) for name in checkpoint.tensors}
    routed = {name: one for name, one in matches.items() if one and int(one[1]) < num_layers}
    if not routed:
        return None
    num_experts = first_size(config, *_COUNTS, most=math.inf)
    # some configs do not tell, but their tensors do
    if not num_experts:
        num_experts = max(
            int(match[2]) + 1 if match[2] else checkpoint.tensors[name].shape[0]
            for name, match in routed.items()
        )
    records = _records(checkpoint, routed, num_experts)
    if records is None:
        return None
    _check(checkpoint, records, num_experts, num_chosen)
    if len(records) < 2:
        return None
    dense = {name: entry for name, entry in checkpoint.tensors.items() if name not in routed}
    # of the dense module with the most coded weights, or of an expert
    scratch = Counter[str]()
    for name, entry in dense.items():
        if "layers." in name:
            scratch[name.rpartition(".")[0]] += _expanded_bytes([entry], computed)
    layers, _ = group_by_layer(replace(checkpoint, tensors=dense), num_layers)
    experts = [[entry for _, entry in record] for record in records.values()]
    return ExpertShape(
        num_layers=len(records) // num_experts,
        num_experts=num_experts,
        num_chosen=num_chosen,
        slot_bytes=max(map(slab_bytes_bound, experts)),
        dense_bytes=tuple(map(slab_bytes_bound, layers)),
        scratch_bytes=max(*scratch.values(), *(_expanded_bytes(one, computed) for one in experts)),
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
    checkpoint: Checkpoint, routed: Mapping[str, re.Match[str]], num_experts: int
) -> Records | None:
    """Return the tensors of every expert; None where a stack cannot be taken apart."""
    where = checkpoint.directory.name
    if num_experts > MOST_EXPERTS:
        rule = f"{where}: a layer must have at most {MOST_EXPERTS} experts"
        raise UserError(f"{rule}, it has {num_experts}: {_MEND}")
    records: dict[Record, list[tuple[str, TensorEntry]]] = {}
    for name, match in routed.items():
        layer = int(match[1])
        entry = checkpoint.tensors[name]
        if not entry.num_bytes:
            what = f"{name:.80} must not be empty, it has shape {list(entry.shape)}"
            raise UserError(f"{where}: {what}: {_MEND}")
        if match[2] is not None:
            records.setdefault((layer, int(match[2])), []).append((match[3], entry))
            continue
        if len(entry.shape) > 1 and entry.shape[0] != num_experts:
            raise _disagreement(checkpoint, num_experts, f"{name} has shape {list(entry.shape)}")
        if not _is_stack(entry, num_experts):
            return None
        for expert in range(num_experts):
            own = slice_of(entry, expert, num_experts)
            records.setdefault((layer, expert), []).append((match[3], own))
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
                where = f"{checkpoint.directory.name}: expert {expert} of layer {layer}"
                what = f"differs from expert 0 in whether it has {min(own ^ names[0])}"
                raise UserError(f"{where} {what}: download the checkpoint again")


def _disagreement(checkpoint: Checkpoint, num_experts: int, found: str) -> UserError:
    what = f"config.json and tensors must agree on the experts, it has {num_experts} and {found}"
    return UserError(f"{checkpoint.directory.name}: {what}: {_MEND}")


def _expanded_bytes(entries: Sequence[TensorEntry], computed: Encoding) -> int:
    coded = [entry for entry in entries if entry.coded is not None]
    return sum(computed.stored_bytes(entry.shape) + SCRATCH_ALIGN_BYTES for entry in coded)


def cast_bytes_of(entries: Iterable[TensorEntry], computed: Encoding) -> int:
    """Return the bytes of copies in the compute type; coded tensors use the scratch instead."""
    plain = (entry for entry in entries if entry.coded is None and entry.dtype in ENCODINGS)
    return sum(computed.stored_bytes(one.shape) for one in plain if one.dtype != computed.name)
