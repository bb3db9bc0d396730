"""Stacks of experts in packed files: each expert by itself, so that one can be read alone.

A stack `experts.gate_up_proj` becomes `experts.0.gate_up_proj.rows.0` and so on, each coded by
itself, which readers put together again as they do with parts of other files. No torch.
"""

import re
from collections.abc import Mapping

from offload.checkpoint.layout import slice_of
from offload.checkpoint.tensors import ROWS, TensorEntry

_STACK = re.compile(r"^(.*\blayers\.\d+\..*\bexperts)\.(gate_up_proj|down_proj)$")
_PART = re.compile(rf"^(.*\bexperts)\.\d+\.(gate_up_proj|down_proj){re.escape(ROWS)}0$")
_MOST_EXPERTS = 65_536
_BIASES = re.compile(r"\bexperts\.\w+_bias$")


def by_expert(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors, with those of each expert in place of stacks of plain numbers."""
    found = dict[str, TensorEntry]()
    for name, entry in tensors.items():
        match = _STACK.match(name)
        num_experts = entry.shape[0] if match is not None and len(entry.shape) == 3 else 0
        if match is None or entry.coded is not None or not 0 < num_experts <= _MOST_EXPERTS:
            found[name] = entry
            continue
        for expert in range(num_experts):
            part = f"{match[1]}.{expert}.{match[2]}{ROWS}0"
            found[part] = slice_of(entry, expert, num_experts)
    return found


def stack_of(name: str) -> str:
    """Return the name of the stack that an expert's tensor is of, or a tensor's own name."""
    match = _PART.match(name)
    return name if match is None else f"{match[1]}.{match[2]}"


def is_bias_of_experts(name: str) -> bool:
    """Return whether a tensor has a row for each expert, which comes apart only as it is."""
    return _BIASES.search(name) is not None
