"""A checkpoint by name, as planning sees it: from headers, or built from a config alone.

Either way the model is built once, without storage, so that a plan refuses what loading refuses;
what that tells is kept (`checkpoint/spec.py`), and who plans it again imports nothing.
"""

from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint, compute_dtype_name
from offload.checkpoint.imagined import checkpoint_of_config, imagined
from offload.checkpoint.open import ReadHeaders, config_alone, open_headers
from offload.checkpoint.sizes import config_sizes
from offload.checkpoint.small_files import read_config, stored_dtype
from offload.checkpoint.spec import ModelSpec, keep_spec, kept_spec, spec_key
from offload.errors import UserError, require
from offload.families.types import LLAMA_LIKE
from offload.options import PathLike

# layers or experts to build, and any other size: beyond every model
_MOST_MODULES = 1024
_MOST_NUMBERS = 1 << 28


def describe(
    model: PathLike, source: PathLike | None = None, *, read: ReadHeaders = open_headers
) -> Checkpoint:
    """Return a model as planning sees it, from a folder, a GGUF file, a hub id or a config.json.

    `source` is what a GGUF file was made from, and `read` reads headers, see `open_headers`. Raises
    `UserError`, also where loading would find that files and model do not belong together.
    """
    path = config_alone(model)
    # which refuses a source of anything but a GGUF file
    if path is None or source is not None:
        checkpoint = read(model, source)
        key = _key_of(checkpoint)
        if kept_spec(key) is None:
            _require_parameters(checkpoint)
            keep_spec(key, ModelSpec())
        return checkpoint
    config = read_config(path)
    if config.get("quantization_config"):
        what = f"{path}: a config alone does not say how quantised weights are stored"
        raise UserError(f"{what}: give the folder")
    if config.get("model_type") in LLAMA_LIKE:
        return checkpoint_of_config(config, path)
    stored_dtype(config, path)
    key = spec_key(config)
    spec = kept_spec(key)
    if spec is None or not spec.tensors:
        spec = keep_spec(key, ModelSpec(tensors=_tensors_of_built_model(config, path)))
    return imagined(config, path, spec.tensors)


def is_built(
    model: PathLike, source: PathLike | None = None, *, read: ReadHeaders = open_headers
) -> bool:
    """Return whether `describe` builds the model, which imports torch. Raises `UserError`."""
    path = config_alone(model)
    if path is None or source is not None:
        return kept_spec(_key_of(read(model, source))) is None
    config = read_config(path)
    is_known = config.get("model_type") in LLAMA_LIKE or bool(config.get("quantization_config"))
    return not is_known and getattr(kept_spec(spec_key(config)), "tensors", None) in (None, {})


def _key_of(checkpoint: Checkpoint) -> str:
    """Return the key of a model by all that its mapping to parameters depends on."""
    headers = [
        (name, entry.dtype, entry.shape, entry.coded and entry.coded.coding)
        for name, entry in checkpoint.tensors.items()
    ]
    return spec_key(checkpoint.config, headers)


def _require_parameters(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for files that lack what the model is made of, as loading does."""
    config_sizes(checkpoint)

    import torch

    from offload.model.attention import windows_of
    from offload.model.layer_stacks import layer_stacks
    from offload.model.mapping import sources_of_parameters
    from offload.model.meta import build_meta_model
    from offload.model.parameters import parameter_places

    dtype = getattr(torch, compute_dtype_name(checkpoint, "auto"))
    meta_model = build_meta_model(checkpoint, dtype)
    windows_of(meta_model.config, len(layer_stacks(meta_model)[0]))
    places = parameter_places(meta_model)
    shapes = {name: tuple(place.empty.shape) for name, place in places.items()}
    sources_of_parameters(checkpoint, meta_model, shapes)


def _tensors_of_built_model(
    config: dict[str, Any], path: Path
) -> dict[str, tuple[str, tuple[int, ...]]]:
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
    untied = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    stored = {}
    for name, tensor in revert_weight_conversion(model, untied).items():
        stored[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return stored
