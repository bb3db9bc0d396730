"""Random safetensors files, down to the byte: any order, any header length, foreign tensors in between."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.layout import SlabLayout
from offload.checkpoint.open import open_checkpoint

_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
_SHAPES = [(), (0,), (1,), (7,), (33, 5), (64, 32), (0, 8), (129, 65), (3, 4, 5), (2048,)]


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_file(path: Path, tensors: Sequence[Planned], rng: np.random.Generator, *, remainder: int = 0) -> None:
    """One file of random bytes, its tensors in the given order; the data begin at `remainder` modulo 8."""
    header, end = {}, 0
    for name, dtype, shape in tensors:
        num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    raw = json.dumps(header).encode()
    raw += b" " * ((remainder - len(raw)) % 8 + 8 * int(rng.integers(600)))
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + rng.bytes(end))


def random_checkpoint(directory: Path, seed: int, *, remainder: int = 0, num_layers: int = 3) -> Checkpoint:
    """Layers that straddle two or three shards: mixed types, foreign and empty tensors, an end anywhere in a block.

    With remainder 0 every tensor is aligned to its type, because the wider types come first.
    """
    directory.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    names = [f"model.layers.{layer}.part{index}" for layer in range(num_layers) for index in range(6)]
    names = rng.permutation([*names, "rest0", "rest1", "unused0", "unused1"]).tolist()
    dtypes = sorted(rng.choice(["F32", "BF16", "F16"], len(names)).tolist(), key=lambda dtype: -_ITEM_BYTES[dtype])
    shapes = [_SHAPES[index] for index in rng.integers(len(_SHAPES), size=len(names))]
    planned = [Planned(*row) for row in zip(names, dtypes, shapes, strict=True)]
    weight_map = {}
    for number, rows in enumerate(np.array_split(np.arange(len(planned)), 2 + seed % 2)):
        stored = [planned[index] for index in rows] + [Planned(f"filler{number}", "U8", (int(rng.integers(1, 99)),))]
        file = directory / f"part-{number}.safetensors"
        write_file(file, stored, rng, remainder=remainder)
        weight_map.update({tensor.name: file.name for tensor in stored})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    return open_checkpoint(directory)


def stored_bytes(checkpoint: Checkpoint) -> dict[str, bytes]:
    """What safetensors itself reads."""
    return {
        name: bytes(tensor["data"])
        for shard in checkpoint.shards
        for name, tensor in safetensors.deserialize(shard.read_bytes())
    }


def parameter_bytes(layout: SlabLayout, slab: np.ndarray) -> dict[str, bytes]:
    """What a filled slab holds for each parameter."""
    return {name: slab[p.slab_lo : p.slab_lo + p.num_bytes].tobytes() for name, p in layout.parameters.items()}


def assert_same_bytes(got: Mapping[str, bytes], wanted: Mapping[str, bytes]) -> None:
    """Name the parameter that differs instead of printing kilobytes."""
    assert got.keys() == wanted.keys()
    wrong = [name for name in wanted if got[name] != wanted[name]]
    assert not wrong, f"{', '.join(wrong)} differ from what safetensors reads"
