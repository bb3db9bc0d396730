"""How much packing would save, estimated from the exponents of a few weights.

`offload pack` chooses its codes this way, and `offload plan` predicts the packed size. Invariant: a
tensor's sample is at most 256 KiB. No torch.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offload.checkpoint.files import opened, read_part
from offload.checkpoint.hub import is_here
from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.tensors import Coded, TensorEntry
from offload.encoding.base import STORED
from offload.encoding.exponents import MANTISSAS, Exponents, ExponentWindow, best_window, histogram
from offload.packing.stacks import by_expert, is_bias_of_experts

_PIECES = 8
_PIECE_BYTES = 32 << 10
_LEAST_WEIGHTS = 2048  # norms and biases stay as they are
_NUM_SAMPLED_TENSORS = 16
_USUAL_SHARE = 0.751  # packed size of bfloat16 weights over their size now
_USUAL_WIDTH = 3  # bits of a distance; a larger size is modelled as escapes
_WORTH_PACKING = 0.95  # largest share of a model's bytes for which packing is worth it


class PackingForecast(NamedTuple):
    """The size of a model before and after packing."""

    source_bytes: int
    packed_bytes: int | None  # None: float16, whose exponents are not known from headers
    is_sampled: bool  # from the weights; else from what is usual

    @property
    def share(self) -> float | None:
        """Return the packed size over the size now; None where it is unknown."""
        return None if self.packed_bytes is None else self.packed_bytes / max(1, self.source_bytes)

    @property
    def is_worth_it(self) -> bool:
        """Return whether packing saves enough."""
        return self.share is not None and self.share <= _WORTH_PACKING


def is_packable(name: str, entry: TensorEntry) -> bool:
    """Return whether a tensor can be coded at all."""
    if is_bias_of_experts(name):
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
        counts += histogram(
            np.frombuffer(read_part(fd, lo, lo + size_bytes), np.int16), entry.dtype
        )
    return best_window(counts)


def coded_bytes(entry: TensorEntry, window: ExponentWindow) -> int:
    """Return the bytes that a coded tensor is expected to take."""
    return math.ceil(entry.num_bytes * window.bits / 16)


def forecast(checkpoint: Checkpoint) -> PackingForecast | None:
    """Estimate the packed size from a few tensors; None where packing has too little to code."""
    packable = [entry for name, entry in checkpoint.tensors.items() if is_packable(name, entry)]
    source_bytes = checkpoint.num_bytes
    now_bytes = sum(entry.num_bytes for entry in packable)

    def at(share: float) -> PackingForecast:
        packed_bytes = source_bytes - now_bytes + math.ceil(share * now_bytes)
        return PackingForecast(source_bytes, packed_bytes, is_here(checkpoint))

    if not at(_USUAL_SHARE).is_worth_it:
        return None
    if is_here(checkpoint):
        return at(
            _sampled_share(checkpoint, packable[:: -(-len(packable) // _NUM_SAMPLED_TENSORS)])
        )
    if any(entry.dtype == "F16" for entry in packable):
        return PackingForecast(source_bytes, None, is_sampled=False)
    return at(_USUAL_SHARE)


def as_packed(checkpoint: Checkpoint, found: PackingForecast) -> Checkpoint:
    """Return the headers of the packed model as planning sees them."""
    assert found.packed_bytes is not None, "it is worth packing"
    tensors = by_expert(checkpoint.tensors)
    packable = {name: entry for name, entry in tensors.items() if is_packable(name, entry)}
    now_bytes = sum(entry.num_bytes for entry in packable.values())
    saved_share = (found.source_bytes - found.packed_bytes) / max(1, now_bytes)
    shrunk = {name: _shrunk(entry, saved_share) for name, entry in packable.items()}
    return replace(checkpoint, tensors=tensors | shrunk)


def _shrunk(entry: TensorEntry, saved_share: float) -> TensorEntry:
    fixed_bytes = Exponents(_USUAL_WIDTH, 0).stored_bytes(entry.shape)
    escape_bytes = max(0, math.ceil(entry.num_bytes * (1 - saved_share)) - fixed_bytes)
    coded = Coded(Exponents(_USUAL_WIDTH, escape_bytes, STORED[entry.dtype].dtype))
    return entry._replace(hi=entry.lo + fixed_bytes + escape_bytes, coded=coded)


def _sampled_share(checkpoint: Checkpoint, entries: Iterable[TensorEntry]) -> float:
    now_bytes = packed_bytes = 0
    for entry in entries:
        with opened(checkpoint.shards[entry.shard], os.O_RDONLY) as fd:
            packed_bytes += min(entry.num_bytes, coded_bytes(entry, window_of(fd, entry)))
            now_bytes += entry.num_bytes
    return packed_bytes / now_bytes
