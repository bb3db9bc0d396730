"""A model as large as host memory, made in host memory: the packaged pair inflated to any shape, without large files.

On disk lie a config and safetensors files with headers and holes. Whoever reads through `GiantStore` gets what
inflation would have written there, computed as it is asked for; so models load by the usual path, at the speed of
memory.
"""

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from offload.checkpoint import inflate as inflation  # whose pieces and blocks these are, files left out
from offload.checkpoint.layout import Piece, SlabLayout
from offload.checkpoint.safetensors import ITEM_BYTES, Checkpoint, open_checkpoint
from offload.engine import build
from offload.streaming.disk import HostStore

NUM_MAKERS = 16
_SHARD_BYTES = 1 << 34
_WIDE_LOAD = 16  # bytes
_NOTE = "giant.json"


class Shape(NamedTuple):
    """How large to make a model."""

    width_factor: int
    layer_bytes: int
    num_layers: int


def sketch(source: Path, folder: Path, shape: Shape) -> Path:
    """A folder that reads as a checkpoint of that shape through `GiantStore`; it takes a few kilobytes of disk."""
    small = open_checkpoint(source)
    old, new, plan, shards = _inflated(small, shape)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, pieces in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_holes(folder / name, pieces, inflation._check_tensors(small, old))
        weight_map |= dict.fromkeys((piece.name for piece in pieces), name)
    index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": weight_map}
    for name, value in (
        ("model.safetensors.index.json", index),
        ("config.json", {**small.config, **new}),
        (_NOTE, {"source": str(source), "shape": shape._asdict(), "plan": asdict(plan)}),
    ):
        inflation._write_json(folder / name, value)
    for path in inflation._companions(source):
        shutil.copyfile(path, folder / path.name)
    return folder


@contextmanager
def giants() -> Iterator[None]:
    """Meanwhile checkpoints that were made by `sketch` can be loaded."""

    def open_store(shards: Sequence[Path], **options: Any) -> HostStore:
        is_giant = (shards[0].parent / _NOTE).is_file()
        return GiantStore(shards) if is_giant else HostStore(shards, **options)

    with mock.patch.object(build, "HostStore", open_store):
        yield


class GiantStore(HostStore):
    """Gives the bytes that an inflation would have written where the files of a sketch have holes."""

    def __init__(self, shards: Sequence[Path]) -> None:
        super().__init__(shards)
        note = json.loads((shards[0].parent / _NOTE).read_text())
        self._small = open_checkpoint(Path(note["source"]))
        old, _, _, pieces = _inflated(self._small, Shape(**note["shape"]))
        self._dtype = inflation._check_tensors(self._small, old)
        self._pieces = {piece.name: piece for shard in pieces for piece in shard}
        self._entries = open_checkpoint(shards[0].parent).tensors
        self._names: dict[int, list[str]] = {}
        for name, entry in self._entries.items():
            self._names.setdefault(entry.shard, []).append(name)
        self._makers = threading.local()
        self._pool.shutdown()
        self._pool = ThreadPoolExecutor(NUM_MAKERS)  # making bytes takes processors, where reading takes few

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        """Start making a slab; see `HostStore.read`."""
        return [
            self._pool.submit(self._make, name, slab[at : at + num_bytes])
            for piece in layout.pieces
            for name, at, num_bytes in self._within(piece)
        ]

    def _within(self, piece: Piece) -> Iterator[tuple[str, int, int]]:
        """Tensors of a run of file bytes, and where they lie in the slab."""
        for name in self._names[piece.shard]:
            entry = self._entries[name]
            if piece.lo <= entry.lo and entry.hi <= piece.hi:
                yield name, piece.slab_lo + entry.lo - piece.lo, entry.hi - entry.lo

    def _make(self, name: str, view: np.ndarray) -> None:
        if not hasattr(self._makers, "maker"):
            self._makers.maker = inflation._BlockMaker(self._small, self._dtype, threading.get_ident() % 2**31)
        at = 0
        for block in self._makers.maker.blocks(self._pieces[name]):
            data = block.flatten().view(torch.uint8).numpy()
            view[at : at + len(data)] = data
            at += len(data)
        assert at == len(view), f"{name} has {len(view)} bytes and got {at}"


def _inflated(small: Checkpoint, shape: Shape) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    """Configs before and after, the plan, and the pieces shard by shard."""
    old = inflation._complete(small.config)
    old["dtype"] = inflation._DTYPES[inflation._check_tensors(small, old)]
    how = {"width_factor": shape.width_factor, "layer_bytes": shape.layer_bytes}
    roomy = inflation.plan_inflation(old, 1000 * shape.layer_bytes, **how)  # layers come in steps of their own
    outer_bytes = roomy.total_bytes - roomy.num_layers * roomy.layer_bytes
    plan = inflation.plan_inflation(old, outer_bytes + shape.num_layers * roomy.layer_bytes, **how)
    changes = dict(
        inflation._widened(old, shape.width_factor),
        intermediate_size=plan.ffn_size,
        num_hidden_layers=plan.num_layers,
    )
    return old, changes, plan, inflation._shards(old, {**old, **changes}, plan, _SHARD_BYTES)


def _write_holes(path: Path, pieces: Any, dtype: str) -> None:
    """A safetensors file with its header and its length, and nothing between."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        lo, end = end, end + inflation._num_bytes([piece.axes], ITEM_BYTES[dtype])
        header[piece.name] = {
            "dtype": dtype,
            "shape": inflation._stored_shape(piece.axes),
            "data_offsets": (lo, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _WIDE_LOAD)  # tensors begin 8 bytes off wide loads, as in half of all real files
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
