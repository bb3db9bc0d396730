"""How a model routes a text: how often experts are chosen, and what rows and neighbours share."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)


class RoutingTable(NamedTuple):
    """Means over layers and texts."""

    # distinct experts of n consecutive tokens, in units of those that one token uses
    union: dict[int, float]
    by_layer: list[float]  # the same for 16 tokens
    neighbours: float  # share of a token's experts that the token before used, too
    distant: float  # and the token eight before
    popular: list[float]  # share of a text's choices that fall on its experts, most used first


@torch.no_grad()
def chosen_experts(model: Qwen3MoeForCausalLM, tokens_BS: Tensor) -> Tensor:
    """Return expert numbers, (layers, texts, tokens, chosen)."""
    logits = model(input_ids=tokens_BS, use_cache=False, output_router_logits=True).router_logits
    chosen = [one.topk(model.config.num_experts_per_tok, -1).indices for one in logits]
    return torch.stack(chosen).unflatten(1, tokens_BS.shape)


def routing_table(chosen_LBSK: Tensor, num_experts: int) -> RoutingTable:
    """Return the table of what `chosen_experts` gives; texts of 64 tokens or more."""
    used_LBSE = torch.nn.functional.one_hot(chosen_LBSK, num_experts).sum(-2).float()
    k = chosen_LBSK.shape[-1]

    def union_L(num_rows: int) -> Tensor:
        blocks = used_LBSE.unfold(2, num_rows, num_rows)  # (layers, texts, blocks, experts, rows)
        return (blocks.sum(-1) > 0).float().sum(-1).mean((1, 2)) / k

    def shared(lag: int) -> float:
        return ((used_LBSE[:, :, lag:] * used_LBSE[:, :, :-lag]).sum(-1).mean() / k).item()

    shares = used_LBSE.mean(2).sort(-1, descending=True).values.mean((0, 1)) / k
    unions = {n: union_L(n).mean().item() for n in NUM_ROWS}
    return RoutingTable(unions, union_L(16).tolist(), shared(1), shared(8), shares.tolist())
