"""A Llama small enough to inflate in a test, and how far two checkpoints differ as functions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from offload.checkpoint import packaged as module

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,  # no multiple of 64
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "rms_norm_eps": 1e-3,  # large, so that a wrong one shows
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LAYER_BYTES = 400_000  # 25 MB otherwise
TARGET_BYTES = 4_000_000


def save_small(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random Llama with a tied head, or the model of a `config`, whose every weight matters, norms included."""
    torch.manual_seed(seed)
    config = changes.pop("config", LlamaConfig)(**{**SIZES, "tie_word_embeddings": True, **changes})
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data.normal_(mean=float(weight.ndim == 1), std=0.3)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def inflate(
    source: Path, destination: Path, target_bytes: int, progress: Callable[[int, int], None] = lambda *_: None
) -> Path:
    return module.inflate(source, destination, target_bytes, progress=progress)


@torch.no_grad()
def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 48), generator=torch.Generator().manual_seed(5))
    return model(input_ids=tokens).logits.float()


def relative_error(source: Path, inflated: Path) -> float:
    wanted, got = logits_of(source), logits_of(inflated)
    return ((got - wanted).abs().max() / wanted.std()).item()
