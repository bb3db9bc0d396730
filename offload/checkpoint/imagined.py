"""Headers of a model without files, from its config alone, and the shapes of its layers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.small_files import stored_dtype
from offload.checkpoint.spec import plain_layers
from offload.checkpoint.tensors import TensorEntry
from offload.checkpoint.text_part import with_shared_layers
from offload.encoding.base import PLAIN_OF
from offload.errors import UserError
from offload.families.types import BIASED_QUERIES, LLAMA_LIKE, NORMED_HEADS

_HEADS = "num_attention_heads"
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", _HEADS, "vocab_size")
_DEFAULTED = ("num_key_value_heads", "head_dim")
_MAX_LAYERS = 10_000  # more than any model has; each layer takes memory even here
_MAX_SIZE = 1 << 32


def checkpoint_of_config(config: dict[str, Any], path: Path) -> Checkpoint:
    """Return headers of a Llama-like model, in a file that does not exist. Raises `UserError`."""
    assert config["model_type"] in LLAMA_LIKE, "sizes that do not follow from the config here"
    for name in (*_SIZES, *_DEFAULTED):
        size = config.get(name)
        limit = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
        is_usual = size is None and name in _DEFAULTED
        if not is_usual and not (type(size) is int and 0 < size < limit):
            requirement = f"{path}: {name} must be a whole number above 0 and below {limit}"
            raise UserError(f"{requirement}, got {size!r:.80}: fix it")
    width = config["hidden_size"]
    vocab = config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    layer_parts = layer_shapes(config)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_parts.items()}
    shapes["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, width)
    dtype = stored_dtype(config, path)
    known = imagined(config, path, {name: (dtype, shape) for name, shape in shapes.items()})
    return replace(known, layers=plain_layers(config))


def imagined(
    config: dict[str, Any], path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Checkpoint:
    """Return headers for (type, shape) by name, in a file beside `path` that does not exist."""
    entries = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = PLAIN_OF[dtype].stored_bytes(shape)
        entries[name] = TensorEntry(0, PLAIN_OF[dtype].name, shape, at, at + num_bytes)
        at += num_bytes
    weights = with_shared_layers(config, entries)
    return Checkpoint(path.parent, config, (path.with_name("model.safetensors"),), weights)


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the tensors of one layer, in the order of their use."""
    width, inner, num_heads = (config[name] for name in (*_SIZES[:2], _HEADS))
    head = config.get("head_dim") or width // num_heads
    queries = num_heads * head
    keys = (config.get("num_key_value_heads") or num_heads) * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if config["model_type"] in BIASED_QUERIES or config.get("attention_bias"):
        shapes |= {
            f"self_attn.{name}_proj.bias": (size,)
            for name, size in (("q", queries), ("k", keys), ("v", keys))
        }
    if config["model_type"] in NORMED_HEADS:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes
