"""The part of a checkpoint that one of several ranks holds: rows of matrices, or some layers.

The files are the same for every rank; only the headers are cut. Rows of a matrix lie one behind the
other in its file, so a part is as quick to read as the whole. Invariant: the entries of a cut
checkpoint lie within those of the whole one. Rows cover exactly what is asked for; consecutive
sections hold each layer once, and each holds only those embeddings, norm and head that it uses.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.checkpoint import Checkpoint, compute_dtype_name, remembered
from offload.checkpoint.layout import group_by_layer
from offload.checkpoint.sizes import config_sizes, table_and_head, text_config
from offload.checkpoint.tensors import TensorEntry

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_IN_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)\.(weight|bias)$")


class MatrixRows(NamedTuple):
    """Rows [lo, hi) of a matrix."""

    lo: int
    hi: int

    @property
    def num(self) -> int:
        return self.hi - self.lo


def layer_tensors(checkpoint: Checkpoint) -> dict[str, set[tuple[int, ...]]]:
    """Return shapes by names within a layer, such as `self_attn.q_proj.weight`."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, entry in checkpoint.tensors.items():
        if found := _IN_LAYER.search(name):
            shapes.setdefault(f"{found[1]}.{found[2]}", set()).add(entry.shape)
    return shapes


def cut_rows(checkpoint: Checkpoint, rows_of: Mapping[str, MatrixRows]) -> Checkpoint:
    """Return the checkpoint with only these rows of matrices and biases, such as `mlp.up_proj`."""
    tensors = dict(checkpoint.tensors)
    for name, entry in tensors.items():
        found = _IN_LAYER.search(name)
        if found and found[1] in rows_of:
            tensors[name] = _cut(entry, rows_of[found[1]])
    return replace(checkpoint, tensors=tensors)


def _cut(entry: TensorEntry, rows: MatrixRows) -> TensorEntry:
    num_rows = entry.shape[0]
    row_bytes = (entry.hi - entry.lo) // entry.shape[0]
    assert 0 <= rows.lo <= rows.hi <= num_rows, f"rows {rows.lo} to {rows.hi} of {num_rows}"
    lo = entry.lo + rows.lo * row_bytes
    hi = entry.lo + rows.hi * row_bytes
    return entry._replace(shape=(rows.num, *entry.shape[1:]), lo=lo, hi=hi)


class Section(NamedTuple):
    """Layers [first, last) of a decoder."""

    first: int
    last: int
    has_table: bool  # embeds token ids; other sections take hidden states
    has_head: bool  # has norm and head, returns logits; other sections return hidden states


@remembered
def checkpoint_of(whole: Checkpoint, section: Section) -> Checkpoint:
    """Return the headers of a section as a model with layers numbered from 0, for planning."""
    sizes = config_sizes(whole)
    layers, rest = group_by_layer(whole, sizes["num_hidden_layers"])
    assert 0 <= section.first < section.last <= len(layers), f"{section} of {len(layers)} layers"
    table, head = table_and_head(whole, rest, sizes.get("vocab_size", 0))
    kept = {entry for entries in layers[section.first : section.last] for entry in entries}
    kept |= {*(table if section.has_table else ()), *(head if section.has_head else ())}
    tensors = {name: entry for name, entry in whole.tensors.items() if entry in kept}
    renamed = {}
    for name, entry in tensors.items():
        own_name = _LAYER.sub(lambda m: f"layers.{int(m[1]) - section.first}.", name)
        # a tied head without its embedding table becomes a head of its own
        is_head = not section.has_table and entry in table
        renamed["lm_head.weight" if is_head else own_name] = entry
    own = {
        "num_hidden_layers": section.last - section.first,
        "dtype": compute_dtype_name(whole, "auto"),
    }
    # without a head there are no logits and no sampling
    if not section.has_head:
        own["vocab_size"] = None
    config = {**whole.config, **own}
    if text_config(whole) is whole.config.get("text_config"):
        config["text_config"] = {**text_config(whole), **own}
    return replace(whole, config=config, tensors=renamed)
