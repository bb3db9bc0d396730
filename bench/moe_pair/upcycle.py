"""A mixture of experts that begins as a trained dense Llama.

Every expert is a slice of the dense feed-forward rows; experts of one copy share a router row but
for some noise, so that a token chooses the slices of one copy and gets the dense layer back
(virtual groups: He et al., 2410.07524). Query and key norms begin at the size that queries and keys
have. Invariant: without noise and with the norms of queries and keys taken out, the logits are the
dense model's.
"""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offload.checkpoint.files import cache_folder
from offload.checkpoint.packaged import PAIR, inflated_target

# the last in units of a tensor's own deviation
_ROUTER_STD = 0.1
_ROUTER_NOISE = 0.02
_WEIGHT_NOISE = 0.05

# files beside a packaged model's weights
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


class ExpertSizes(NamedTuple):
    """The sizes that the dense model does not say."""

    num_experts: int = 32
    num_chosen: int = 4
    # of an expert; a slice of the dense rows, and fresh ones that nothing listens to yet
    ffn_size: int = 160


def upcycled(
    dense: LlamaForCausalLM, sizes: ExpertSizes, tokens_BS: Tensor, seed: int
) -> Qwen3MoeForCausalLM:
    """Return the mixture in float32; `tokens_BS` are for measuring queries and keys."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(moe_config(dense, sizes)).float()
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


def moe_config(dense: LlamaForCausalLM, sizes: ExpertSizes) -> Qwen3MoeConfig:
    """Return the Llama's config with experts."""
    own = dense.config
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
            "bos_token_id", "eos_token_id", "tie_word_embeddings")  # fmt: skip
    values: dict[str, Any] = {name: getattr(own, name) for name in kept}
    return Qwen3MoeConfig(
        **values,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_chosen,
        norm_topk_prob=True,
        moe_intermediate_size=sizes.ffn_size,
        decoder_sparse_step=1,
        use_sliding_window=False,
        router_aux_loss_coef=0.0,
    )


def _experts(
    gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor, sizes: ExpertSizes
) -> dict[str, Tensor]:
    num_own = len(gate_FH) // sizes.num_chosen
    assert num_own <= sizes.ffn_size and sizes.num_experts % sizes.num_chosen == 0, (
        "a slice fits, copies are whole"
    )
    gate_ups = []
    downs = []
    for expert in range(sizes.num_experts):
        rows = (expert % sizes.num_chosen * num_own + torch.arange(sizes.ffn_size)) % len(gate_FH)
        gate_ups.append(torch.cat([_noisy(gate_FH[rows]), _noisy(up_FH[rows])]))
        # each of the chosen has this share of the weight
        down = down_HF[:, rows] * sizes.num_chosen
        downs.append(_noisy(down.where(torch.arange(sizes.ffn_size) < num_own, 0.0)))
    copies = torch.randn(sizes.num_experts // sizes.num_chosen, gate_FH.shape[1]) * _ROUTER_STD
    router_EH = copies.repeat_interleave(sizes.num_chosen, 0)
    router_EH += torch.randn_like(router_EH) * _ROUTER_NOISE
    stacks = {
        "experts.gate_up_proj": torch.stack(gate_ups),
        "experts.down_proj": torch.stack(downs),
    }
    return {"gate.weight": router_EH, **stacks}


def _noisy(weight: Tensor) -> Tensor:
    return weight + torch.randn_like(weight) * weight.std() * _WEIGHT_NOISE


@torch.no_grad()
def _norm_scales(dense: LlamaForCausalLM, tokens_BS: Tensor) -> dict[str, float]:
    """Return root mean squares of queries and keys, by the names of their norms' weights."""
    scales = dict[str, float]()
    hooks = []
    for name, module in dense.named_modules():
        if name.endswith((".q_proj", ".k_proj")):
            norm = name.removesuffix("_proj") + "_norm.weight"
            hooks.append(
                module.register_forward_hook(
                    lambda _, __, out, norm=norm: scales.update(
                        {norm: out.square().mean().sqrt().item()}
                    )
                )
            )
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
        dense = LlamaForCausalLM.from_pretrained(
            PAIR / "target", dtype=torch.float32, use_safetensors=True
        )
        tokens_BS = torch.randint(
            dense.config.vocab_size, (4, 128), generator=torch.Generator().manual_seed(0)
        )
        upcycled(dense, ExpertSizes(), tokens_BS, 0).eval().bfloat16().save_pretrained(scratch)
        for name in COMPANIONS:
            shutil.copyfile(PAIR / "target" / name, scratch / name)
        scratch.rename(folder)
    return inflated_target(size_bytes, lambda done, total: None, folder, folder.name)
