"""Text that the target itself writes, where its draft will have to guess."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from offload.bench.moe_pair.corpus import windows

_NUM_TEXTS = 64
_PROMPT_TOKENS = 48
_TEXT_TOKENS = 256
_WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.6, "top_k": 0},
    {"do_sample": True, "top_k": 0},
)


@torch.no_grad()
def target_texts(target: Qwen3MoeForCausalLM, ids: Tensor, seed: int) -> Tensor:
    """Return (texts, tokens) after corpus prompts: a third each greedy, at T = 0.6 and at T = 1."""
    torch.manual_seed(seed)
    texts = []
    for number, way in enumerate(_WAYS):
        prompts = windows(ids, _NUM_TEXTS * _PROMPT_TOKENS, _PROMPT_TOKENS, seed + number)
        lengths = {"min_length": _TEXT_TOKENS, "max_length": _TEXT_TOKENS}
        with torch.autocast("cpu", torch.bfloat16):
            texts.append(
                target.generate(prompts, attention_mask=torch.ones_like(prompts), **lengths, **way)
            )
    return torch.cat(texts)


def kept_texts(path: Path, target: Qwen3MoeForCausalLM, ids: Tensor, seed: int) -> Tensor:
    """Return target texts from a file, which is written whole when it is not there."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.partial")
        save_file({"texts": target_texts(target, ids, seed)}, partial)
        os.replace(partial, path)
    return load_file(path)["texts"]
