"""A checkpoint by name, as planning sees it: from headers, or built from a config alone.

Either way the model is built once, without storage, so that a plan refuses what loading refuses.
The resulting description is kept (`checkpoint/spec.py`), so that planning it again imports nothing.
"""

from dataclasses import replace

from offload.checkpoint.checkpoint import Checkpoint, remembered
from offload.checkpoint.heads import head_kind
from offload.checkpoint.imagined import checkpoint_of_config, imagined
from offload.checkpoint.open import ReadHeaders, config_alone, open_headers
from offload.checkpoint.sizes import config_sizes, require_layers
from offload.checkpoint.small_files import read_config, stored_dtype
from offload.checkpoint.spec import ModelSpec, keep_spec, kept_spec, plain_layers, spec_key
from offload.errors import UserError
from offload.families.types import LLAMA_LIKE
from offload.options import PathLike


def describe(
    model: PathLike, source: PathLike | None = None, *, read: ReadHeaders = open_headers
) -> Checkpoint:
    """Return a model's headers, from a folder, a GGUF file, a hub id or a config.json.

    `source` is the original of a GGUF file, and `read` reads headers, see `open_headers`. Raises
    `UserError`, also where loading would find that files and model do not match.
    """
    path = config_alone(model)
    # it refuses a source for anything but a GGUF file
    if path is None or source is not None:
        headers = read(model, source)
        # a head is no model until it is joined to its target
        return headers if head_kind(headers.config) else specified(headers, is_checked=True)
    config = read_config(path)
    if config.get("quantization_config"):
        complaint = f"{path}: a config alone does not say how quantised weights are stored"
        raise UserError(f"{complaint}: give the folder")
    if config.get("model_type") in LLAMA_LIKE:
        return checkpoint_of_config(config, path)
    stored_dtype(config, path)
    key = spec_key(config)
    spec = kept_spec(key)
    if spec is None or not spec.layers:
        # this imports torch
        from offload.model.layer_specs import spec_of_config

        spec = keep_spec(key, spec_of_config(config, path))
    return replace(imagined(config, path, spec.tensors), layers=spec.layers)


@remembered
def specified(checkpoint: Checkpoint, *, is_checked: bool = False) -> Checkpoint:
    """Return a checkpoint with a description of its layers, see `LayerSpec`.

    `is_checked` also raises `UserError` where loading would find that files and model do not match.
    """
    if checkpoint.scout is not None:
        scout = specified(checkpoint.scout, is_checked=is_checked)
        alone = specified(replace(checkpoint, scout=None), is_checked=is_checked)
        return replace(alone, scout=scout)
    spec = _known_spec(checkpoint)
    if spec is None or (is_checked and not spec.is_checked):
        # this imports torch
        from offload.model.layer_specs import layers_of

        layers = layers_of(checkpoint, is_checked=is_checked)
        spec = keep_spec(_key_of(checkpoint), ModelSpec(layers=layers, is_checked=is_checked))
    return replace(checkpoint, layers=spec.layers)


@remembered
def known_layers(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return a checkpoint with a description of its layers; None if it has to be built first.

    For a Llama-like model sizes suffice, though they do not show whether loading refuses its files.
    A copy and its scout are known both, or neither is.
    """
    if checkpoint.scout is not None:
        scout = known_layers(checkpoint.scout)
        alone = known_layers(replace(checkpoint, scout=None))
        return None if alone is None or scout is None else replace(alone, scout=scout)
    kept = _known_spec(checkpoint)
    if kept is not None:
        return replace(checkpoint, layers=kept.layers)
    if checkpoint.config.get("model_type") not in LLAMA_LIKE:
        return None
    sizes = config_sizes(checkpoint)
    if "num_attention_heads" not in sizes:
        return None
    require_layers(checkpoint)
    return replace(checkpoint, layers=plain_layers({**checkpoint.config, **sizes}))


def _known_spec(checkpoint: Checkpoint) -> ModelSpec | None:
    """Return the layers of a checkpoint that was built before; None for another."""
    spec = (
        ModelSpec(layers=checkpoint.layers) if checkpoint.layers else kept_spec(_key_of(checkpoint))
    )
    num_layers = config_sizes(checkpoint)["num_hidden_layers"]
    return spec if spec is not None and len(spec.layers) == num_layers else None


def is_built(
    model: PathLike, source: PathLike | None = None, *, read: ReadHeaders = open_headers
) -> bool:
    """Return True if `describe` builds the model, which imports torch. Raises `UserError`."""
    path = config_alone(model)
    if path is None or source is not None:
        kept = _known_spec(read(model, source))
        return kept is None or not kept.is_checked
    config = read_config(path)
    is_known = config.get("model_type") in LLAMA_LIKE or bool(config.get("quantization_config"))
    return not is_known and getattr(kept_spec(spec_key(config)), "tensors", None) in (None, {})


@remembered
def _key_of(checkpoint: Checkpoint) -> str:
    """Return the cache key of a model, from all that its mapping to parameters depends on."""
    headers = [
        (name, entry.dtype, entry.shape, entry.coded and entry.coded.coding)
        for name, entry in checkpoint.tensors.items()
    ]
    return spec_key(checkpoint.config, headers)
