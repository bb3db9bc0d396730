"""Consecutive layers of a decoder, with or without what stands before and behind them: what one of several ranks has.

The files are the same for every rank. Invariant: sections that follow one another have each layer once, and of what
lies around the layers nothing that they do not use.
"""

import re
from dataclasses import replace
from typing import NamedTuple

from offload.checkpoint.layout import group_by_layer
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name
from offload.checkpoint.sizes import config_sizes, table_and_head, text_config

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Section(NamedTuple):
    """Layers [first, last) of a decoder."""

    first: int
    last: int
    has_table: bool  # takes in ids; others get hidden states
    has_head: bool  # with the norm before it: gives logits; others give hidden states


def checkpoint_of(whole: Checkpoint, section: Section) -> Checkpoint:
    """The headers of a section as if it were a model, for planning: its layers are numbered from 0 on."""
    sizes = config_sizes(whole)
    layers, rest = group_by_layer(whole, sizes["num_hidden_layers"])
    assert 0 <= section.first < section.last <= len(layers), f"{section} of {len(layers)} layers"
    table, head = table_and_head(whole, rest, sizes.get("vocab_size", 0))
    kept = {entry for entries in layers[section.first : section.last] for entry in entries}
    kept |= {*(table if section.has_table else ()), *(head if section.has_head else ())}
    tensors = {name: entry for name, entry in whole.tensors.items() if entry in kept}
    if not section.has_table:  # a head that is the table of the whole is a head alone here
        tensors = {"lm_head.weight" if entry in table else name: entry for name, entry in tensors.items()}
    tensors = {_LAYER.sub(lambda m: f"layers.{int(m[1]) - section.first}.", name): e for name, e in tensors.items()}
    own = {"num_hidden_layers": section.last - section.first, "dtype": compute_dtype_name(whole, "auto")}
    own |= {} if section.has_head else {"vocab_size": None}  # no row is scored, and nothing drawn
    is_inside = text_config(whole) is whole.config.get("text_config")
    config = {**whole.config, **({"text_config": {**text_config(whole), **own}} if is_inside else {}), **own}
    return replace(whole, config=config, tensors=tensors)
