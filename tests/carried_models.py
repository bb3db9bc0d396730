"""Tiny checkpoints that carry MTP layers by the names of published files, and the library's own way with them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "pad_token_id": 0,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEP = {**ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "num_hidden_layers": 3}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**DEEP, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 16},
    "glm4_moe": {**DEEP, "head_dim": 16},
    "mellum": {**ROUTED, "num_hidden_layers": 2, "num_experts": 4, "num_nextn_predict_layers": 1, "head_dim": 16,
               "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["sparse", "sparse"]},
    "qwen3_next": {**ROUTED, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 16,
                   "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]},
}  # fmt: skip
IS_FED_NORMED = {"deepseek_v3": False, "glm4_moe": False, "mellum": True, "qwen3_next": True}
BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def _published(name: str, family: str, num_layers: int) -> str:
    _, depth, part, *rest = name.split(".")
    behind = f"model.layers.{num_layers + int(depth)}"
    is_apart = family in ("mellum", "qwen3_next")
    if part == "mtp_block":
        return ".".join([f"mtp.layers.{depth}" if is_apart else behind, *rest])
    return ".".join(["mtp", APART[part], *rest] if is_apart else [behind, BEHIND[part], *rest])


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    where, kind = name.rsplit(".", 1)
    if kind not in ("gate_up_proj", "down_proj") or not where.endswith("experts"):
        return {name: tensor}
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return {
        f"{where}.{expert}.{half}.weight": rows.clone()
        for expert, matrix in enumerate(tensor)
        for half, rows in zip(names, matrix.chunk(len(names)), strict=True)
    }


@cache
def carrying(family: str, *, is_right: bool = False) -> tuple[Path, Any, Any]:
    """Return a checkpoint's folder, the library's model of it, and its MTP layers by the library's own class.

    `is_right` by construction: the target says what follows a token by that token alone, as its layers add nothing,
    and so does the MTP layer, but for a little of what it attends to.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | CONFIGS[family])
    for name in ("num_mtp_layers", "mtp_layer_types"):
        if name in CONFIGS[family]:
            setattr(config, name, CONFIGS[family][name])
    if not hasattr(config, "num_mtp_layers"):
        pytest.skip(f"this transformers has no MTP layer of {family}")
    model = AutoModelForCausalLM.from_config(config).eval()
    mtp = MtpModel(model, config.num_mtp_layers).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *mtp.layers.named_parameters()]:
            tensor.copy_(torch.randn_like(tensor) * 0.2 + ("norm" in name))
        for name, tensor in (
            [*model.model.layers.named_parameters(), *mtp.layers.named_parameters()] if is_right else []
        ):
            if name.endswith("eh_proj.weight"):
                tensor.copy_(torch.eye(*tensor.shape) + 0.05 * torch.randn_like(tensor))
            elif "o_proj" in name or "down_proj" in name:
                tensor.mul_(0.5 if "mtp_block" in name else 0)
            elif "norm" in name:
                tensor.fill_(1)
        if is_right:
            model.model.norm.weight.fill_(1)
    folder = Path(mkdtemp())
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in mtp.layers.state_dict().items():
        for stored, rows in _by_expert(f"layers.{name}", tensor).items():
            tensors[_published(stored, family, config.num_hidden_layers)] = rows.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model, mtp


@torch.no_grad()
def path_scores(family: str, tokens: Sequence[int], path: Sequence[int], **how: bool) -> Tensor:
    """Return the scores (V) behind a path of guesses, below tokens of which the last has no state yet; all afresh."""
    _, model, mtp = carrying(family, **how)
    hidden_TD = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    layer = mtp.layers[0]
    token_T = torch.tensor(tokens[1:])
    for token in (*path, None):
        halves = [layer.enorm(model.get_input_embeddings()(token_T)), layer.hnorm(hidden_TD)]
        mixed_1TD = layer.eh_proj(torch.cat(halves, 1))[None]
        num = len(token_T)
        mask = torch.full((num, num), torch.finfo(torch.float32).min).triu(1)[None, None]
        place_1T = torch.arange(num)[None]
        kind = {"layer_type": "full_attention"} if getattr(mtp, "has_per_layer_rope", False) else {}
        turn = mtp.rotary_emb(mixed_1TD, place_1T, **kind)
        out_TD = layer.mtp_block(mixed_1TD, attention_mask=mask, position_ids=place_1T, position_embeddings=turn)[0]
        normed_TD = layer.post_norm(out_TD)
        if token is not None:
            token_T = torch.cat([token_T, torch.tensor([token])])
            hidden_TD = torch.cat([hidden_TD, (normed_TD if IS_FED_NORMED[family] else out_TD)[-1:]])
    scores_V: Tensor = model.lm_head(normed_TD[-1])
    return scores_V
