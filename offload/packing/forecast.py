"""How much packing would save, estimated from the exponents of a few weights, and what it codes.

`offload pack` chooses its codes this way, and refuses what it would not shrink. In packed files a
stack `experts.gate_up_proj` becomes `experts.0.gate_up_proj.rows.0` and so on, each expert coded by
itself, so that one can be read alone; readers put them together again as they do with parts of
other files. Invariant: a tensor's sample is at most 256 KiB. No torch.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping

import numpy as np

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import opened, read_part
from offload.checkpoint.layout import slice_of
from offload.checkpoint.tensors import MOST_EXPERTS, ROWS, TensorEntry
from offload.encoding.base import STORED
from offload.encoding.exponents import MANTISSAS, ExponentWindow, best_window, histogram

_STACK = re.compile(r"^(.*\bexperts)\.(gate_up_proj|down_proj)$")
_PART = re.compile(rf"^(.*\bexperts)\.\d+\.(gate_up_proj|down_proj){re.escape(ROWS)}0$")
_BIASES = re.compile(r"\bexperts\.\w+_bias$")

_PIECES = 8
_PIECE_BYTES = 32 << 10
_LEAST_WEIGHTS = 2048  # norms and biases stay as they are
_NUM_SAMPLED_TENSORS = 16
_USUAL_SHARE = 0.751  # packed size of bfloat16 weights over their size
# bits a weight beside its copy: 8.38 for normal, 8.74 for Laplacian numbers
_USUAL_RESIDUAL_BITS = 8.4
WORTH_PACKING = 0.95  # largest share of a model's bytes for which packing is worth it


def by_expert(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors, with those of each expert in place of stacks of plain numbers."""
    parts = dict[str, TensorEntry]()
    for name, entry in tensors.items():
        match = _STACK.match(name)
        is_stack = match is not None and len(entry.shape) == 3 and entry.dtype in STORED
        num_experts = entry.shape[0] if is_stack else 0
        if match is None or entry.coded is not None or not 0 < num_experts <= MOST_EXPERTS:
            parts[name] = entry
            continue
        for expert in range(num_experts):
            part = f"{match[1]}.{expert}.{match[2]}{ROWS}0"
            parts[part] = slice_of(entry, expert, num_experts)
    return parts


def stack_of(name: str) -> str:
    """Return the name of the stack that an expert's tensor is of, or a tensor's own name."""
    match = _PART.match(name)
    return name if match is None else f"{match[1]}.{match[2]}"


def is_packable(name: str, entry: TensorEntry) -> bool:
    """Return True if a tensor can be coded at all."""
    # each expert has a row of it, which comes apart only as it is
    if _BIASES.search(name):
        return False
    is_large = len(entry.shape) > 1 and math.prod(entry.shape) >= _LEAST_WEIGHTS
    return entry.coded is None and entry.dtype in MANTISSAS and is_large


def window_of(fd: int, entry: TensorEntry) -> ExponentWindow:
    """Return the best window for samples of a tensor. Raises `ReadError`."""
    counts = np.zeros(256, np.int64)
    num_pieces = min(_PIECES, -(-entry.num_bytes // _PIECE_BYTES))
    size_bytes = min(entry.num_bytes, _PIECE_BYTES)
    for piece in range(num_pieces):
        lo = entry.lo + (entry.num_bytes - size_bytes) * piece // max(1, num_pieces - 1) // 2 * 2
        bits_N = np.frombuffer(read_part(fd, lo, lo + size_bytes), np.int16)
        counts += histogram(bits_N, entry.dtype)
    return best_window(counts)


def coded_bytes(entry: TensorEntry, window: ExponentWindow) -> int:
    """Return the bytes that a coded tensor is expected to take."""
    return math.ceil(entry.num_bytes * window.bits / 16)


def expected_share(checkpoint: Checkpoint) -> float | None:
    """Return the packed size over the size now, from samples; None where too little can be coded."""
    packable = [entry for name, entry in checkpoint.tensors.items() if is_packable(name, entry)]
    packable_part = sum(entry.num_bytes for entry in packable) / max(1, checkpoint.num_bytes)
    if 1 - packable_part * (1 - _USUAL_SHARE) > WORTH_PACKING:
        return None
    step = -(-len(packable) // _NUM_SAMPLED_TENSORS)
    return 1 - packable_part * (1 - _sampled_share(checkpoint, packable[::step]))


def residual_bytes(entry: TensorEntry) -> int:
    """Return the bytes that a matrix is expected to take beside its copy."""
    return math.ceil(math.prod(entry.shape) * _USUAL_RESIDUAL_BITS / 8)


def _sampled_share(checkpoint: Checkpoint, entries: Iterable[TensorEntry]) -> float:
    now_bytes = packed_bytes = 0
    for entry in entries:
        with opened(checkpoint.shards[entry.shard], os.O_RDONLY) as fd:
            packed_bytes += min(entry.num_bytes, coded_bytes(entry, window_of(fd, entry)))
            now_bytes += entry.num_bytes
    return packed_bytes / now_bytes
