"""Tiny random checkpoints of every family, and drafts that agree with them often but not always."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 199
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama-tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "qwen3-sliding": lambda: Qwen3Config(**_SIZES, head_dim=16, **_SLIDING),
    "mistral-sliding": lambda: MistralConfig(**_SIZES, sliding_window=24),
    "phi3": lambda: Phi3Config(**_SIZES, sliding_window=24),
    "gemma2": lambda: Gemma2Config(**_SIZES, head_dim=16, sliding_window=24),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, head_dim=16, sliding_window=24),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES, head_dim=16, **_EXPERTS),
}


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model with logits peaked enough that greedy text is not one token for ever."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.12)
        else:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def save(model: PreTrainedModel, directory: Path, *, max_shard_size: str = "150KB") -> Path:
    """Write a checkpoint; small shards make layers straddle files."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def save_pair(config: PreTrainedConfig, directory: Path, *, noise: float = 0.006, seed: int = 0) -> tuple[Path, Path]:
    """A target, and as its draft the same model with noise on every matrix: right often, wrong often enough."""
    model = build(config, seed)
    target = save(model, directory / "target")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += noise * torch.randn_like(parameter)
    return target, save(model, directory / "draft")
