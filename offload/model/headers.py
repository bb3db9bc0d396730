"""A checkpoint by name: read from its headers, or built from a config alone, without its weights."""

from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.imagined import checkpoint_of_config, imagined
from offload.checkpoint.open import config_alone, open_headers
from offload.checkpoint.sizes import config_sizes
from offload.checkpoint.small_files import read_config, stored_dtype
from offload.errors import UserError, require
from offload.families.types import LLAMA_LIKE
from offload.options import PathLike

# layers or experts to build, and any other size: beyond every model
_MOST_MODULES = 1024
_MOST_NUMBERS = 1 << 28


def describe(model: PathLike, source: PathLike | None = None) -> Checkpoint:
    """Return a model as planning sees it, from a folder, a GGUF file, a hub id or a config.json.

    `source` is what a GGUF file was made from, see `open_headers`. Raises `UserError`.
    """
    path = config_alone(model)
    # which refuses a source of anything but a GGUF file
    if path is None or source is not None:
        return open_headers(model, source)
    config = read_config(path)
    if config.get("quantization_config"):
        what = f"{path}: a config alone does not say how quantised weights are stored"
        raise UserError(f"{what}: give the folder")
    return _of_built_model(config, path) if is_built(model) else checkpoint_of_config(config, path)


def is_built(model: PathLike) -> bool:
    """Return whether `describe` builds the model, which imports torch. Raises `UserError`."""
    path = config_alone(model)
    return path is not None and read_config(path).get("model_type") not in LLAMA_LIKE


def _of_built_model(config: dict[str, Any], path: Path) -> Checkpoint:
    """Return type and shape of all tensors by the names that they have in a file."""
    dtype = stored_dtype(config, path)
    known = Checkpoint(path.parent, config, (), {})
    for key, value in config_sizes(known).items():
        most = _MOST_MODULES if key == "num_hidden_layers" or "experts" in key else _MOST_NUMBERS
        require(value < most, f"{path}: {key} must be a whole number below {most}", value, "fix it")

    import torch

    from offload.model.library import revert_weight_conversion
    from offload.model.meta import build_meta_model

    model = build_meta_model(known, getattr(torch, dtype))
    # transformers calls T5's head tied whatever its config says, and unties it where the file has
    # one of its own.
    has_own_head = config.get("tie_word_embeddings") is False
    tied = set(model.all_tied_weights_keys) - ({"lm_head.weight"} if has_own_head else set())
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    stored = {}
    for name, tensor in revert_weight_conversion(model, own).items():
        stored[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return imagined(config, path, stored)
