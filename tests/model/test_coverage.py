"""Every model type that writes text, with transformers' own default config: accepted, or refused for a true reason.

`load` and `plan` build the model by `build_meta_model`, from the config alone, and so does this test. Types that the
installed transformers does not have are left out; what a newer one brings is accepted, or refused in one line. And what
a config alone tells of tensors is what the headers of the checkpoint tell that transformers saves for it.
"""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from matrix import matrix
from plans import model_shape
from shell import shell
from test_families import WORKING, config_of
from test_wrappers import saved
from tiny import FAMILIES, build, save
from transformers import CONFIG_MAPPING
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.sizes import config_sizes
from offload.checkpoint.small_files import read_config
from offload.errors import UserError
from offload.model.headers import describe
from offload.model.meta import build_meta_model

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} & {*CONFIG_MAPPING})
# What released models have and transformers' defaults lack or contradict, so that it cannot build them itself.
_HEADS = {"head_dim": 128}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}}
_HALF = {**_SECTIONS, "rope_parameters": {**_SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5,
                                          "mrope_section": [8, 12, 12]}}  # fmt: skip
_INDEX = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
          "indexer_compress_ratio": 16}  # fmt: skip
_BY_KIND = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
COMPLETED: dict[str, tuple[str, dict[str, Any]]] = {
    "hunyuan_v1_dense": ("no head_dim", _HEADS),
    "hunyuan_v1_moe": ("no head_dim", _HEADS),
    "hunyuan_vl": ("no head_dim", {"text_config": {**_HEADS, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]}}}),
    "ministral": ("no head_dim", _HEADS),
    "nemotron": ("no .*num_key_value_heads", {"num_key_value_heads": 8}),
    "deepseek_v2": ("no num_experts_per_tok", {"num_experts_per_tok": 6}),
    "dots1": ("no .*n_routed_experts", {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_group": 1,
                                        "topk_group": 1, "n_shared_experts": 2}),
    "lfm2_moe": ("no layer_types", {"layer_types": ["conv", "full_attention"] * 16}),
    "qwen4_exp": ("no indexer_n_heads", {"text_config": _INDEX}),
    "qwen4_exp_text": ("no indexer_n_heads", _INDEX),
    "cohere_compass": ("no 'full_attention'", {"text_config": _BY_KIND}),
    "cohere_compass_text": ("no 'full_attention'", _BY_KIND),
    "deepseek_ocr2": ("no mlp_layer_types", {"text_config": {
        "num_hidden_layers": 12, "mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_experts_per_tok": 6}}),
    "chameleon": ("no vocabulary_map", {"vocabulary_map": {"<image>": 4}}),
    "glm4v": ("split_sizes", {"text_config": _HALF}),
    "glm46v": ("split_sizes", {"text_config": _HALF}),
    "glmga": ("split_sizes", {"text_config": _HALF}),
    "glm4v_moe": ("split_sizes", {"text_config": {**_HALF, "head_dim": 128}}),
    "qwen3_omni_moe_thinker": ("broadcast", {"text_config": {**_SECTIONS, **_HEADS}}),
}  # fmt: skip
# Parts that older transformers have no default of, or one that contradicts itself.
_TEXT: dict[str, Any] = {"text_config": {}}
_MUSIC = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
PARTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": _TEXT, "gemma4_unified_assistant": _TEXT, "idefics3": _TEXT, "smolvlm": _TEXT,
    "musicgen": _MUSIC, "musicgen_melody": _MUSIC,
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "bert"}},
}  # fmt: skip
# Layers that choose by an index, which older transformers make otherwise.
INDEXED = "axk2 deepseek_v32 glm5_next glm_moe_dsa hy_v4 qwen4_exp qwen4_exp_text"
TOO_OLD = "" if "indexed_attention" in ALLOWED_LAYER_TYPES else INDEXED
COMPRESSED = "keys that stand for several tokens"
REFUSED: dict[str, str] = {  # why -> types
    COMPRESSED: "deepseek_v4",
    "is too old for model type": TOO_OLD,
    "reference_sliding_attention": "unlimited_ocr",
    "hybrid": "inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text zaya",
    "two attentions in each of its layers": "longcat_flash",
    "towers inside of its language model": "phi4_multimodal",
    "layers that attend to pictures alone": "mllama",
    "instead of writing token by token": "diffusion_gemma",
    "experts for pictures": "ernie4_5_vl_moe",
    "attention that looks ahead": "paligemma",
    "no attribute 'rope_theta'": "dbrx",
    "is_decoder=True": "reformer",
    "it does not write text": "gemma4_unified_assistant pi0",
    "hidden_size_per_layer_input must be 0": "gemma4_assistant",
    "transformers has no language model of type": "blip evolla",
    "embed_tokens": "kosmos-2 kosmos-2.5",
    "of encoder-decoder models t5 and mt5 are known":
        "bart bigbird_pegasus blenderbot blenderbot-small florence2 marian mbart musicgen musicgen_melody mvp pegasus "
        "pix2struct plbart pp_formulanet prophetnet t5gemma2 udop vision-encoder-decoder whisper",
    "no layers.i. with rotary positions":
        "bert bert-generation big_bird biogpt blip-2 bloom blt camembert codegen cpmant ctrl data2vec-text electra "
        "ernie falcon git gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj hrm_text idefics instructblip instructblipvideo "
        "megatron-bert modernbert-decoder moshi mpt openai-gpt opt rembert roberta roberta-prelayernorm roc_bert "
        "roformer rwkv trocr xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod",
}  # fmt: skip
# Of whom notes of models in use tell; gemma4 stands for all Gemma 4.
IN_USE = [
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "nemotron_h", "nemotron_h_omni",
    "granitemoehybrid", "falcon_h1", "bamba", "jamba", "olmo_hybrid", "minimax", "bailing_hybrid",
    "minicpmv4_6", "lfm2", "lfm2_moe", "lfm3", "qwen4_exp", "glm5_next", "deepseek_v32",
    "glm_moe_dsa", "mistral_large4", "hy_v4", "deepseek_v4", "step3p7", "gemma4",
]  # fmt: skip


def why_not(kind: str, directory: Path, changes: dict[str, Any] | None = None) -> str:
    """Why a type is refused; empty where it is accepted. Any exception but `UserError` fails the test."""
    try:
        config = CONFIG_MAPPING[kind](**copy.deepcopy(changes or PARTS.get(kind, {})))
    except (ValueError, StrictDataclassError) as error:  # transformers' own default contradicts itself
        return str(error)
    config.save_pretrained(directory)
    checkpoint = Checkpoint(directory, read_config(directory / "config.json"), (), {})
    try:
        build_meta_model(checkpoint, torch.bfloat16)
        config_sizes(checkpoint)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.full
@pytest.mark.parametrize("kind", TYPES)
def test_a_type_is_accepted_or_refused_for_a_true_reason(kind: str, tmp_path: Path) -> None:
    refusal = why_not(kind, tmp_path)
    if kind in COMPLETED and kind not in TOO_OLD.split():
        words, changes = COMPLETED[kind]
        assert re.search(words, refusal), "what its default config lacks"
        assert not why_not(kind, tmp_path, changes)
        return
    wanted = [words for words, kinds in REFUSED.items() if kind in kinds.split()]
    assert bool(refusal) == bool(wanted), refusal or "it is accepted"
    assert not wanted or any(re.search(words, refusal) for words in wanted), refusal


def test_how_many_types_run() -> None:
    absent = sorted({*IN_USE} - {*CONFIG_MAPPING})
    if absent:
        pytest.skip(f"this transformers has no {', '.join(absent)}")
    refused = {kind for kinds in REFUSED.values() for kind in kinds.split()}
    assert len({*TYPES} - refused) >= 185
    assert len({*IN_USE} - refused) >= 25


CORE = ("llama", "llama-tied", "gemma3", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "gemma4_text")


# MiniMax's: files may hold them, and nothing reads them
MADE_OF_THE_CONFIG = {"slope_rate", "query_decay", "key_decay", "diagonal_decay"}


@matrix("family", [*FAMILIES, *WORKING], always=CORE, daily=6)
@matrix("is_folder", [True, False], daily=1)
def test_a_config_alone_tells_what_the_headers_tell(family: str, is_folder: bool, tmp_path: Path) -> None:
    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    model = build(config)
    for module in model.modules():
        module._non_persistent_buffers_set.update(MADE_OF_THE_CONFIG & module._buffers.keys())
    assert_alone_tells(save(model, tmp_path / "whole"), tmp_path / "alone", is_folder=is_folder)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "llama4"])
def test_so_does_the_config_of_a_model_that_sees(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "whole")
    assert_alone_tells(tmp_path / "whole", tmp_path / "alone")


def assert_alone_tells(whole: Path, alone: Path, *, is_folder: bool = True) -> None:
    alone.mkdir()
    config = shutil.copy(whole / "config.json", alone / ("config.json" if is_folder else "any name.json"))
    described, stored = describe(str(alone if is_folder else config)), open_checkpoint(whole)
    got, expected = ({name: (e.dtype, e.shape) for name, e in model.tensors.items()} for model in (described, stored))
    assert got == expected
    shapes = [model_shape(checkpoint) for checkpoint in (described, stored)]
    assert len({(s.num_weights, s.routed_weights, s.routed_share, s.kv_bytes_per_token) for s in shapes}) == 1


MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
           "vocab_size": 32000, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}  # fmt: skip


def test_plan_counts_the_parameters_of_a_mixture_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    outcome = shell("plan", "-m", tmp_path, "--ram", "32GiB", "--disk-speed", "3GB", "--json")
    assert json.loads(outcome.out)["models"]["target"]["num_parameters"] == 46_702_792_704


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be a whole number below 1024, got 1000000"),
        ({"num_local_experts": 10**12}, "num_local_experts must be a whole number below 1024"),
        ({"head_dim": 10**15}, "head_dim must be a whole number below"),
        ({"hidden_size": "4096"}, "hidden_size in config.json must be a whole number"),
        ({"model_type": "gpt2"}, "model type gpt2 is not supported"),
        ({"model_type": "no such type"}, "is not supported"),
        ({"torch_dtype": "float8"}, "cannot compute in float8"),
    ],
)
def test_a_config_that_no_model_has_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIXTRAL, **change}))
    with pytest.raises(UserError, match=words):
        describe(str(tmp_path))
