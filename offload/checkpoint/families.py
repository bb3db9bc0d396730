"""Families that cannot be decoded with trees, known by name before transformers is imported.

The list spares a user the seconds that importing takes. `model/meta.py` finds the same by building
the model, and refuses many more. Invariant: a family stands here only if that refuses it, too.
"""

from offload.checkpoint.safetensors import Checkpoint, unsupported

_NO_LAYERS = "its decoder has no layers[i] with rotary positions"
_NO_TEXT = "it does not write text"
REFUSED = {
    "bart": "of encoder-decoder models t5 and mt5 are known",
    "bloom": _NO_LAYERS,
    "clip": _NO_TEXT,
    "falcon": _NO_LAYERS,
    "gpt2": _NO_LAYERS,
    "opt": _NO_LAYERS,
    "rwkv": _NO_LAYERS,
    "umt5": "of encoder-decoder models t5 and mt5 are known",
}


def require_family(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for a model of a family that is refused."""
    why = REFUSED.get(str(checkpoint.config.get("model_type")))
    if why is not None:
        raise unsupported(checkpoint.directory, checkpoint.config, why)
