"""Stacks of experts that a family's files have the other way round than its model.

transformers transposes them where shapes ask for it, and so does this: by the widths in the config
alone, so that planning knows of it.
"""

import re
from collections.abc import Mapping
from typing import Any

from offload.checkpoint.tensors import Coded, TensorEntry
from offload.encoding.base import ENCODINGS
from offload.encoding.turned import Turned

_TYPES = ("qwen3_vl_moe", "qwen3_vl_moe_text")
_STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def with_turned_stacks(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors, of which stacks of plain numbers have the model's shapes."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    if config.get("model_type") not in _TYPES:
        return dict(tensors)
    hidden = text.get("hidden_size")
    width = text.get("moe_intermediate_size")
    if type(hidden) is not int or type(width) is not int:
        return dict(tensors)
    wanted = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    return {name: _turned(name, entry, wanted) for name, entry in tensors.items()}


def _turned(name: str, entry: TensorEntry, wanted: Mapping[str, tuple[int, int]]) -> TensorEntry:
    match = _STACK.search(name)
    if match is None or entry.coded is not None or entry.dtype not in ENCODINGS:
        return entry
    rows, columns = wanted[match[1]]
    if rows == columns or entry.shape[1:] != (columns, rows):
        return entry
    shape = (entry.shape[0], rows, columns)
    return entry._replace(shape=shape, coded=Coded(Turned(entry.dtype)))
