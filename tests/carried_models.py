"""Tiny checkpoints that carry MTP layers by the names of published files, and the library's own way with them."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
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
    "glm4_moe of 3": {**DEEP, "head_dim": 16, "num_nextn_predict_layers": 3},
    "mimo_v2_flash": {**ROUTED, "n_routed_experts": 4, "num_hidden_layers": 3, "head_dim": 16, "v_head_dim": 8,
                      "num_attention_heads": 4, "sliding_window": 6, "num_mtp_layers": 2,
                      "mtp_layer_types": ["sliding_attention"] * 2, "mtp_mlp_layer_types": ["dense"] * 2},
    "mellum": {**ROUTED, "num_hidden_layers": 2, "num_experts": 4, "num_nextn_predict_layers": 1, "head_dim": 16,
               "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["sparse", "sparse"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"], "head_dim": 16, "n_groups": 1,
                   "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_routed_experts": 4,
                   "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "mlp_hidden_act": "relu2",
                   **ROUTED, "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]},
    "qwen3_next": {**ROUTED, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 16,
                   "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]},
    "glm4_moe_lite": {**DEEP, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                      "v_head_dim": 16, "num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]},
    "hy_v3": {**ROUTED, "num_experts": 4, "num_hidden_layers": 3, "head_dim": 16, "num_mtp_layers": 1,
              "mtp_mlp_layer_types": ["sparse"]},
    "exaone_moe": {**ROUTED, "num_experts": 4, "num_shared_experts": 1, "num_hidden_layers": 4, "head_dim": 16,
                   "sliding_window": 6, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"],
                   "mtp_mlp_layer_types": ["dense"]},
    "qwen3_5_text": {"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_mtp_layers": 1,
                "mtp_layer_types": ["full_attention"]},
    "ernie4_5_moe": {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
                     "moe_num_shared_experts": 1, "head_dim": 16, "num_mtp_layers": 1},
    "deepseek_v32": {**DEEP, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 16, "num_mtp_layers": 1, "mtp_layer_types": ["indexed_attention"],
                    "mtp_mlp_layer_types": ["sparse"], "index_head_dim": 16, "index_n_heads": 2, "index_topk": 512},
}  # fmt: skip
# Qwen's form for several layers, which the library does not load
CONFIGS["qwen3_next of 2"] = CONFIGS["qwen3_next"] | {"num_mtp_layers": 2, "mtp_layer_types": ["full_attention"] * 2}
QWENS = ("mellum", "qwen3_next", "qwen3_next of 2", "exaone_moe", "qwen3_5_text")
FED_BARE = ("deepseek_v3", "glm4_moe", "glm4_moe of 3", "glm4_moe_lite", "deepseek_v32")
BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
OF_MIMO = {"post_norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm",
           "sinks": "attention_sink_bias"}  # fmt: skip
OF_ERNIE = {"enorm": "emb_norm", "hnorm": "hidden_norm", "eh_proj": "linear_proj", "mtp_block": "block"}
APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def _published(name: str, family: str, num_layers: int) -> str:
    _, depth, part, *rest = name.split(".")
    if family == "nemotron_h":
        last = {"post_norm": "layers.1.final_layernorm"}.get(part, f"layers.0.{part}")
        return ".".join(["mtp", f"layers.{rest[0]}" if part == "mtp_block" else last, *rest[part == "mtp_block" :]])
    if family == "mimo_v2_flash":
        inner = rest if part == "mtp_block" else [part, *rest]
        return ".".join([f"model.mtp.layers.{depth}", *(OF_MIMO.get(word, word) for word in inner)])
    if family == "ernie4_5_moe":
        return ".".join([f"model.mtp_{OF_ERNIE[part]}.{depth}", *rest])
    behind = f"model.layers.{num_layers + int(depth)}"
    is_apart = family in QWENS
    if part == "mtp_block":
        return ".".join([f"mtp.layers.{depth}" if is_apart else behind, *rest])
    norm = {"post_norm": "final_layernorm"} if family == "hy_v3" else {}
    return ".".join(["mtp", APART[part], *rest] if is_apart else [behind, (BEHIND | norm)[part], *rest])


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    where, kind = name.rsplit(".", 1)
    if kind not in ("gate_up_proj", "up_proj", "down_proj") or not where.endswith("experts"):
        return {name: tensor}
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return {
        f"{where}.{expert}.{half}.weight": rows.clone()
        for expert, matrix in enumerate(tensor)
        for half, rows in zip(names, matrix.chunk(len(names)), strict=True)
    }


@cache
def carrying(family: str, *, is_right: bool = False) -> tuple[Path, Any, Any]:
    """Return a checkpoint's folder, the library's model of it, and its MTP layers by the library's own class.

    `is_right` by construction: the target says what follows a token by that token alone, as its layers add nothing,
    and so does the MTP layer, except for a little of what it attends to.
    """
    torch.manual_seed(0)
    name = family.split()[0]
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = CONFIG_MAPPING[name](**SIZES | CONFIGS[family])
    for name in ("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
        if name in CONFIGS[family]:
            setattr(config, name, CONFIGS[family][name])
    model = AutoModelForCausalLM.from_config(config).eval()
    mtp = Sublayers(model).eval() if family == "nemotron_h" else MtpModel(model, config.num_mtp_layers).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *mtp.layers.named_parameters()]:
            tensor.copy_(torch.randn_like(tensor) * 0.2 + ("norm" in name))
        for layer in mtp.layers[1:] if family in QWENS else ():
            for part in APART:
                getattr(layer, part).load_state_dict(getattr(mtp.layers[0], part).state_dict())
        if family == "ernie4_5_moe":
            # files have no such norm: the target's is used
            del mtp.layers[0].post_norm.weight
            mtp.layers[0].post_norm.weight = model.model.norm.weight
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
        if "post_norm" in name and family == "ernie4_5_moe":
            continue
        for stored, rows in _by_expert(f"layers.{name}", tensor).items():
            tensors[_published(stored, family, config.num_hidden_layers)] = rows.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model, mtp


@torch.no_grad()
def path_scores(family: str, tokens: Sequence[int], path: Sequence[int], **options: bool) -> Tensor:
    """Return the scores (V) behind a path of guesses, below tokens of which the last has no state yet; all afresh.

    Row i of a layer is that of token i + 1. A layer has no rows for its number of tokens at the beginning but those
    that are made of zeros.
    """
    _, model, mtp = carrying(family, **options)
    hidden_TD = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    token_T = torch.tensor([*tokens[1:], *path])
    num = len(token_T)
    nothing_1D = torch.zeros_like(hidden_TD[:1])
    fed_TD = torch.cat([hidden_TD, nothing_1D.expand(len(path), -1)])
    depths = [*range(len(path) + 1)]
    layers = [mtp.layers[min(depth, len(mtp.layers) - 1)] for depth in depths]
    for depth, layer in zip(depths, layers, strict=True):
        out_TD = _rows(model, mtp, layer, token_T, fed_TD)
        made_TD = out_TD if family in FED_BARE else layer.post_norm(out_TD)
        if depth < len(mtp.layers) - 1:
            fed_TD = torch.cat([nothing_1D, made_TD[:-1]])
        elif depth < len(path):
            # the last layer again: rows of guesses below go on from its own, one more each time
            row = num - len(path) + depth
            fed_TD = torch.cat([fed_TD[:row], made_TD[row - 1 : row], fed_TD[row + 1 :]])
    scores_V: Tensor = model.lm_head(layer.post_norm(out_TD[num - 1]))
    return scores_V


def _rows(model: Any, mtp: Any, layer: Any, token_T: Tensor, fed_TD: Tensor) -> Tensor:
    """Return (T, D) of one layer, before its norm."""
    halves = [layer.enorm(model.get_input_embeddings()(token_T)), layer.hnorm(fed_TD)]
    mixed_1TD = layer.eh_proj(torch.cat(halves, 1))[None]
    place_T = torch.arange(len(token_T))
    kind, *_ = getattr(mtp.config, "layer_types", None) or ["full_attention"]
    window = mtp.config.sliding_window if kind == "sliding_attention" else len(token_T)
    is_hidden_TT = (place_T[:, None] < place_T) | (place_T[:, None] - place_T >= window)
    mask = torch.zeros(is_hidden_TT.shape).masked_fill(is_hidden_TT, torch.finfo(torch.float32).min)
    by_kind = {"layer_type": kind} if getattr(mtp, "has_per_layer_rope", False) else {}
    turn = mtp.rotary_emb(mixed_1TD, place_T[None], **by_kind) if mtp.rotary_emb is not None else None
    extra = {"attention_mask": mask[None, None], "position_ids": place_T[None], "position_embeddings": turn}
    for block in layer.mtp_block if isinstance(layer.mtp_block, ModuleList) else [layer.mtp_block]:
        mixed_1TD = block(mixed_1TD, **extra)
    out_TD: Tensor = mixed_1TD[0]
    return out_TD


class Sublayers(Module):
    """Nemotron's depth of two layers, which the library has no class for, by the names of `MtpModel`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = deepcopy(model.config)
        config.layers_block_type = config.mtp_layers_block_type
        base = model.get_decoder()
        depth = Module()
        depth.enorm, depth.hnorm, depth.post_norm = (deepcopy(base.norm_f) for _ in range(3))
        depth.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        depth.mtp_block = ModuleList(type(base.layers[0])(config, place) for place in range(2))
        self.layers = ModuleList([depth])
        self.config = SimpleNamespace(layer_types=["full_attention"])
        self.rotary_emb = None
