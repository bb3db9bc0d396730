"""Families beyond the promised ones: tiny random models either decode as transformers does, or are refused in one line.

None may be silently wrong. The list is what transformers 5.23 has; a family that it lacks is skipped.
"""

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from matrix import matrix
from refusals import set_json
from rounding import beyond_doubt, choices_beyond_doubt
from tiny import FAMILIES, SIZES, VOCAB_SIZE, build, save, streaming_ram
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

import offload
from offload.checkpoint.checkpoint import Checkpoint
from offload.families.types import REFUSED as REFUSED_BY_NAME
from offload.model.attention import windows_of
from offload.model.meta import build_meta_model
from offload.sampling_options import Sampling

PROMPT = torch.randint(3, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(8)).tolist()
NUM_NEW = 30  # with the prompt more than twice the sliding window
_SIZES = {**SIZES, "max_position_embeddings": 256, "bos_token_id": None}
_IF_KNOWN = {
    **{"head_dim": 16, "sliding_window": 24, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 12),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
}
RANKS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
_LATENT = {**RANKS, "num_key_value_heads": 4, "head_dim": 8}
_SHARING = {
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
}
_DELTA = {f"linear_num_{whose}_heads": number for whose, number in (("key", 2), ("value", 4))}
_DELTA |= {f"linear_{whose}_head_dim": size for whose, size in (("key", 16), ("value", 12))}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
_MIXED = ["linear_attention", "full_attention"] * 2
# With layers that are recurrent, or short convolutions.
HYBRIDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA),
    "olmo_hybrid": _DELTA,
    "kimi_linear": {**_LATENT, "layer_types": _MIXED, "linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, "layer_types": _MIXED, "shared_intermediate_size": 32},
    "bailing_hybrid": {**_LATENT, "layer_types": _MIXED, "linear_num_heads": 4, "linear_head_dim": 16,
                       "num_experts_per_token": 2, "num_expert_group": 2},
    "mamba": {"state_size": 8}, "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "minimax": {"layer_types": _MIXED, "block_size": 8, "num_local_experts": 4, "sliding_window": None},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "num_mem_blocks": 2,
               "use_shared_attention_adapter": True, "adapter_rank": 4, "use_mem_rope": True, "n_mamba_heads": 8,
               "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 16, "num_key_value_heads": 4},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "n_mamba_heads": 2,
              "mamba_d_state": 8, "mamba_dt_rank": 8, "num_key_value_heads": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 24},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "jamba": {"num_hidden_layers": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
              "mamba_dt_rank": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 3,
                   "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16,
                   "moe_shared_expert_intermediate_size": 32},
}  # fmt: skip
_INDEX = {**_LATENT, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 8}
# With layers that choose by an index; every text of the tests is longer than what they choose.
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": _INDEX,
    # with gates of whole vectors, as real ones have
    "axk2": {**_INDEX, "v_head_dim": 16},
    "glm_moe_dsa": {**_INDEX, "indexer_types": ["full", "shared", "full", "shared"]},
    "hy_v4": {**_INDEX, "indexer_types": ["full", "full", "shared", "full"]},
    "dots3_note_text": {**_INDEX, "head_dim": 16, "shared_experts_intermediate_size": 32,
                        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
                        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24,
                        "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 12},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3], "num_key_value_heads": 2,
                           "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 4},
    "qwen4_exp_text": {**_DELTA, "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_count": 2,
                       "hc_lowrank": 8, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                       "indexer_budget": 16, "indexer_compress_ratio": 4},
}  # fmt: skip
PURE = ("mamba", "mamba2", "falcon_mamba")  # without any attention
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), _LATENT),
    "minicpm3": {**_LATENT, "dim_model_base": 64},
    "gemma3n_text": {**_SHARING, "num_kv_shared_layers": 3, "laurel_rank": 8, "altup_num_inputs": 2,
                     "activation_sparsity_pattern": [0.0] * 8},
    "gemma4_text": {**_SHARING, "num_kv_shared_layers": 2, "global_head_dim": 16},
    "llama4_text": {"attention_chunk_size": 24, "floor_scale": 8, "attn_scale": 0.5, "intermediate_size_mlp": 96,
                    "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 6,
                    "no_rope_layers": [1, 0, 1] * 2},
    **HYBRIDS,
    **INDEXED,
    "axk1": _LATENT,
    "beam": {"mlp_layer_types": ["sparse"] * 4},
    "flint": {"mlp_only_layers": []},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0,
                                                                   "mrope_section": [3, 3, 2]}}},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
}  # fmt: skip
_SEEDS = {"minimax": 1, "phi": 1, "qwen2_moe": 2, "starcoder2": 2}  # with seed 0 their texts are one word
_PLAIN = """
    afmoe apertus cohere cohere2 cwm deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5
    ernie4_5_moe exaone4 gemma gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite
    gpt_neox gpt_oss granite granitemoe hunyuan_v1_moe jetmoe llama4_text mimo_v2_flash minicpm3
    minimax_m2 nanochat nemotron olmo2 olmo3 olmoe phi phimoe arcee aria_text axk1 beam bitnet
    cohere2_moe cohere_compass_text exaone_moe flex_olmo flint granite_swa granitemoe_swa
    granitemoeshared helium hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna mellum
    ministral3 olmo persimmon seed_oss solar_open vaultgemma qwen2_moe smollm3
    stablelm starcoder2 youtu
"""
WORKING = (*_PLAIN.split(), *HYBRIDS, *INDEXED)
# Each of another kind: latent attention, sinks, chunks, layers that share keys, norms behind, gated inputs.
CORE = ("deepseek_v3", "gpt_oss", "llama4_text", "gemma4_text", "olmo2", "gemma3n_text")


def config_of(family: str) -> PreTrainedConfig:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    usual = CONFIG_MAPPING[family]().to_dict()
    known = {key: value for key, value in {**_SIZES, **_IF_KNOWN}.items() if key in usual}
    # the oldest that is admitted makes such layers otherwise, and has other names for them
    too_old = f"this transformers has no {family} with layers that choose by an index"
    try:
        config = CONFIG_MAPPING[family](**{**known, **OWN.get(family, {})})
    except StrictDataclassClassValidationError:
        if family in INDEXED:
            pytest.skip(too_old)
        raise
    if family in INDEXED and not {"indexed_attention", "minimax_m3_sparse"} & {*config.layer_types}:
        pytest.skip(too_old)
    return config


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Embeddings that double as the head are made small, or every token would repeat itself."""
    model = build(config, seed)
    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        model.get_input_embeddings().weight.data *= 0.05
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


def greedy_choices(model: PreTrainedModel, new_ids: list[int], prompt: list[int]) -> list[int]:
    """What transformers would append after the prompt and after each of the new tokens but the last, in one pass.

    If it agrees with all of `new_ids`, these are what its own greedy decoding gives.
    """
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.tensor([prompt + new_ids]), use_cache=False).logits[0]
    return beyond_doubt(logits_TV[len(prompt) - 1 : -1]).tolist()


@matrix("family", WORKING, always=CORE, daily=5)
def test_families_decode_like_transformers(family: str, tmp_path: Path) -> None:
    directory = save(tiny_model(config_of(family), seed=_SEEDS.get(family, 0)), tmp_path)
    theirs, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], "the reference itself is incomplete"
    is_attending = theirs.config.model_type not in PURE
    ram = streaming_ram(directory, context=128, num_nodes=8)
    options: dict[str, Any] = {"dtype": "float32", "context": 128, "tree": "8x3", "threads": 1, "experts": "layers"}
    with offload.load(directory, directory, ram=ram, **options) as decoder:
        got = decoder.generate(PROMPT, max_new_tokens=NUM_NEW)
        decoder.save_session(directory / "session")
        held = decoder.load_session(directory / "session").tokens
        kept = decoder.begin(held, Sampling(), keeps=True).stats.num_kept_tokens
        assert held == PROMPT + got.token_ids, "a session holds the text"
        # states alone do not tell how much of a text they are behind
        num_kept = len(held) - 1 if is_attending else 0
        assert kept == num_kept, "shapes are told rightly from the config"
        cache = decoder.begin(PROMPT, Sampling()).caches.target  # the one that was written with
        kv_bytes = sum(held.nbytes for layer in range(cache.num_layers) for held in cache.layer_states(layer).values())
    with choices_beyond_doubt() if theirs.config.model_type in INDEXED else nullcontext():
        assert got.token_ids == greedy_choices(theirs.eval(), got.token_ids, PROMPT)
    slots_bytes = got.plan.num_layer_slots * got.plan.layer_slot_bytes
    if max(got.plan.layer_bytes) < 2 * min(got.plan.layer_bytes):
        assert got.plan.num_layer_slots == 3 and got.plan.num_resident == 0
    assert got.plan.resident_bytes + slots_bytes < 3 * got.plan.layer_slot_bytes + 200 and got.plan.is_streamed
    assert kv_bytes <= got.plan.kv_bytes, "the cache takes more than was planned"
    assert got.stats.tokens_per_sweep > 2, "a draft that is the model itself must be believed"
    assert len(set(got.token_ids)) >= 4, "a text of one token puts nothing to the test"


def meta_model_of(config: PreTrainedConfig, directory: Path) -> PreTrainedModel:
    config.save_pretrained(directory)
    return build_meta_model(Checkpoint(directory, config.to_dict(), (), {}), torch.bfloat16)


REFUSED = {  # "|" where older transformers call a kind of layer otherwise
    "lfm2_moe": "config.json has no layer_types",
    "deepseek_v4": "keys that stand for several tokens",
    "opt": "no layers.i. with rotary positions",
    "gpt2": "no layers.i. with rotary positions",
    "bloom": "no layers.i. with rotary positions",
    "falcon": "no layers.i. with rotary positions",
    "rwkv": "no layers.i. with rotary positions",
    "umt5": "of encoder-decoder models t5 and mt5 are known",
    "bart": "of encoder-decoder models t5 and mt5 are known",
    "paligemma": "attention that looks ahead",
    "clip": "it does not write text",
    "embedding_gemma2": "it does not write text",
    "blip-2": "no layers.i. with rotary positions",
    "mllama": "layers that attend to pictures alone",
    "kosmos-2": "no attribute .embed_tokens",
    "longcat_flash": "two attentions in each of its layers",
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_trees_cannot_be_verified_on_are_refused(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    with pytest.raises(offload.UserError, match=f"model type {family} is not supported .*{REFUSED[family]}"):
        meta_model_of(CONFIG_MAPPING[family](), tmp_path)


def test_families_that_are_refused_by_name_are_refused_when_they_are_built() -> None:
    """And in the same words; what the table says is found before transformers is imported."""
    for family, why in REFUSED_BY_NAME.items():
        assert re.search(REFUSED[family], why), family


def test_attention_that_looks_ahead_and_more_labels_than_memory_are_refused(tmp_path: Path) -> None:
    """EmbeddingGemma is a Gemma 3 by its architecture."""
    config = FAMILIES["gemma3"]()
    config.use_bidirectional_attention = True
    with pytest.raises(offload.UserError, match="attention that looks ahead"):
        meta_model_of(config, tmp_path)
    # transformers gives each of them a name.
    with pytest.raises(offload.UserError, match=r"num_labels in config\.json must be at most 100000"):
        changed_model_of("llama", {"num_labels": 10**12}, tmp_path)


SQUARE_ROOT = r"(no real number|must be float, not complex)"
IMPOSSIBLE = {
    "more experts than there are": ("mixtral", {"num_experts_per_tok": 9}, "not in range"),
    "keys that are no share of the queries": ("llama", {"num_key_value_heads": 3}, "shape"),
    "the root of a negative scale": ("gemma3", {"query_pre_attn_scalar": -3}, SQUARE_ROOT),
    "the same in its own attention": ("gemma2", {"query_pre_attn_scalar": -3}, SQUARE_ROOT),
    "frequencies of text": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "unsupported"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_pass_that_cannot_be_is_refused_without_weights(case: str, tmp_path: Path) -> None:
    family, changes, words = IMPOSSIBLE[case]
    with pytest.raises(offload.UserError, match=f"model type .* is not supported .*{words}"):
        changed_model_of(family, changes, tmp_path)


def changed_model_of(family: str, changes: dict[str, Any], directory: Path) -> PreTrainedModel:
    """Return the model of a config.json that transformers would not have written."""
    config = FAMILIES[family]().to_dict() | changes
    (directory / "config.json").write_text(json.dumps(config))
    return build_meta_model(Checkpoint(directory, config, (), {}), torch.float32)


@pytest.mark.parametrize("window", ["32", [1], 2**64, -5, 1.5])
def test_a_window_that_is_no_number_of_keys_is_refused(window: object, tmp_path: Path) -> None:
    with pytest.raises(offload.UserError, match="sliding_window"):
        meta_model = changed_model_of("mistral-sliding", {"sliding_window": window}, tmp_path)
        windows_of(meta_model.config, 4)


@pytest.mark.parametrize("flags", [{"return_dict": False}, {"output_hidden_states": "x"}, {"output_attentions": True}])
def test_a_config_cannot_change_what_a_pass_returns(flags: dict[str, object], tmp_path: Path) -> None:
    directory = save(tiny_model(FAMILIES["llama"]()), tmp_path)

    def text() -> list[int]:
        with offload.load(directory, ram="1GiB", context=64, threads=1) as decoder:
            return decoder.generate(PROMPT[:8], max_new_tokens=8).token_ids

    wanted = text()
    set_json(directory / "config.json", **flags)
    assert text() == wanted


def test_a_meta_model_takes_no_memory(tmp_path: Path) -> None:
    """Experts in one piece of 17 TB: nothing of that size is allocated, not even for a moment."""
    sizes = {**_SIZES, "hidden_size": 4096, "intermediate_size": 1 << 15, "num_hidden_layers": 1}
    meta_model = meta_model_of(MixtralConfig(**sizes, num_local_experts=1 << 14, num_experts_per_tok=2), tmp_path)
    assert sum(parameter.nbytes for parameter in meta_model.parameters()) > 10 * 10**12
    assert {parameter.device.type for parameter in meta_model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in meta_model.buffers()} == {"cpu"}, "frequencies are computed, not read"


_ROPE = {"rope_theta": 10000.0, "factor": 4.0}
_LONGROPE = {**_ROPE, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
             "original_max_position_embeddings": 64}  # fmt: skip
CHANGING = {
    "dynamic": lambda: LlamaConfig(**{**_SIZES, "max_position_embeddings": 64},
                                   rope_parameters={**_ROPE, "rope_type": "dynamic"}),
    "longrope": lambda: Phi3Config(**_SIZES, sliding_window=None, original_max_position_embeddings=64,
                                   rope_parameters=copy.deepcopy(_LONGROPE)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGING)
def test_nodes_beyond_the_context_do_not_change_the_rotary_frequencies(kind: str, tmp_path: Path) -> None:
    """In a full context: both kinds look at the largest position of a pass and then turn all of its rows otherwise."""
    directory = save(tiny_model(CHANGING[kind]()), tmp_path)
    prompt = (PROMPT * 2)[:40]
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with offload.load(directory, directory, ram="1GiB", context=64, tree="64x16", threads=1) as decoder:
        new_ids = decoder.generate(prompt, max_new_tokens=64 - len(prompt)).token_ids
    assert new_ids == greedy_choices(theirs, new_ids, prompt)
