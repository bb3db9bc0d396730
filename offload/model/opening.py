"""Which class runs a checkpoint: decoders alone, or decoders behind an encoder."""

from typing import Any

import torch

from offload.checkpoint.families import has_encoder
from offload.checkpoint.safetensors import Checkpoint
from offload.model.encoder_decoder import EncoderDecoderModel
from offload.model.tree_model import TreeModel

_HOST = torch.device("cpu")


def open_model(
    checkpoint: Checkpoint, dtype: str = "auto", place: torch.device = _HOST, **more: Any
) -> TreeModel:
    """Return the model without its layers' weights. Raises `UserError` for what cannot run."""
    kind = EncoderDecoderModel if has_encoder(checkpoint.config) else TreeModel
    return kind(checkpoint, dtype, place, **more)
