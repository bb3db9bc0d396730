"""The losses by which target and draft learn, what the target writes for it, and what they are worth.

A target that is trained this shortly would route by token alone. Real mixtures prefer some experts
within a text, so routers are to tell texts apart: the entropy of a text's mean choice lies below
that of all texts' by as much as `_TEXT_NATS`, and what goes beyond is not rewarded.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

from offload.bench.moe_pair.corpus import windows
from offload.bench.moe_pair.training import distillation_loss

_TEXT_TOKENS = 128
_TEXT_NATS = 0.8
_TEXT_WEIGHT = 1.0
# what the target writes
_NUM_WRITTEN = 64
_WRITTEN_TOKENS = 256
_PROMPT_TOKENS = 48
_WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.6, "top_k": 0},
    {"do_sample": True, "top_k": 0},
)
# what it is measured on
_NUM_HELD_OUT = 64
_NUM_GUESSES = 4
_BATCH = 8


def target_loss(model: Qwen3MoeForCausalLM, tokens_BS: Tensor) -> Tensor:
    """Return next-token loss in nats, and what is added for the routers.

    Texts have a multiple of `_TEXT_TOKENS`.
    """
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=tokens_BS, use_cache=False, output_router_logits=True)
    missing = []
    for logits_NE in out.router_logits:
        told = _told_of_text(logits_NE.float().unflatten(0, (-1, _TEXT_TOKENS)))
        missing.append((_TEXT_NATS - told).clamp(min=0))
    return torch.stack([_loss(out.logits, tokens_BS), _TEXT_WEIGHT * torch.stack(missing).mean()])


def _told_of_text(logits_TSE: Tensor) -> Tensor:
    """Return the information between text and expert in nats.

    How far a text's mean choice differs from that of all.
    """
    chosen_TE = logits_TSE.softmax(-1).mean(1)
    return _entropy(chosen_TE.mean(0)) - _entropy(chosen_TE).mean()


def _entropy(share: Tensor) -> Tensor:
    return -(share * (share + 1e-9).log()).sum(-1)


def next_token_loss(model: PreTrainedModel, tokens_BS: Tensor) -> Tensor:
    """Return next-token loss in nats."""
    return _loss(model(input_ids=tokens_BS, use_cache=False).logits, tokens_BS)


def _loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    logits_NV = logits_BSV[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(logits_NV, tokens_BS[:, 1:].flatten())


def draft_loss(draft: LlamaForCausalLM, target: Qwen3MoeForCausalLM, tokens_BS: Tensor) -> Tensor:
    """Return how far the draft is from the target."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted_NV = target(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1)
        got_NV = draft(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1)
    return distillation_loss(got_NV, wanted_NV)


@torch.no_grad()
def target_texts(target: Qwen3MoeForCausalLM, ids: Tensor, seed: int) -> Tensor:
    """Return (texts, tokens) after corpus prompts: a third each greedy, at T = 0.6 and at T = 1."""
    torch.manual_seed(seed)
    texts = []
    for number, way in enumerate(_WAYS):
        prompts = windows(ids, _NUM_WRITTEN * _PROMPT_TOKENS, _PROMPT_TOKENS, seed + number)
        how = {"attention_mask": torch.ones_like(prompts), **way}
        how |= {"min_length": _WRITTEN_TOKENS, "max_length": _WRITTEN_TOKENS}
        with torch.autocast("cpu", torch.bfloat16):
            texts.append(target.generate(prompts, **how))
    return torch.cat(texts)


def kept_texts(path: Path, target: Qwen3MoeForCausalLM, ids: Tensor, seed: int) -> Tensor:
    """Return target texts from a file, which is written whole when it is not there."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.partial")
        save_file({"texts": target_texts(target, ids, seed)}, partial)
        os.replace(partial, path)
    return load_file(path)["texts"]


@torch.no_grad()
def held_out_figures(
    target: Qwen3MoeForCausalLM, draft: LlamaForCausalLM, ids: Tensor, length: int
) -> dict[str, float]:
    """Return losses in nats and `rank_N`, on texts spread over all that was kept back.

    `rank_N` is how often the draft's N-th guess is the target's greedy token.
    """
    rows = ids[: len(ids) // length * length].view(-1, length)
    texts_BS = rows[:: max(1, len(rows) // _NUM_HELD_OUT)][:_NUM_HELD_OUT]
    batches = texts_BS.split(_BATCH)
    wanted_BSV = torch.cat([target(input_ids=rows).logits for rows in batches])
    guessed_BSV = torch.cat([draft(input_ids=rows).logits for rows in batches])
    hits = guessed_BSV.topk(_NUM_GUESSES, -1).indices == wanted_BSV.argmax(-1, keepdim=True)
    found = {
        "target_loss": _loss(wanted_BSV, texts_BS).item(),
        "draft_loss": _loss(guessed_BSV, texts_BS).item(),
    }
    for rank in range(_NUM_GUESSES):
        found[f"rank_{rank + 1}"] = hits[..., rank].float().mean().item()
    return found
