"""The content of caches as named tensors, as sessions and prefix blocks keep it.

`target.keys.3` are the keys of the target's layer 3, (1, G, P, K); `target.states.3` is the state of
a recurrent layer behind the last of these positions, as one row of numbers.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import replacing
from offload.checkpoint.safetensors import header_bytes
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import PLAIN_OF, STORED
from offload.engine.identities import Identities
from offload.errors import ensure
from offload.model.kv_cache import INDEX, KEYS, SCALES, VALUES, KVCache
from offload.model.recurrent_cache import Point

PARTS = ("target", "draft")
ROWS = (KEYS, VALUES, INDEX, f"{KEYS}{SCALES}", f"{VALUES}{SCALES}")
# kind of recurrent layers' states
TAILS = "tails"
STATES = "states"
SUM = "crc32"  # the note with the checksum of all bytes after the header
_ALIGN_BYTES = 8  # where the data of a safetensors file begin
_TYPES = {getattr(torch, encoding.dtype): encoding.name for encoding in STORED.values()}


def state_name(part: str, kind: str, index: int) -> str:
    """Return the name of what one layer holds."""
    return f"{part}.{kind}.{index}"


def by_layer(names: Iterable[str]) -> Mapping[int, list[str]]:
    """Return names by the layer numbers at their ends."""
    of_layer = defaultdict[int, list[str]](list)
    for name in names:
        of_layer[int(name.rsplit(".", 1)[1])].append(name)
    return of_layer


def row_tensors(part: str, cache: KVCache, first: int, end: int) -> dict[str, Tensor]:
    """Return views of a model's layers at positions [first, end), by names in files."""
    return {
        state_name(part, kind, layer): state[:, :, first:]
        for layer, held in KVCache.states(cache, end).items()
        for kind, state in held.items()
        if first < end
    }


def layers_of(part: str, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return rows by layer and kind, see `row_tensors`."""
    starts = tuple(f"{part}.{kind}." for kind in ROWS)
    names = [name for name in tensors if name.startswith(starts)]
    return {
        layer: {name.split(".")[1]: tensors[name] for name in kinds}
        for layer, kinds in by_layer(names).items()
    }


def point_tensors(part: str, point: Point) -> dict[str, Tensor]:
    """Return states after a position by names in files, each as one row."""
    tails = {state_name(part, TAILS, layer): tail for layer, tail in point.tails.items()}
    return tails | {
        state_name(part, STATES, layer): state.flatten() for layer, state in point.states.items()
    }


def point_of(part: str, tensors: Mapping[str, Tensor], length: int) -> Point:
    """Return the states after this many positions, see `point_tensors`."""
    tails, states = (
        {
            int(name.rsplit(".", 1)[1]): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{part}.{kind}.")
        }
        for kind in (TAILS, STATES)
    )
    return Point(length, tails, states)


def write_tensors(
    path: Path, notes: Mapping[str, str], tensors: Mapping[str, Tensor], *, is_synced: bool = True
) -> None:
    """Write tensors of any type in this order, with notes. Raises `OSError`.

    A file that is not synced may be damaged if the machine fails, which its checksum shows.
    """
    entries = dict[str, TensorEntry]()
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(0, _TYPES[tensor.dtype], tuple(tensor.shape), start, end)
    with replacing(path) as scratch, scratch.open("wb") as file:
        file.write(header_bytes(entries, {**notes, SUM: "0" * 8}, _ALIGN_BYTES))
        total = 0
        for tensor in tensors.values():
            data = tensor.cpu().contiguous().view(torch.uint8).numpy().data
            total = zlib.crc32(data, total)
            file.write(data)
        file.seek(0)
        file.write(header_bytes(entries, {**notes, SUM: f"{total:08x}"}, _ALIGN_BYTES))
        file.flush()
        if is_synced:
            os.fsync(file.fileno())


def check_states(
    file: Any, part: str, identities: Identities, num_tokens: int, *, has_states: bool = True
) -> None:
    """Check keys and values of every layer by the config's shapes. Raises `ValueError`.

    Recurrent layers have states where `has_states`.
    """
    checkpoint: Checkpoint | None = getattr(identities.files, part)
    kept = kept_layers(file, part)
    is_there = any(name.startswith(f"{part}.") for name in file.keys())  # noqa: SIM118
    if checkpoint is None or not is_there:
        ensure(not is_there, f"{part} has keys and values, and there is none")
        return
    layers = checkpoint.layers
    computed = PLAIN_OF[identities.dtypes[part]]
    keeping = [index for index, layer in enumerate(layers) if any(layer.keys)]
    ensure(kept == keeping, f"{part} has {len(keeping)} layers with keys and values, not {kept}")
    states = dict[str, tuple[list[int], str]]()
    for index, layer in enumerate(layers) if has_states else ():
        if layer.states and layer.states.num_taps > 1:
            tail = [layer.states.num_taps - 1, layer.states.num_channels]
            states[state_name(part, TAILS, index)] = (tail, computed.name)
        if layer.states and layer.states.state:
            states[state_name(part, STATES, index)] = ([layer.states.state], "F32")
    _check_shapes(file, part, (TAILS, STATES), states)
    if not kept:
        return
    num_rows = num_kept(file, part)
    ensure(0 < num_rows <= num_tokens, f"{part} has {num_rows} positions of {num_tokens} tokens")
    rows = dict[str, tuple[list[int], str]]()
    for index, layer in enumerate(layers):
        heads_of = {KEYS: layer.keys, VALUES: layer.values, INDEX: (1, layer.index_width)}
        for kind, (heads, width) in heads_of.items():
            if width or (kind != INDEX and index in kept):
                shape = [1, heads, num_rows, width]
                rows[state_name(part, kind, index)] = (shape, computed.name)
    _check_shapes(file, part, (KEYS, VALUES, INDEX), rows)


def kept_layers(file: Any, part: str) -> list[int]:
    """Return the layers with keys and values in the file, each with both. Raises `ValueError`."""
    pairs = {name for name in file.keys() if name.startswith(f"{part}.")}  # noqa: SIM118
    pairs -= names_of(file, part, (TAILS, STATES, INDEX))
    kept = sorted({int(name.rsplit(".", 1)[1]) for name in pairs})
    ensure(
        pairs == {state_name(part, kind, index) for kind in (KEYS, VALUES) for index in kept},
        f"names of {part} do not pair",
    )
    return kept


def num_kept(file: Any, part: str) -> int:
    """Return the number of positions in the keys of a model's layers, see `kept_layers`."""
    return int(file.get_slice(state_name(part, "keys", kept_layers(file, part)[0])).get_shape()[2])


def names_of(file: Any, part: str, kinds: tuple[str, ...]) -> set[str]:
    """Return the names of a model's tensors of some kinds."""
    return {
        name
        for name in file.keys()  # noqa: SIM118
        if name.startswith(tuple(f"{part}.{kind}." for kind in kinds))
    }


def _check_shapes(
    file: Any, part: str, kinds: tuple[str, ...], wanted: Mapping[str, tuple[list[int], str]]
) -> None:
    """Check all tensors of some kinds by config and headers. Raises `ValueError`."""
    stated = names_of(file, part, kinds)
    expectation = f"{part} has {' and '.join(kinds)} in {len(wanted)} tensors"
    ensure(stated == {*wanted}, f"{expectation}, not {sorted(stated)}"[:200])
    for name, (shape, kind) in wanted.items():
        header = file.get_slice(name)
        ensure(
            header.get_shape() == shape and header.get_dtype() == kind,
            f"{name} has shape {header.get_shape()} and type {header.get_dtype()}, not {shape} "
            f"and {kind}",
        )
