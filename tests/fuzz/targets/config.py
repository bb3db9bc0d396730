"""config.json of a model of each kind, and generation_config.json: what transformers and our planner make of them."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from case import Target
from damage import JSON, data, header, json_value, only
from model_files import (
    as_wanted,
    generate,
    generate_alike,
    generate_with_draft,
    keep_wanted,
    plan,
    sample,
    save_alike,
    save_encoder_decoder,
    save_files,
)

# Those that a config may have and the sound one need not: every one of them is read somewhere.
_KEYS = ("num_labels", "id2label", "sliding_window", "rope_scaling", "rope_parameters", "rope_parameters.rope_theta",
    "rope_parameters.rope_type", "rope_parameters.factor", "rope_parameters.partial_rotary_factor", "rope_theta",
    "quantization_config", "auto_map", "torch_dtype", "dtype", "num_experts", "num_experts_per_tok", "head_dim",
    "num_local_experts", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size",
    "num_hidden_layers", "vocab_size", "max_position_embeddings", "moe_intermediate_size", "attention_dropout",
    "attention_bias", "mlp_bias", "layer_types", "text_config", "_attn_implementation", "attn_implementation",
    "output_hidden_states", "output_attentions", "return_dict", "use_return_dict", "pruned_heads", "architectures",
    "model_type", "tie_word_embeddings", "hidden_act", "hidden_activation", "final_logit_softcapping",
    "attn_logit_softcapping", "query_pre_attn_scalar", "chunk_size_feed_forward", "torchscript", "transformers_version",
    "eos_token_id", "bos_token_id", "pad_token_id", "use_cache", "is_decoder", "is_encoder_decoder", "rms_norm_eps",
    "initializer_range", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "max_window_layers",
    "use_sliding_window", "partial_rotary_factor", "rope_local_base_freq", "sub_configs", "problem_type",
    "_name_or_path", "experts_implementation", "pretraining_tp", "attention_multiplier", "torch_dtype.x")  # fmt: skip
_T5_KEYS = ("num_layers", "num_decoder_layers", "d_model", "d_kv", "d_ff", "num_heads", "feed_forward_proj",
    "relative_attention_num_buckets", "relative_attention_max_distance", "decoder_start_token_id", "dense_act_fn",
    "is_gated_act", "layer_norm_epsilon", "tie_word_embeddings", "scale_decoder_outputs", "vocab_size")  # fmt: skip
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "do_sample", "eos_token_id", "pad_token_id",
    "bos_token_id", "max_length", "max_new_tokens", "repetition_penalty", "num_beams", "stop_strings", "logit_bias",
    "decoder_start_token_id", "transformers_version", "watermarking_config", "cache_implementation")  # fmt: skip
_FAMILIES = ("llama", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v3", "llama4_text", "gpt_oss")


def _save_with_wishes(folder: Path) -> None:
    save_files(folder)
    wishes = '{"do_sample": true, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 5]}'
    (folder / "generation_config.json").write_text(wishes)


_ROPES = tuple(f"rope_parameters.{key}" for key in ("rope_type", "rope_theta", "factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings", "partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "truncate", "type"))  # fmt: skip
_ROPE_KINDS: tuple[dict[str, Any], ...] = (
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)


def _other_rope(path: Path, rng: random.Random) -> str:
    """Another kind of rotary embedding, with one of its numbers damaged or not."""
    kind = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **rng.choice(_ROPE_KINDS)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": kind}))
    return f"{kind['rope_type']}, {only(*_ROPES)(path, rng) if rng.random() < 0.7 else 'no more'}"


def _save_pair(folder: Path) -> None:
    save_files(folder / "target")
    save_files(folder / "draft")
    keep_wanted(folder, generate_with_draft(folder))


_CONFIG = {"config.json": (*[only(*_KEYS)] * 4, json_value, *JSON)}
_DRAFT = {
    "draft/config.json": _CONFIG["config.json"],
    "draft/*.safetensors": (header, data),
    "draft/tokenizer.json": JSON,
}
_GENERATION = {"generation_config.json": (*[only(*_GENERATION_KEYS)] * 3, *JSON)}
TARGETS = [
    *(Target(f"config/{family}", partial(save_alike, family=family), _CONFIG, generate_alike) for family in _FAMILIES),
    Target("config/t5", save_encoder_decoder, {"config.json": (*[only(*_T5_KEYS, *_KEYS)] * 3, *JSON)}, generate),
    Target(
        "config/plan", partial(save_files, family="qwen3_moe"), _CONFIG, lambda folder: plan(folder / "config.json")
    ),
    Target("config/rope", save_files, {"config.json": (_other_rope,)}, lambda folder: generate(folder, "--invariant")),
    Target("config/draft", _save_pair, _DRAFT, lambda folder: as_wanted(folder, generate_with_draft(folder))),
    Target("config/generation", _save_with_wishes, _GENERATION, sample),
]
