"""The part of a checkpoint that one of several ranks holds: rows of matrices, or some layers.

The files are the same for every rank; only the headers are cut. Rows of a matrix lie one behind the
other in its file, so a part is as quick to read as the whole. Invariant: the entries of a cut
checkpoint lie within those of the whole one. Rows cover exactly what is asked for; consecutive
sections hold each layer once, and each holds only those embeddings, norm and head that it uses.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from offload.checkpoint.checkpoint import Checkpoint, compute_dtype_name, remembered
from offload.checkpoint.sizes import config_sizes, table_and_head, text_config
from offload.checkpoint.tensors import TensorEntry, layer_name

_ROWS_ENDS = (".weight", ".bias")
# a layer's cache holds what these matrices' rows compute
_KEPT = {"self_attn.k_proj.weight": "keys", "self_attn.v_proj.weight": "values"}


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
        place = layer_name(name)
        if place is not None and place.inner.endswith(_ROWS_ENDS):
            shapes.setdefault(place.inner, set()).add(entry.shape)
    return shapes


def cut_rows(checkpoint: Checkpoint, rows_of: Mapping[str, MatrixRows]) -> Checkpoint:
    """Return the checkpoint with only these rows of matrices and biases, such as `mlp.up_proj`."""
    tensors = dict(checkpoint.tensors)
    layers = list(checkpoint.layers)
    for name, entry in tensors.items():
        place = layer_name(name)
        rows = None if place is None else rows_of.get(place.inner.rpartition(".")[0])
        if place is not None and rows is not None and name.endswith(_ROWS_ENDS):
            tensors[name] = _cut(entry, rows)
            kind = _KEPT.get(place.inner)
            if kind is not None and place.layer < len(layers):
                _, head = getattr(layers[place.layer], kind)
                kept = {kind: (rows.num // head, head)}
                layers[place.layer] = msgspec.structs.replace(layers[place.layer], **kept)
    return replace(checkpoint, tensors=tensors, layers=tuple(layers))


def _cut(entry: TensorEntry, rows: MatrixRows) -> TensorEntry:
    num_rows = entry.shape[0]
    row_bytes = entry.num_bytes // entry.shape[0]
    assert 0 <= rows.lo <= rows.hi <= num_rows, f"rows {rows.lo} to {rows.hi} of {num_rows}"
    lo = entry.lo + rows.lo * row_bytes
    hi = entry.lo + rows.hi * row_bytes
    return entry._replace(shape=(rows.num, *entry.shape[1:]), lo=lo, hi=hi)


class Section(NamedTuple):
    """Layers [first, last) of a decoder."""

    first: int
    last: int
    has_table: bool  # embeds token ids; other sections receive hidden states
    has_head: bool  # has norm and head and returns logits; other sections return hidden states


@remembered
def checkpoint_of(whole: Checkpoint, section: Section) -> Checkpoint:
    """Return the headers of a section as a model with layers numbered from 0, for planning."""
    sizes = config_sizes(whole)
    num_layers = sizes["num_hidden_layers"]
    assert 0 <= section.first < section.last <= num_layers, f"{section} of {num_layers} layers"
    rest = [entry for name, entry in whole.tensors.items() if layer_name(name) is None]
    table, head = table_and_head(whole, rest, sizes.get("vocab_size", 0))
    kept = [*(table if section.has_table else ()), *(head if section.has_head else ())]
    tensors = {}
    for name, entry in whole.tensors.items():
        place = layer_name(name)
        if place is not None and section.first <= place.layer < section.last:
            tensors[place.at(place.layer - section.first)] = entry
        elif place is None and entry in kept:
            # a tied head without its embedding table becomes a head of its own
            is_head = not section.has_table and entry in table
            tensors["lm_head.weight" if is_head else name] = entry
    changed = {
        "num_hidden_layers": section.last - section.first,
        "dtype": compute_dtype_name(whole, "auto"),
    }
    # without a head there are no logits to sample from
    if not section.has_head:
        changed["vocab_size"] = None
    config = {**whole.config, **changed}
    if text_config(whole) is whole.config.get("text_config"):
        config["text_config"] = {**text_config(whole), **changed}
    layers = whole.layers[section.first : section.last]
    return replace(whole, config=config, tensors=tensors, layers=layers)
