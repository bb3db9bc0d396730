"""Tensors to a safetensors file of our own, with a checksum: written all or nothing, and without a second copy.

The format's own library wants all bytes at once, which for the keys and values of a long text is a budget's worth.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.small_files import replacing
from offload.encoding.registry import STORED

SUM = "crc32"  # the note that has the checksum of all that lies behind the header
_TYPES = {getattr(torch, encoding.dtype): encoding.name for encoding in STORED.values()}


def write_tensors(path: Path, notes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any type that the format has, in this order, with notes about them. Raises `OSError`."""
    with replacing(path) as scratch:
        _write(scratch, notes, tensors)


def data_sum(path: Path) -> str:
    """The checksum that a file should have noted, eight hexadecimal digits. Raises `OSError`."""
    total = 0
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            total = zlib.crc32(block, total)
    return f"{total:08x}"


def _write(path: Path, notes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    places, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        places[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    with path.open("wb") as file:
        file.write(_header({**notes, SUM: "0" * 8}, places))
        total = 0
        for tensor in tensors.values():
            data = tensor.cpu().contiguous().view(torch.uint8).numpy().data
            total = zlib.crc32(data, total)
            file.write(data)
        file.seek(0)
        file.write(_header({**notes, SUM: f"{total:08x}"}, places))
        file.flush()
        os.fsync(file.fileno())


def _header(notes: Mapping[str, str], places: Mapping[str, Any]) -> bytes:
    text = json.dumps({"__metadata__": notes, **places}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
