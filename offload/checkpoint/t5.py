"""The terms of T5 checkpoints: sizes under other names, and two stacks of layers.

mT5 is T5 with another vocabulary. Invariant: the config of any other model is left unchanged.
"""

from typing import Any

ENCODER_DECODERS = ("t5", "mt5")
TRAINED_CONTEXT = 512  # of both stacks; positions are relative, so longer texts are allowed
_USUAL_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
}


def has_encoder(config: dict[str, Any]) -> bool:
    """Return whether a config is that of a T5 whose encoder reads the prompt."""
    return (
        config.get("model_type") in ENCODER_DECODERS
        and config.get("is_encoder_decoder") is not False
    )


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the decoder's sizes under their usual names."""
    if not has_encoder(config):
        return config
    named = {usual: config.get(own) for usual, own in _USUAL_NAMES.items()}
    num_layers = config.get("num_layers")
    named |= {
        "num_hidden_layers": config.get("num_decoder_layers") or num_layers,
        "num_encoder_layers": num_layers,
    }
    return {**config, **named}
