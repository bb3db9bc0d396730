"""Descriptions of a model's layers, from building it without storage and a pass without numbers.

This imports torch and transformers, so `headers` only calls it if no description is kept.
"""

import math
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.checkpoint import Checkpoint, compute_dtype_name
from offload.checkpoint.sizes import config_sizes, head_dim, require_layers, text_config
from offload.checkpoint.small_files import stored_dtype
from offload.checkpoint.spec import PLAIN, FeedForward, LayerSpec, ModelSpec
from offload.errors import require
from offload.model.attention import windows_of
from offload.model.experts import experts_of
from offload.model.kv_cache import INDEX, KEYS, VALUES, LayerStates
from offload.model.layer_stacks import layer_stacks
from offload.model.library import PreTrainedModel, revert_weight_conversion
from offload.model.linear import is_plain
from offload.model.mapping import sources_of_parameters
from offload.model.meta import build_meta_model, kinds_of, try_out
from offload.model.mixers.base import Mixer
from offload.model.parameters import parameter_places

# more layers, experts, or any other size than any model has
_MOST_MODULES = 1024
_MOST_NUMBERS = 1 << 28


def layers_of(checkpoint: Checkpoint, *, is_checked: bool) -> tuple[LayerSpec, ...]:
    """Build a model and describe its layers. Raises `UserError`, see `headers.specified`."""
    require_layers(checkpoint)
    dtype = getattr(torch, compute_dtype_name(checkpoint, "auto"))
    meta_model = build_meta_model(checkpoint, dtype)
    windows_of(meta_model.config, len(layer_stacks(meta_model)[0]))
    if is_checked:
        places = parameter_places(meta_model)
        shapes = {name: tuple(place.empty.shape) for name, place in places.items()}
        sources_of_parameters(checkpoint, meta_model, shapes)
    return layer_specs(checkpoint, meta_model, dtype)


def layer_specs(
    checkpoint: Checkpoint, meta_model: PreTrainedModel, dtype: torch.dtype
) -> tuple[LayerSpec, ...]:
    """Return the specs of a decoder's layers, by a pass that fills a cache without numbers."""
    filled, trial = try_out(meta_model, dtype)
    sizes = config_sizes(checkpoint)
    num_heads = sizes.get("num_attention_heads", 1)
    usual = dict.fromkeys(
        (KEYS, VALUES), (sizes.get("num_key_value_heads", num_heads), head_dim(sizes))
    )
    nope, turned, value = (
        sizes.get(name, 0) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    blocks = layer_stacks(meta_model)[0]
    # in some families the last layers have none of their own
    num_keeping = len(blocks) - (text_config(checkpoint).get("num_kv_shared_layers") or 0)
    specs = list[LayerSpec]()
    for index, (block, kind) in enumerate(zip(blocks, kinds_of(meta_model), strict=True)):
        mixers = [module for module in block.modules() if isinstance(module, Mixer)]
        held = {} if mixers else usual
        # a decoder behind an encoder uses the library's own cache in that pass
        if filled is not None and not checkpoint.has_encoder:
            held = _held(filled.layer_states(kind))
        held = held if index < num_keeping else {}
        keys = held.get(KEYS, (0, 0))
        values = held.get(VALUES, (0, 0))
        _, index_width = held.get(INDEX, (0, 0))
        num_kept = math.prod(keys) + math.prod(values)
        is_latent = 0 < num_kept < num_heads * (nope + turned + value)
        num_experts, num_chosen = experts_of(trial[kind])
        feed_forward: FeedForward = PLAIN if is_plain(block) else "other"
        specs.append(
            LayerSpec(
                mixer=type(mixers[0]).__name__ if mixers else "attention",
                feed_forward="experts" if num_experts else feed_forward,
                keys=keys,
                values=values,
                index_width=index_width,
                # keys and values as projected, and expanded
                expanded_width=num_heads * (3 * nope + turned + 2 * value) if is_latent else 0,
                states=mixers[0].sizes() if mixers else None,
                num_experts=num_experts,
                num_chosen=num_chosen,
            )
        )
    return tuple(specs)


def _held(states: LayerStates) -> dict[str, tuple[int, int]]:
    """Return heads and head width of a layer's cached states."""
    return {name: (rows.shape[1], rows.shape[3]) for name, rows in states.items()}


def spec_of_config(config: dict[str, Any], path: Path) -> ModelSpec:
    """Build a model; return its layers' descriptions, and all tensors by the files' names."""
    dtype = stored_dtype(config, path)
    known = Checkpoint(path.parent, config, (), {})
    for key, value in config_sizes(known).items():
        most = _MOST_MODULES if key == "num_hidden_layers" or "experts" in key else _MOST_NUMBERS
        require(value < most, f"{path}: {key} must be a whole number below {most}", value, "fix it")

    torch_dtype = getattr(torch, dtype)
    model = build_meta_model(known, torch_dtype)
    # transformers calls T5's head tied whatever the config says, and unties it if the file has one.
    has_own_head = config.get("tie_word_embeddings") is False
    tied = set(model.all_tied_weights_keys) - ({"lm_head.weight"} if has_own_head else set())
    untied = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    stored = {}
    for name, tensor in revert_weight_conversion(model, untied).items():
        stored[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return ModelSpec(tensors=stored, layers=layer_specs(known, model, torch_dtype))
