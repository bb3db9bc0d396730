"""How the tensors of one layer become one run of bytes (a slab), and which file bytes fill it.

A slab that mirrors its file block by block is *direct*: O_DIRECT reads straight into place. Where
tensors have to be regrouped (fused experts) or start at an odd offset, it is *scattered*: the same
reads go through a small bounce buffer. A device, whose wide loads need 16 bytes or more, gets the
slab from its first weight on, which may lie anywhere in the first block. Buffers and files for such
reads are opened here as well.

Routed experts get slabs of their own. Files store them as separate tensors or as one stack; models
have stacks. Invariant: pieces never leave the slab; the bytes of each parameter, and the words of
each coded weight, are covered exactly once; the bytes of different experts are disjoint and
together make up the stack.
"""

import math
import mmap
import os
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.tensors import TensorEntry, layer_name
from offload.encoding.base import STORED
from offload.units import rounded_up

# Alignment that O_DIRECT asks of offsets, addresses and lengths.
BLOCK_BYTES = 4096
# Scattered parameters begin where vector units and GPUs load fastest.
_PARAMETER_ALIGN_BYTES = 256
# A float32 matrix begins at a cache line: with a lower alignment MKL's results vary.
_MATRIX_ALIGN_BYTES = 64
# Reading over a small gap is cheaper than starting a new run.
_MAX_GAP_BYTES = 64 << 10


def allocate(num_bytes: int, *, is_inherited: bool = True) -> np.ndarray:
    """Return a page-aligned buffer that is unmapped with its last view.

    Children of a fork share it if it `is_inherited`.
    """
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    if not is_inherited and hasattr(mmap, "MADV_DONTFORK"):
        region.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(region, np.uint8)


def open_direct(path: Path) -> int | None:
    """Return a descriptor whose reads bypass the page cache; None where they cannot."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECT)
    except OSError:
        return None
    try:
        os.preadv(fd, [allocate(BLOCK_BYTES).data], 0)
    except OSError:
        os.close(fd)
        return None
    return fd


class TensorPart(NamedTuple):
    """A checkpoint tensor and where its numbers start inside their parameter."""

    entry: TensorEntry
    first: int = 0


# shape and parts of a parameter; a stack of experts has the shape (E, ...)
Stack = tuple[tuple[int, ...], Sequence[TensorPart]]


class SlabRead(NamedTuple):
    """File bytes [lo, hi) of one shard, which go to [slab_lo, slab_lo + hi - lo) of the slab."""

    shard: int
    lo: int
    hi: int
    slab_lo: int


class Placed(NamedTuple):
    """The place of a parameter inside a slab."""

    dtype: str
    shape: tuple[int, ...]
    slab_lo: int

    @property
    def num_bytes(self) -> int:
        return STORED[self.dtype].stored_bytes(self.shape)

    @property
    def align_bytes(self) -> int:
        return _align_bytes(self.dtype, self.shape)


class Words(NamedTuple):
    """The place of a coded parameter's words, or of some of its rows, inside a slab."""

    part: TensorPart
    slab_lo: int

    @property
    def num_bytes(self) -> int:
        return self.part.entry.num_bytes

    @property
    def align_bytes(self) -> int:
        return _align_of(self.part.entry)


@dataclass(frozen=True)
class SlabLayout:
    """One layer (or the weights outside the layers) as one flat buffer."""

    pieces: tuple[SlabRead, ...]
    parameters: Mapping[str, Placed]
    slab_bytes: int
    is_direct: bool
    coded: Mapping[str, tuple[Words, ...]] = field(default_factory=dict)

    @cached_property
    def lead_bytes(self) -> int:
        """Return the bytes before the first weight, rounded down so that all weights stay aligned."""
        coded = chain.from_iterable(self.coded.values())
        weights: list[Placed | Words] = [*self.parameters.values(), *coded]
        width = math.lcm(1, *(weight.align_bytes for weight in weights))
        return min((weight.slab_lo for weight in weights), default=0) // width * width

    @property
    def sent(self) -> slice:
        """Return the part of the slab that is sent to a device."""
        return slice(self.lead_bytes, self.slab_bytes)

    def within_sent(self, weight: Placed | Words) -> slice:
        """Return a weight's place in that part."""
        lo = weight.slab_lo - self.lead_bytes
        return slice(lo, lo + weight.num_bytes)


def slab_layout(parameters: Mapping[str, Stack]) -> SlabLayout:
    """Lay out parameters, name -> (shape, parts): direct if the order in the file allows it."""
    entries = [part.entry for _, parts in parameters.values() for part in parts]
    plain = [parts for _, parts in parameters.values() if not is_coded(parts)]
    pairs = (pair for parts in plain for pair in pairwise(part.entry for part in parts))
    adjoin = all((before.shard, before.hi) == (after.shard, after.lo) for before, after in pairs)
    if adjoin and all(map(_is_in_place, entries)):
        return _direct(parameters, entries)
    return _scattered(parameters)


def is_coded(parts: Sequence[TensorPart]) -> bool:
    """Return True if a parameter of these parts has to be expanded."""
    return any(part.entry.coded is not None for part in parts)


def slab_bytes_bound(entries: Iterable[TensorEntry]) -> int:
    """Return an upper bound of the slab's bytes for these tensors, direct or scattered."""
    entries = list(entries)
    direct = sum(_aligned_span(lo, hi) for _, lo, hi in _runs(filter(_is_in_place, entries)))
    scattered = sum(rounded_up(entry.num_bytes, _PARAMETER_ALIGN_BYTES) for entry in entries)
    return rounded_up(max(direct, scattered), BLOCK_BYTES)


def group_by_layer(
    checkpoint: Checkpoint, num_layers: int, num_encoder_layers: int = 0
) -> tuple[list[list[TensorEntry]], list[TensorEntry]]:
    """Group tensors by name: the decoder's layers, then an encoder's, then the rest."""
    layers: list[list[TensorEntry]] = [[] for _ in range(num_layers + num_encoder_layers)]
    decoder = layers[:num_layers]
    encoder = layers[num_layers:]
    rest = []
    for name, entry in checkpoint.tensors.items():
        place = layer_name(name)
        if place is None:
            rest.append(entry)
            continue
        stack = encoder if place.stack.endswith("encoder.block") else decoder
        if place.layer < len(stack):
            stack[place.layer].append(entry)
    return layers, rest


def _direct(parameters: Mapping[str, Stack], entries: list[TensorEntry]) -> SlabLayout:
    """Return a slab that mirrors the file's runs block by block, see the module."""
    pieces = []
    base = 0
    # The longest run comes first, so that it is aligned on a device.
    for shard, lo, hi in sorted(_runs(entries), key=lambda run: run[1] - run[2]):
        pieces.append(SlabRead(shard, lo, hi, base + lo % BLOCK_BYTES))
        base += _aligned_span(lo, hi)

    by_start = sorted(pieces)

    def place(entry: TensorEntry) -> int:
        where = (entry.shard, entry.lo)
        run = by_start[bisect(by_start, where, key=lambda piece: (piece.shard, piece.lo)) - 1]
        return run.slab_lo + entry.lo - run.lo

    placed = {}
    coded = {}
    for name, (shape, parts) in parameters.items():
        if is_coded(parts):
            coded[name] = tuple(Words(part, place(part.entry)) for part in parts)
        else:
            placed[name] = Placed(parts[0].entry.dtype, shape, place(parts[0].entry))
    return SlabLayout(tuple(pieces), placed, base, is_direct=True, coded=coded)


def _scattered(parameters: Mapping[str, Stack]) -> SlabLayout:
    """Return a slab with one parameter after another, each aligned, see the module."""
    pieces = []
    placed = {}
    coded = {}
    base = 0
    for name, (shape, parts) in parameters.items():
        if is_coded(parts):
            sizes = (rounded_up(part.entry.num_bytes, _PARAMETER_ALIGN_BYTES) for part in parts)
            starts = [*accumulate(sizes, initial=base)]
            coded[name] = tuple(map(Words, parts, starts))
        else:
            item_bytes = STORED[parts[0].entry.dtype].align_bytes
            placed[name] = Placed(parts[0].entry.dtype, shape, base)
            starts = [base + item_bytes * part.first for part in parts]
            starts.append(base + rounded_up(placed[name].num_bytes, _PARAMETER_ALIGN_BYTES))
        for (entry, _), start in zip(parts, starts, strict=False):
            pieces.append(SlabRead(entry.shard, entry.lo, entry.hi, start))
        base = starts[-1]
    slab_bytes = rounded_up(base, BLOCK_BYTES)
    return SlabLayout(tuple(sorted(pieces)), placed, slab_bytes, is_direct=False, coded=coded)


def _is_in_place(entry: TensorEntry) -> bool:
    """Return True if the tensor is aligned for use where memory mirrors its file."""
    return entry.lo % _align_of(entry) == 0


def _align_of(entry: TensorEntry) -> int:
    if entry.coded is not None:
        return entry.coded.coding.align_bytes
    return _align_bytes(entry.dtype, entry.shape)


def _align_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype == "F32" and len(shape) > 1:
        return _MATRIX_ALIGN_BYTES
    # unknown types are refused later
    return STORED[dtype].align_bytes if dtype in STORED else 1


def _runs(entries: Iterable[TensorEntry]) -> list[tuple[int, int, int]]:
    """Return (shard, lo, hi) for each run of file bytes with the tensors, small gaps included."""
    runs: list[tuple[int, int, int]] = []
    for entry in sorted(entries, key=lambda e: (e.shard, e.lo)):
        if runs and runs[-1][0] == entry.shard and entry.lo - runs[-1][2] <= _MAX_GAP_BYTES:
            runs[-1] = (entry.shard, runs[-1][1], max(entry.hi, runs[-1][2]))
        else:
            runs.append((entry.shard, entry.lo, entry.hi))
    return runs


def _aligned_span(lo: int, hi: int) -> int:
    return rounded_up(hi, BLOCK_BYTES) - lo // BLOCK_BYTES * BLOCK_BYTES


def split_experts(stacks: Mapping[str, Stack], num_experts: int) -> list[SlabLayout]:
    """Return a layout for each expert; its shapes lack the first dimension."""
    split = {name: _split(stack) for name, stack in stacks.items()}
    parameters_of = (
        {name: parts[expert] for name, parts in split.items()} for expert in range(num_experts)
    )
    return [*map(slab_layout, parameters_of)]


def _split(stack: Stack) -> list[Stack]:
    """Return the shape and the parts of each expert of a stack."""
    (num_experts, *rest), parts = stack
    # With one expert, its part may already lack the expert dimension.
    if len(parts) == 1 and len(parts[0].entry.shape) > len(rest):
        slices = (slice_of(parts[0].entry, expert, num_experts) for expert in range(num_experts))
        return [(tuple(rest), [TensorPart(entry)]) for entry in slices]
    size = math.prod(rest)
    parts_of = [list[TensorPart]() for _ in range(num_experts)]
    for part in parts:
        expert, first = divmod(part.first, size)
        assert first + math.prod(part.entry.shape) <= size, "parts of one expert"
        parts_of[expert].append(part._replace(first=first))
    return [(tuple(rest), parts) for parts in parts_of]


def slice_of(entry: TensorEntry, expert: int, num_experts: int) -> TensorEntry:
    """Return one expert's part of a stacked tensor, coded or not."""
    size = entry.num_bytes // num_experts
    is_stack = size * num_experts == entry.num_bytes and entry.shape[0] == num_experts
    assert is_stack, "stacks begin with experts"
    coded = entry.coded
    if coded is not None:
        companions = (
            (name, slice_of(companion, expert, num_experts)) for name, companion in coded.companions
        )
        coded = coded._replace(companions=tuple(companions))
    lo = entry.lo + expert * size
    return entry._replace(shape=entry.shape[1:], lo=lo, hi=lo + size, coded=coded)
