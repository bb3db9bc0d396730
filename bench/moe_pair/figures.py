"""What a trained pair is worth, on text that neither model has seen."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from offload.bench.moe_pair.routing import chosen_experts, routing_table

_NUM_TEXTS = 64
_NUM_GUESSES = 4
_BATCH = 8


@torch.no_grad()
def held_out_figures(
    target: Qwen3MoeForCausalLM, draft: LlamaForCausalLM, texts_BS: Tensor
) -> dict[str, Any]:
    """Return losses in nats, `rank_N` and the routing, on held-out text.

    `rank_N` is how often the draft's N-th guess is the target's greedy token.
    """
    logits = [
        (target(input_ids=rows).logits, draft(input_ids=rows).logits)
        for rows in texts_BS.split(_BATCH)
    ]
    wanted_BSV, guessed_BSV = (torch.cat(each) for each in zip(*logits, strict=True))
    hits = guessed_BSV.topk(_NUM_GUESSES, -1).indices == wanted_BSV.argmax(-1, keepdim=True)
    shares = {
        f"rank_{rank + 1}": hits[..., rank].float().mean().item() for rank in range(_NUM_GUESSES)
    }
    losses = {
        "target_loss": _loss(wanted_BSV, texts_BS),
        "draft_loss": _loss(guessed_BSV, texts_BS),
    }
    chosen = torch.cat([chosen_experts(target, rows) for rows in texts_BS.split(_BATCH)], 1)
    return {
        **losses,
        **shares,
        "routing": routing_table(chosen, target.config.num_experts)._asdict(),
    }


def held_out_texts(ids: Tensor, length: int) -> Tensor:
    """Return texts spread over all that was kept back, as (texts, length)."""
    rows = ids[: len(ids) // length * length].view(-1, length)
    return rows[:: max(1, len(rows) // _NUM_TEXTS)][:_NUM_TEXTS]


def _loss(logits_BSV: Tensor, texts_BS: Tensor) -> float:
    return functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1), texts_BS[:, 1:].flatten()
    ).item()
