"""A Qwen3-MoE small enough to inflate in a test, its every weight random."""

from functools import partial
from typing import Any

from small_llama import SIZES, save_small
from transformers import Qwen3MoeConfig

NUM_EXPERTS = 6
MOE_SIZES: dict[str, Any] = {
    **SIZES,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,  # no multiple of 64
    "norm_topk_prob": True,
}
EXPERT_BYTES = 150_000  # 2.5 MB otherwise

save_small_moe = partial(save_small, config=Qwen3MoeConfig, **MOE_SIZES)
