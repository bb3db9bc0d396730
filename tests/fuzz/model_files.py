"""What targets share that read a model's folder: tiny ones of any kind, and the commands that read them."""

from pathlib import Path
from typing import Any

import small_t5
import torch
from shell import Outcome, shell
from tiny import VOCAB_SIZE, build, save, save_tokenizer
from transformers import CONFIG_MAPPING, PreTrainedConfig

torch.set_num_threads(1)
ENOUGH = ("--ram", "512MiB", "--context", "64", "--threads", "1", "--tree", "none", "--profile", "none", "--quiet")
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
_SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16,
    "sliding_window": 24, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    "llama4_text": {"attention_chunk_size": 24, "intermediate_size_mlp": 96, "num_experts_per_tok": 1,
        "no_rope_layers": [1, 0]},
}  # fmt: skip


def config_of(family: str) -> PreTrainedConfig:
    """A small one of this model type."""
    usual = CONFIG_MAPPING[family]().to_dict()
    known = {key: value for key, value in _SIZES.items() if key in usual}
    return CONFIG_MAPPING[family](**{**known, **_OWN.get(family, {})})


def save_files(folder: Path, *, family: str = "llama", shards: bool = False, template: str | None = None) -> Path:
    """A model of two layers with its tokenizer."""
    save(build(config_of(family)), folder, max_shard_size="50KB" if shards else "1GB")
    save_tokenizer(folder, chat_template=template)
    return folder


def save_encoder_decoder(folder: Path) -> None:
    """A T5."""
    small_t5.save(small_t5.build("v1.1"), folder, "v1.1")
    save_tokenizer(folder)


def generate(model: Path) -> Outcome:
    """Four tokens, greedily."""
    return shell("generate", "-m", model, "-p", "Count: a", "-n", 4, "--greedy", *ENOUGH)


def sample(model: Path) -> Outcome:
    """The same as the model wishes it."""
    return shell("generate", "-m", model, "-p", "Count: a", "-n", 4, *ENOUGH)


def plan(model: Path) -> Outcome:
    """Headers alone."""
    return shell("plan", "-m", model, "--ram", "512MiB", "--disk-speed", "1GB")
