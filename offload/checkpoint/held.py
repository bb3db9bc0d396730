"""Quantised drafts: which weights a draft holds in fewer bits than its files, and their sizes.

Rounding costs accepted tokens and never exactness. All matrices in layers that rows are multiplied
with are quantised; embeddings, norms, head and fused experts keep their type. At 4 bits, columns
form groups with a scale and an offset each; at 8 bits, each row has one scale. Invariant: planning
and loading use the same rules, so what is planned is what memory holds.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from offload.checkpoint.tensors import MIXTURE, Entries, TensorEntry, layer_name
from offload.encoding.base import StorageType
from offload.encoding.residuals import Residual, group_of, held_bytes, padded_rows

_BLOCK_ROWS = 64
# Torch rounds this many numbers at once; each takes room for float32, a code and a word.
_CHUNK_NUMBERS = 1 << 20
_CHUNK_ITEM_BYTES = 10
# smaller ones are not worth a residual
_LEAST_WEIGHTS = 2048
# Up to this many rows a CPU uses integer products, unless measurements say otherwise.
FEW_ROWS = 4
# Mamba reads `dt_proj` outside its module, where nothing would expand it.
_NOT_LINEAR = re.compile(rf"{MIXTURE}|\.(gate|router|dt_proj)\b|relative_attention_bias|embed|norm")


class Held(NamedTuple):
    """How a draft's weights are quantised in memory."""

    bits: int  # 4 or 8
    is_copy: bool = False  # a self draft: it shares the target's embeddings, norm and head


class HeldSizes(NamedTuple):
    """The memory that a quantised draft takes."""

    layer_bytes: tuple[int, ...]  # all layers, an encoder's last
    scratch_bytes: int  # the largest matrix, expanded
    passing_bytes: int  # memory that loading takes while a layer is rounded
    expanded_weights: int  # numbers that a pass of many rows expands, one matrix after the other
    rounds: bool  # whether loading rounds matrices, or all of them lie in the target's files


def is_held(name: str, shape: tuple[int, ...]) -> bool:
    """Return True if a tensor of a layer is a matrix that is quantised."""
    return len(shape) == 2 and name.endswith(".weight") and not _NOT_LINEAR.search(name)


def copied_matrix(name: str, entry: TensorEntry) -> bool:
    """Return True for a matrix that gets a 4-bit copy for drafting."""
    place = layer_name(name)
    if place is None or entry.coded is not None or entry.dtype != "BF16":
        return False
    is_large = math.prod(entry.shape) >= _LEAST_WEIGHTS
    return is_held(place.inner, entry.shape) and group_of(entry.shape[1]) is not None and is_large


def is_residual(entry: TensorEntry) -> bool:
    """Return True for a matrix that is stored beside its copy in 4 bits."""
    return entry.coded is not None and isinstance(entry.coded.coding, Residual)


def is_shared(entry: TensorEntry, held: Held | None) -> bool:
    """Return True if a draft multiplies with a copy that its target keeps anyway."""
    is_copy = held is not None and held.is_copy and held.bits == 4
    return is_copy and is_residual(entry)


def shared_bytes(shape: tuple[int, ...], computed: StorageType) -> int:
    """Return the bytes of a draft in addition to such a copy: scales in its compute type."""
    if computed.name == "BF16":
        return 0
    words_bytes = padded_rows(shape[0]) * shape[1] // 2
    return held_bytes(shape, 4, computed.align_bytes) - words_bytes


def held_sizes(
    tensors: Entries, layers: Iterable[Iterable[TensorEntry]], held: Held, computed: StorageType
) -> HeldSizes:
    """Return the memory of a draft with these layers."""
    names = {entry: name for name, entry in tensors.items()}
    item_bytes = computed.align_bytes
    layer_bytes = []
    matrices = []
    passing_bytes = 0
    rounds = False
    for entries in layers:
        shared = [entry for entry in entries if is_shared(entry, held)]
        matrices += [entry.shape for entry in shared]
        shared_bytes_of = sum(shared_bytes(entry.shape, computed) for entry in shared)
        entries = [entry for entry in entries if entry not in shared]
        matrices_here = [entry for entry in entries if is_held(names[entry], entry.shape)]
        others = sum(
            computed.stored_bytes(entry.shape) for entry in entries if entry not in matrices_here
        )
        own_bytes = sum(held_bytes(entry.shape, held.bits, item_bytes) for entry in matrices_here)
        layer_bytes.append(own_bytes + others + shared_bytes_of)
        matrices += [entry.shape for entry in matrices_here]
        rounds = rounds or bool(matrices_here)
        stored = sum(entry.num_bytes + computed.stored_bytes(entry.shape) for entry in entries)
        # numbers that are rounded in one step; the compiled encoder needs far fewer
        rounded = 0
        for num_rows, num_columns in (entry.shape for entry in matrices_here):
            least = max(_CHUNK_NUMBERS, _BLOCK_ROWS * num_columns)
            rounded = max(rounded, min(padded_rows(num_rows) * num_columns, least))
        passing_bytes = max(passing_bytes, stored + rounded * _CHUNK_ITEM_BYTES)
    scratch = max((padded_rows(rows) * columns for rows, columns in matrices), default=0)
    num_weights = sum(map(math.prod, matrices))
    room_bytes = scratch * item_bytes
    return HeldSizes(tuple(layer_bytes), room_bytes, passing_bytes, num_weights, rounds)
