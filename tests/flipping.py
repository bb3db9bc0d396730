"""Bits of a file turned over in place, and where each lies by the file's own header, read without `offload`."""

import json
import os
import random
from pathlib import Path

from gguf import GGUFReader


def flip(path: Path, at: int, bit: int = 0, *, keeps_time: bool = True) -> None:
    """Turn one bit over; as a disk does it, the file's time stays. Again it is undone. `at` may count from the end."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at % before.st_size)
        (byte,) = file.read(1)
        file.seek(at % before.st_size)
        file.write(bytes([byte ^ 1 << bit]))
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def extents(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor lies in a file of safetensors or GGUF."""
    if path.suffix == ".gguf":
        tensors = GGUFReader(path).tensors
        return {tensor.name: (int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)) for tensor in tensors}
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (8 + size + value["data_offsets"][0], 8 + size + value["data_offsets"][1])
        for name, value in header.items()
    }


def random_place(rng: random.Random, paths: list[Path]) -> tuple[Path, str, int, int]:
    """A file, a tensor in it, one of its bytes and a bit: every tensor alike."""
    places = [
        (path, name, *extent) for path in paths for name, extent in extents(path).items() if extent[0] < extent[1]
    ]
    path, name, lo, hi = rng.choice(places)
    return path, name, rng.randrange(lo, hi), rng.randrange(8)
