"""A mixture of experts that begins as a trained dense Llama.

Every expert is a slice of the dense feed-forward rows; experts of one copy share a router row but
for some noise, so that a token chooses the slices of one copy and gets the dense layer back
(virtual groups: He et al., 2410.07524). Query and key norms begin at the size that queries and keys
have. Invariant: without noise and with the norms of queries and keys taken out, the logits are the
dense model's.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offload.bench.pairs.training import KEPT, packaged, write_rounded
from offload.checkpoint.files import cache_folder
from offload.checkpoint.packaged import inflated_target

# the last in units of a tensor's own deviation
_ROUTER_STD = 0.1
_ROUTER_NOISE = 0.02
_WEIGHT_NOISE = 0.05


class ExpertSizes(NamedTuple):
    num_experts: int = 32
    num_chosen: int = 4
    # of an expert; a slice of the dense rows, and fresh ones that nothing listens to yet
    ffn_size: int = 160


def upcycled(
    dense: LlamaForCausalLM, sizes: ExpertSizes, tokens_BS: Tensor, seed: int
) -> Qwen3MoeForCausalLM:
    """Return the mixture in float32; `tokens_BS` are for measuring queries and keys."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **{name: getattr(dense.config, name) for name in (*KEPT, "rope_parameters")},
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_chosen,
        norm_topk_prob=True,
        moe_intermediate_size=sizes.ffn_size,
        decoder_sparse_step=1,
        use_sliding_window=False,
        router_aux_loss_coef=0.0,
    )
    model = Qwen3MoeForCausalLM(config).float()
    weights = dense.float().state_dict()
    for name, scale in _norm_scales(dense, tokens_BS).items():
        weights[name] = torch.full((dense.config.head_dim,), scale)
    for index in range(dense.config.num_hidden_layers):
        mlp = f"model.layers.{index}.mlp."
        gate, up, down = (
            weights.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up", "down")
        )
        weights |= {mlp + part: weight for part, weight in _experts(gate, up, down, sizes).items()}
    model.load_state_dict(weights)
    return model


def _experts(
    gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor, sizes: ExpertSizes
) -> dict[str, Tensor]:
    def noisy(weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight) * weight.std() * _WEIGHT_NOISE

    num_own = len(gate_FH) // sizes.num_chosen
    is_whole = num_own <= sizes.ffn_size and sizes.num_experts % sizes.num_chosen == 0
    assert is_whole, "a slice fits, copies are whole"
    gate_ups = []
    downs = []
    for expert in range(sizes.num_experts):
        rows = (expert % sizes.num_chosen * num_own + torch.arange(sizes.ffn_size)) % len(gate_FH)
        gate_ups.append(torch.cat([noisy(gate_FH[rows]), noisy(up_FH[rows])]))
        # each of the chosen has this share of the weight
        down = down_HF[:, rows] * sizes.num_chosen
        downs.append(noisy(down.where(torch.arange(sizes.ffn_size) < num_own, 0.0)))
    copies = torch.randn(sizes.num_experts // sizes.num_chosen, gate_FH.shape[1]) * _ROUTER_STD
    router_EH = copies.repeat_interleave(sizes.num_chosen, 0)
    router_EH += torch.randn_like(router_EH) * _ROUTER_NOISE
    return {
        "gate.weight": router_EH,
        "experts.gate_up_proj": torch.stack(gate_ups),
        "experts.down_proj": torch.stack(downs),
    }


@torch.no_grad()
def _norm_scales(dense: LlamaForCausalLM, tokens_BS: Tensor) -> dict[str, float]:
    """Return root mean squares of queries and keys, by the names of their norms' weights."""
    scales = dict[str, float]()

    def measure(name: str, out: Tensor) -> None:
        scales[f"{name.removesuffix('_proj')}_norm.weight"] = out.square().mean().sqrt().item()

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: measure(name, out))
        for name, module in dense.named_modules()
        if name.endswith((".q_proj", ".k_proj"))
    ]
    dense(input_ids=tokens_BS)
    for hook in hooks:
        hook.remove()
    return scales


def untrained_mixture(size_bytes: int) -> Path:
    """Return an untrained mixture of this size, where no good text is needed.

    It is made once, then reused; the folder has its name only when it is whole.
    """
    folder = cache_folder() / "moe-untrained"
    if not folder.is_dir():
        scratch = folder.with_name(f"{folder.name}.part")
        dense = packaged("target")
        generator = torch.Generator().manual_seed(0)
        tokens_BS = torch.randint(dense.config.vocab_size, (4, 128), generator=generator)
        write_rounded(upcycled(dense, ExpertSizes(), tokens_BS, 0), scratch)
        scratch.rename(folder)
    return inflated_target(size_bytes, lambda done, total: None, folder, folder.name)
