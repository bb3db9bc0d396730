"""Tiny random models around a language model, as transformers has them: towers that see or hear are there as well."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TOWER = {
    "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 6, "embed_dim": 96, "num_heads": 2, "out_hidden_size": 64, "encoder_layers": 6,
    "d_model": 96, "encoder_ffn_dim": 128, "encoder_attention_heads": 2, "deepstack_visual_indexes": [1, 2],
    "fullatt_block_indexes": [1], "num_global_layers": 2, "num_position_embeddings": 16, "projector_hidden_size": 64,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "vision_output_dim": 64,
    "projector_input_dim": 96, "projector_output_dim": 96, "output_dim": 64, "conf_num_hidden_layers": 2,
    "conf_num_attention_heads": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHARING = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
           "first_k_dense_replace": 1}  # fmt: skip
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
          "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"] * 2}  # fmt: skip
_DELTA_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32}  # fmt: skip
_INDEX = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
          "v_head_dim": 12, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 8}  # fmt: skip
OWN_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {**_SLIDING, "tie_word_embeddings": True},
    "gemma3n": {**_SLIDING, **_SHARING, "laurel_rank": 8, "altup_num_inputs": 2,
                "activation_sparsity_pattern": [0.0] * 4, "tie_word_embeddings": True},
    "gemma4": {**_SLIDING, **_SHARING, "global_head_dim": 16, "tie_word_embeddings": True, "num_hidden_layers": 8,
               "layer_types": ["sliding_attention", "full_attention"] * 4},
    "gemma4_unified": {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "qwen2_vl": _MROPE, "qwen2_5_vl": _MROPE, "qwen3_vl": _MROPE, "glm46v": _MROPE,
    "qwen3_5": {**_MROPE, **_DELTA}, "qwen3_5_moe": {**_MROPE, **_DELTA, **_DELTA_EXPERTS},
    "glm4v_moe": {"rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [1, 1, 2]}, **_ROUTED},
    "qwen3_vl_moe": {**_MROPE, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{key: {"rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
       for key in ("glm4v", "glm_ocr")},
    "cohere_compass": {**_SLIDING, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_ocr2": {**_ROUTED, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    **dict.fromkeys(("paddleocr_vl", "qwen2_5_omni_thinker", "cosmos3_edge"), _MROPE),
    "qwen3_omni_moe_thinker": {**_MROPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "step3p7": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2,
                "moe_intermediate_size": 32, "share_expert_dim": 32, "n_routed_experts": 8, "num_local_experts": 8,
                "num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "granite4_vision": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                        "residual_multiplier": 0.4},
    "muse_glimmer": {"final_logit_softcapping": 2.0, "output_multiplier": 0.5},
    "granite_docling": {"logits_scaling": 4.0},
    "mistral_large4": {**_INDEX, **_ROUTED, "head_dim": 8, "indexer_types": ["full", "full", "shared", "full"],
                       "no_rope_layers": [1, 0, 1, 1], "kv_source_layers": [0, 1, 0, 3]},
    "glm5_next": {**_INDEX, **_ROUTED, "qk_rope_head_dim": 0, "index_kpool": 4, "hc_mult": 2, "linear_head_dim": 16,
                  "linear_num_heads": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2,
                  "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "qwen4_exp": {**_MROPE, **_DELTA, **_DELTA_EXPERTS, "layer_types": ["linear_attention", "indexed_attention"] * 2,
                  "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 8, "indexer_kv_heads": 1,
                  "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4},
    "minimax_m3_vl": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3], "index_n_heads": 2,
                      "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 4},
    "llama4": {"attention_chunk_size": 24, "floor_scale": 3, "attn_scale": 1.0, "intermediate_size_mlp": 96,
               "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 6,
               "no_rope_layers": [1, 0, 1] * 2},
}  # fmt: skip
# of towers that have parts of their own
OWN_TOWER: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {
        "sam_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64,
                       "image_size": 32, "output_channels": 16, "downsample_channels": [16, 96],
                       "global_attn_indexes": [1], "window_size": 2},
        "encoder_config": {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}},
}  # fmt: skip
# beside the parts, where the whole model needs it
OUTSIDE: dict[str, dict[str, Any]] = {
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCAB_SIZE - 1},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB_SIZE - 1},
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2"},
}


def wrapper_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a model around a language model; `changes` are of the latter."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    usual = CONFIG_MAPPING[kind]()
    parts = {name: getattr(usual, name, None) or make() for name, make in usual.sub_configs.items()}
    inner = usual.get_text_config(decoder=True)
    tensors_of_text = {}
    for name, part in parts.items():
        tower = {**TOWER, **OWN_TOWER.get(kind, {})}
        sizes = {**TEXT, **OWN_TEXT.get(kind, {}), **changes} if part is inner else tower
        if part is inner and f"{kind}_text" in CONFIG_MAPPING:  # older transformers take a Llama for Granite's
            part = CONFIG_MAPPING[f"{kind}_text"]()
        tensors_of_text[name] = {"model_type": part.model_type, **_known(sizes, part.to_dict())}
    if not {*tensors_of_text["text_config"].get("layer_types", ())} <= {*ALLOWED_LAYER_TYPES}:
        pytest.skip(f"this transformers has no {kind} with layers that choose by an index")
    outer = _known(
        {"tie_word_embeddings": tensors_of_text["text_config"].get("tie_word_embeddings", False)}, usual.to_dict()
    )
    outer |= OUTSIDE.get(kind, {})
    tokens = {key: VOCAB_SIZE - 1 for key in usual.to_dict() if key.endswith(("_token_id", "_token_index"))}
    return CONFIG_MAPPING[kind](**tensors_of_text, **outer, **tokens)


def _known(sizes: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if key in usual}


def wrapper_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model whose text is more than one word."""
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.12)
        else:
            parameter.data += 0.05 * torch.randn_like(parameter)
    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        model.get_input_embeddings().weight.data *= 0.05
    return model
