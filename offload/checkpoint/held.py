"""Weights of a draft that are held in fewer bits than they are stored in: which ones, and what they
take.

What a draft says is only proposed, so rounding costs guesses and never exactness. Of the layers all
matrices that one row after another is multiplied with are held so; embeddings, norms, head and
fused experts stay as they are. At 4 bits columns go in groups, each with a scale and an offset; at
8 bits a row has one scale. No torch. Invariant: planning and loading go by the same rules, so that
what is planned is what is held.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import Encoding

# As good as 32 by tokens per sweep, with half as many scales; offsets beat symmetric codes
# (docs/drafts.md).
_GROUPS = (64, 32)
_BLOCK_ROWS = 64  # rows are made up to a multiple of it
# rounded at once by torch: float32, codes, words on the way
_CHUNK_NUMBERS = 1 << 20
_CHUNK_ITEM_BYTES = 10
FEW_ROWS = 4  # that a CPU multiplies with its integer products, unless trials say otherwise
_NOT_LINEAR = re.compile(r"\bexperts\.|\.(gate|router)\b|relative_attention_bias|embed|norm")


class Held(NamedTuple):
    """How a draft's weights lie in memory."""

    bits: int  # 4 or 8
    is_copy: bool = False  # of the target, whose embeddings, norm and head it uses


class HeldSizes(NamedTuple):
    """What a draft takes that is held so."""

    layer_bytes: tuple[int, ...]  # of all layers, an encoder's last
    scratch_bytes: int  # into which one matrix is expanded
    passing_bytes: int  # while a layer is rounded
    expanded_weights: int  # that are expanded one after another in a pass of many rows


def group_of(num_columns: int) -> int | None:
    """Columns that share a scale at 4 bits; None where they cannot be divided, and 8 bits are
    taken.
    """
    return next((group for group in _GROUPS if num_columns % group == 0), None)


def padded_rows(num_rows: int) -> int:
    """Rows that are held at 4 bits for so many."""
    return -(-num_rows // _BLOCK_ROWS) * _BLOCK_ROWS


def held_bytes(shape: tuple[int, ...], bits: int, item_bytes: int) -> int:
    """Of one matrix (out, in) that is computed with in numbers of so many bytes."""
    num_rows, num_columns = shape
    group = group_of(num_columns) if bits == 4 else None
    if group is None:
        return num_rows * (num_columns + item_bytes)
    return padded_rows(num_rows) * (num_columns // 2 + num_columns // group * 2 * item_bytes)


def is_held(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a layer is a matrix that rows are multiplied with."""
    return len(shape) == 2 and name.endswith(".weight") and not _NOT_LINEAR.search(name)


def held_sizes(
    tensors: Mapping[str, TensorEntry],
    layers: Iterable[Iterable[TensorEntry]],
    held: Held,
    computed: Encoding,
) -> HeldSizes:
    """Of a draft with these layers."""
    names = {entry: name for name, entry in tensors.items()}
    item_bytes = computed.align_bytes
    layer_bytes = []
    matrices = []
    passing_bytes = 0
    for entries in layers:
        own = [entry for entry in entries if is_held(names[entry], entry.shape)]
        others = sum(computed.stored_bytes(entry.shape) for entry in entries if entry not in own)
        layer_bytes.append(
            sum(held_bytes(entry.shape, held.bits, item_bytes) for entry in own) + others
        )
        matrices += [entry.shape for entry in own]
        stored = sum(entry.num_bytes + computed.stored_bytes(entry.shape) for entry in entries)
        rounded = max((_rounded_at_once(*entry.shape) for entry in own), default=0)
        passing_bytes = max(passing_bytes, stored + rounded * _CHUNK_ITEM_BYTES)
    scratch = max((padded_rows(rows) * columns for rows, columns in matrices), default=0)
    return HeldSizes(
        tuple(layer_bytes), scratch * item_bytes, passing_bytes, sum(map(math.prod, matrices))
    )


def _rounded_at_once(num_rows: int, num_columns: int) -> int:
    """Numbers of one matrix; a thread of a compiled encoder needs far fewer."""
    return min(padded_rows(num_rows) * num_columns, max(_CHUNK_NUMBERS, _BLOCK_ROWS * num_columns))
