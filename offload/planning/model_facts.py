"""Facts of one model, whatever the machine: its name and its size, from headers; no torch."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.sizes import model_shape


def name_of(model: str) -> str:
    """Return the name as it was given, without the folders around it."""
    # a hub id has no folder here, and its last part is its name all the same
    path = Path(os.path.abspath(model))
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


class ModelFacts(NamedTuple):
    """What one model is, on any machine: its name and its size, from headers."""

    name: str
    num_parameters: int
    num_bytes: int  # as stored, or as held in memory
    is_held: bool = False  # in fewer bits than it is stored in
    # bytes of towers and extra layers, which are never read
    left_out: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of(cls, model: str, checkpoint: Checkpoint) -> "ModelFacts":
        """Return the facts that headers tell."""
        num_bytes = checkpoint.num_bytes
        shape = model_shape(checkpoint) if checkpoint.held else None
        if shape is not None:
            num_bytes = shape.num_bytes - (shape.rest_bytes if shape.shares_rest else 0)
        # layers may share some
        apart = {(one.shard, one.lo): one for one in checkpoint.tensors.values()}
        count = sum(math.prod(one.shape) for one in apart.values())
        return cls(
            name_of(model),
            count,
            num_bytes,
            is_held=shape is not None,
            left_out=dict(checkpoint.left_out),
        )
