"""What targets share that read a model's folder: a tiny one to be damaged, and the commands that read it."""

from pathlib import Path

import torch
from shell import Outcome, shell
from tiny import FAMILIES, build, save, save_tokenizer

torch.set_num_threads(1)
ENOUGH = ("--ram", "256MiB", "--context", "64", "--threads", "1", "--tree", "none", "--profile", "none")
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def save_files(folder: Path, *, family: str = "llama", shards: bool = False, template: str | None = None) -> Path:
    """A model of two layers with its tokenizer."""
    config = FAMILIES[family]()
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 32, 48
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.head_dim = 8
    save(build(config), folder, max_shard_size="30KB" if shards else "1GB")
    save_tokenizer(folder, chat_template=template)
    return folder


def generate(folder: Path) -> Outcome:
    """Four tokens, greedily."""
    return shell("generate", "-m", folder, "-p", "Count:", "-n", 4, "--greedy", "--quiet", *ENOUGH)


def plan(folder: Path) -> Outcome:
    """Headers alone."""
    return shell("plan", "-m", folder, "--ram", "256MiB")
