"""Select the tensors of the language model from a checkpoint that also holds other parts.

Multimodal checkpoints hold the language model under a prefix (`language_model.model.layers.0`,
`model.language_model.layers.0`), or beside the vision and audio towers (`model.layers.0`,
`visual.blocks.0`). Some checkpoints carry additional layers for multi-token prediction. Invariant:
what is left out is neither read nor counted in any size, and what is kept has the names of the
language model on its own.
"""

import copy
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from offload.checkpoint.tensors import TensorEntry, check_counts, check_types
from offload.errors import UserError, reason

_INNER = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(lm_head\.)?")
# tensors of a language model that lies beside the towers
_BARE = re.compile(r"^(?:model\.)?(?:layers|embed_tokens|norm|rotary_emb|lm_head)\.")
_HEAD = re.compile(r"^(?:model\.)?lm_head\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_MULTI_TOKEN = re.compile(r"(?:^|\.)mtp(?![a-z])")
# of files in Mistral's own form, by which they are told, and others that it has; where transformers
# renames by two tables, one after the other, here the outer one is applied
_MISTRAL = "tok_embeddings.weight"
_MISTRAL_NAMES = (
    (re.compile(r"^tok_embeddings\."), "model.embed_tokens."),
    (re.compile(r"^output\."), "lm_head."),
    (re.compile(r"^lerope\."), "model.rotary_emb."),
    (re.compile(r"^(layers|norm)\."), r"model.\1."),
    (re.compile(r"\.wo\."), ".o_proj."),
    (re.compile(r"\.(feed_forward|shared_experts)\.w1\."), r".\1.gate_proj."),
    (re.compile(r"\.(feed_forward|shared_experts)\.w2\."), r".\1.down_proj."),
    (re.compile(r"\.(feed_forward|shared_experts)\.w3\."), r".\1.up_proj."),
)
_EXTRA = "extra layers"
_OTHER = "other parts"
_KINDS = {
    _EXTRA: _MULTI_TOKEN,
    "audio": re.compile("audio|speech|sound"),
    "vision": re.compile("vis|vit|image|pixel|patch|multi_modal|mm_"),
}
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
# model types whose config has the sizes of text at the top, beside `vision_config`
_SIZES_OUTSIDE = ("qwen2_vl", "qwen2_5_vl")
_USE = "give the folder of a model that transformers has, or of its language model alone"


class TextPart(NamedTuple):
    """The language model's tensors by its own names, and the bytes left out, by kind."""

    tensors: dict[str, TensorEntry]
    left_out: dict[str, int]


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return whether a config is of a model around a language model."""
    return isinstance(config.get("text_config"), dict) or config.get("model_type") in _SIZES_OUTSIDE


def text_part(
    where: str, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> TextPart:
    """Separate a language model from what is around it.

    Raises `UserError` where there is none, or a tensor is stored twice.
    """
    kept = dict[str, TensorEntry]()
    left_out = Counter[str]()
    inner = config.get("text_config")
    num_layers = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
    is_around = is_wrapper(config)
    is_named = any(map(_INNER.match, tensors))
    is_mistral = is_around and _MISTRAL in tensors
    for name, entry in tensors.items():
        own = _text_model_name(name, is_named=is_named) if is_around else name
        if is_mistral:
            own = _text_model_name(_of_mistral(name), is_named=False)
        if own is None or _is_for_multi_token_prediction(own, num_layers):
            left_out[_kind(name) if own is None else _EXTRA] += entry.hi - entry.lo
        elif own in kept:
            raise UserError(
                f"{where}: {own} of the language model is stored twice: save it with "
                f"save_pretrained"
            )
        else:
            kept[own] = entry
    if is_around and tensors and not any(map(_LAYER.search, kept)):
        raise UserError(
            f"{where}: no tensors of a language model, {_words(left_out)} alone: {_USE}"
        )
    return TextPart(kept, dict(left_out))


def with_text_sizes(where: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with all sizes of the language model in `text_config`.

    Files often leave out the usual ones. Raises `UserError` where the config describes no language
    model, or its model type is not text.
    """
    check_types(where, config)
    inner = config.get("text_config")
    if inner is None or (isinstance(inner, dict) and all(key in inner for key in _SIZES)):
        return config
    kind = config.get("model_type", "unknown")
    rule = "text_config in config.json must describe a language model"
    if not isinstance(inner, dict) or not inner:
        raise UserError(f"{where}: {rule} (model type {kind}), got {inner!r:.80}: {_USE}")
    check_counts(where, config)
    # this import takes seconds, so it waits until it is needed
    from transformers import CONFIG_MAPPING

    try:
        known = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config)).get_text_config(decoder=True)
    # transformers rejects a config with exceptions of any type
    except Exception as error:
        raise UserError(f"{where}: {rule} (model type {kind}; {reason(error)}): {_USE}") from None
    usual = {key: getattr(known, key, None) for key in _SIZES if key not in inner}
    return {
        **config,
        "text_config": {**inner, **{key: size for key, size in usual.items() if size is not None}},
    }


def _of_mistral(name: str) -> str:
    for pattern, other in _MISTRAL_NAMES:
        name = pattern.sub(other, name)
    return name


def _text_model_name(name: str, *, is_named: bool) -> str | None:
    """Return a tensor's name in the language model on its own; None for the parts around it."""
    found = _INNER.match(name)
    if found:
        return f"{found[1] or 'model.'}{name[found.end() :]}"
    return name if (_HEAD if is_named else _BARE).match(name) else None


def _is_for_multi_token_prediction(name: str, num_layers: Any) -> bool:
    """Return whether a tensor belongs to layers for multi-token prediction.

    These have a name of their own, or follow the last layer.
    """
    found = _LAYER.search(name)
    is_beyond = found is not None and type(num_layers) is int and 0 < num_layers <= int(found[1])
    return bool(_MULTI_TOKEN.search(name)) or is_beyond


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), _OTHER)


def _words(left_out: Mapping[str, int]) -> str:
    return " and ".join(left_out) or "nothing"
