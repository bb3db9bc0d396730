"""A checkpoint cut to some rows of its layers' matrices: what one of several ranks has of them.

Rows of a matrix lie one behind the other in its file, so a part is as quick to read as the whole. Invariant: entries of
a cut checkpoint lie within those of the whole one, and its layers cover exactly the rows that are asked for.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.tensors import TensorEntry

_IN_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)\.(weight|bias)$")


class Rows(NamedTuple):
    """Rows [lo, hi) of a matrix."""

    lo: int
    hi: int

    @property
    def num(self) -> int:
        return self.hi - self.lo


def layer_tensors(checkpoint: Checkpoint) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of what decoder layers hold, by name within a layer, such as `self_attn.q_proj.weight`."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, entry in checkpoint.tensors.items():
        if found := _IN_LAYER.search(name):
            shapes.setdefault(f"{found[1]}.{found[2]}", set()).add(entry.shape)
    return shapes


def cut_rows(checkpoint: Checkpoint, rows_of: Mapping[str, Rows]) -> Checkpoint:
    """Only these rows of matrices, and of their biases, by name within a layer, such as `mlp.up_proj`."""
    return _map_layers(checkpoint, lambda stem, entry: _cut(entry, rows_of[stem]) if stem in rows_of else entry)


def _map_layers(checkpoint: Checkpoint, change: Callable[[str, TensorEntry], TensorEntry]) -> Checkpoint:
    tensors = dict(checkpoint.tensors)
    for name, entry in tensors.items():
        if found := _IN_LAYER.search(name):
            tensors[name] = change(found[1], entry)
    return replace(checkpoint, tensors=tensors)


def _cut(entry: TensorEntry, rows: Rows) -> TensorEntry:
    num_rows, row_bytes = entry.shape[0], (entry.hi - entry.lo) // entry.shape[0]
    assert 0 <= rows.lo <= rows.hi <= num_rows, f"rows {rows.lo} to {rows.hi} of {num_rows}"
    lo, hi = entry.lo + rows.lo * row_bytes, entry.lo + rows.hi * row_bytes
    return entry._replace(shape=(rows.num, *entry.shape[1:]), lo=lo, hi=hi)
