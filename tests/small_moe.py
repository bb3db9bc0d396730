"""A Qwen3-MoE small enough to inflate in a test, its every weight random."""

from pathlib import Path
from typing import Any

import torch
from small_llama import SIZES
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_EXPERTS = 6
MOE_SIZES: dict[str, Any] = {
    **SIZES,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,  # no multiple of 64
    "norm_topk_prob": True,
}
EXPERT_BYTES = 150_000  # 2.5 MB otherwise


def save_small_moe(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random mixture with a tied head whose every weight matters, norms included."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**MOE_SIZES, "tie_word_embeddings": True, **changes}))
    for weight in model.parameters():
        weight.data.normal_(mean=float(weight.ndim == 1), std=0.3)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder
