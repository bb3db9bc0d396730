"""Which tensors make up which parameter: against the state that transformers itself loads from the same files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matrix import matrix
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, VOCAB_SIZE, build
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MixtralConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
)

from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.memory.planner import model_shape
from offload.model import mapping as naming

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
_ROUTED = {"n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=12, num_experts_per_tok=2),
    "qwen3-moe": FAMILIES["qwen3-moe"],
    "deepseek-v3": lambda: DeepseekV3Config(**_SIZES, **_ROUTED, **_LATENT, n_group=2, topk_group=1),
    "glm4-moe": lambda: Glm4MoeConfig(**_SIZES, **_ROUTED, head_dim=8, n_group=2, topk_group=1),
    "llama": FAMILIES["llama"],
    "llama-tied": FAMILIES["llama-tied"],
}
TIED = ("model.embed_tokens.weight", "lm_head.weight")


def saved(name: str, directory: Path) -> dict[str, Tensor]:
    """Write a tiny checkpoint as transformers does; returns its tensors as they lie in the file."""
    model = build(MODELS[name]())
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def set_config(directory: Path, **values: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


def our_state(directory: Path, dtype: str = "float32") -> dict[str, Tensor]:
    return resident_model(open_checkpoint(directory), dtype).meta_model.state_dict()


def assert_loads_like_transformers(directory: Path, dtype: str = "float32") -> dict[str, Tensor]:
    theirs, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), output_loading_info=True
    )
    assert not info["missing_keys"], "the reference itself is incomplete"
    ours, wanted = our_state(directory, dtype), theirs.state_dict()
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    return ours


@matrix("name", MODELS, daily=6)
def test_state_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    assert_loads_like_transformers(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_that_are_fused_already(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    fused = our_state(tmp_path)
    rewrite(tmp_path, {key: tensor.clone() for key, tensor in fused.items()})
    again = assert_loads_like_transformers(tmp_path)
    assert all(torch.equal(again[key], fused[key]) for key in fused)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_a_base_model_without_its_prefix(name: str, tmp_path: Path) -> None:
    """As saved from `AutoModel`: layers.0..., embed_tokens..., and a head of its own where there is one."""
    tensors = saved(name, tmp_path)
    rewrite(tmp_path, {key.removeprefix("model."): tensor for key, tensor in tensors.items()})
    assert_loads_like_transformers(tmp_path)
    assert len(model_shape(open_checkpoint(tmp_path)).layer_bytes) == build(MODELS[name]()).config.num_hidden_layers


def test_tied_without_a_stored_head(tmp_path: Path) -> None:
    assert "lm_head.weight" not in saved("llama-tied", tmp_path)
    ours = assert_loads_like_transformers(tmp_path)
    assert ours[TIED[0]].data_ptr() == ours[TIED[1]].data_ptr(), "one tensor for both"


def test_tied_with_a_stored_copy(tmp_path: Path) -> None:
    tensors = saved("llama-tied", tmp_path)
    rewrite(tmp_path, {**tensors, "lm_head.weight": tensors[TIED[0]].clone()})
    assert_loads_like_transformers(tmp_path)


def test_tied_by_the_config_but_stored_apart(tmp_path: Path) -> None:
    """transformers does not tie what the file holds twice with different values; nor may we."""
    tensors = saved("llama-tied", tmp_path)
    rewrite(tmp_path, {**tensors, "lm_head.weight": torch.randn_like(tensors[TIED[0]])})
    ours = assert_loads_like_transformers(tmp_path)
    assert not torch.equal(ours[TIED[0]], ours[TIED[1]])


def test_tied_with_only_the_head_stored(tmp_path: Path) -> None:
    tensors = saved("llama-tied", tmp_path)
    tensors["lm_head.weight"] = tensors.pop(TIED[0])
    rewrite(tmp_path, tensors)
    assert_loads_like_transformers(tmp_path)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_what_a_family_keeps_in_float32_is_not_rounded(name: str, tmp_path: Path) -> None:
    """A router's bias decides which experts are asked; bfloat16 would change that."""
    tensors = saved(name, tmp_path)
    rewrite(tmp_path, {k: t if k.endswith("correction_bias") else t.bfloat16() for k, t in tensors.items()})
    set_config(tmp_path, dtype="bfloat16")
    ours = assert_loads_like_transformers(tmp_path, "bfloat16")
    (bias,) = (tensor for key, tensor in ours.items() if key.endswith("e_score_correction_bias"))
    assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float())


def test_a_missing_buffer_is_named(tmp_path: Path) -> None:
    tensors = saved("deepseek-v3", tmp_path)
    rewrite(tmp_path, {k: t for k, t in tensors.items() if not k.endswith("e_score_correction_bias")})
    with pytest.raises(UserError, match=r"tensor model\.layers\.1\.mlp\.gate\.e_score_correction_bias is missing"):
        our_state(tmp_path)


def test_unused_tensors_are_ignored(tmp_path: Path) -> None:
    """Old buffers, heads for several tokens ahead, adapters, numbers that are no weights."""
    tensors = saved("llama", tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8),
        "model.layers.4.eh_proj.weight": torch.randn(64, 128),
        "adapter.weight": torch.randn(3),
        "step": torch.tensor([7]),
    }
    rewrite(tmp_path, {**tensors, **extra})
    ours = assert_loads_like_transformers(tmp_path)
    assert not extra.keys() & ours.keys()


def test_the_text_part_is_tied_as_the_whole_says(tmp_path: Path) -> None:
    text = MistralConfig(**_SIZES, tie_word_embeddings=False).to_dict()
    vision = PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Mistral3Config(text_config=text, vision_config=vision.to_dict(), image_token_index=198)
    assert config.tie_word_embeddings and not config.text_config.tie_word_embeddings
    whole = Mistral3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    ours = our_state(tmp_path)
    assert torch.equal(ours["lm_head.weight"], whole.lm_head.weight)
    assert torch.equal(ours["lm_head.weight"], ours["model.embed_tokens.weight"])


def drop_one_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]


def drop_an_expert_wholly(tensors: dict[str, Tensor], number: int = 3) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        del tensors[f"model.layers.1.mlp.experts.{number}.{part}.weight"]


def drop_the_last_expert(tensors: dict[str, Tensor]) -> None:
    drop_an_expert_wholly(tensors, 11)


def drop_one_at_the_end(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.11.up_proj.weight"]


def leave_a_gap(tensors: dict[str, Tensor]) -> None:
    """As many as there should be, under other numbers."""
    for name in [name for name in tensors if "layers.1.mlp.experts." in name]:
        expert = int(name.split(".")[5])
        if expert >= 3:
            tensors[name.replace(f"experts.{expert}.", f"new.{expert + 1}.")] = tensors.pop(name)
    for name in [name for name in tensors if ".new." in name]:
        tensors[name.replace(".new.", ".experts.")] = tensors.pop(name)


def leave_a_gap_in_one_part(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.11.up_proj.weight"
    tensors[name.replace("11", "12")] = tensors.pop(name)


def rows_of_another_expert(tensors: dict[str, Tensor]) -> None:
    """Together they have as many as they should."""
    one, other = (f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in (0, 1))
    rows = torch.cat([tensors[one], tensors[other]])
    tensors[one], tensors[other] = rows[:34], rows[34:]


def stacks_of_another_order(tensors: dict[str, Tensor]) -> None:
    """All experts at once, (E, in, out) instead of (E, out, in); here gate and up are as wide as they are high."""
    stacks = {"gate_proj": torch.randn(12, 64, 64), "down_proj": torch.randn(12, 32, 64)}
    for name in [name for name in tensors if "layers.1.mlp.experts." in name]:
        del tensors[name]
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = stacks["gate_proj"]
    tensors["model.layers.1.mlp.experts.down_proj"] = stacks["down_proj"]


def mix_types(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16()
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"] = tensors[
        "model.layers.1.mlp.experts.3.up_proj.weight"
    ].half()


def store_twice(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()


def store_fused_and_apart(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.randn(12, 64, 32)


def wrong_width(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.randn(64, 63)


def transposed(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].T


def integers(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def no_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


REFUSED = {
    drop_one_expert: r"gate_up_proj must be made of experts 0 to 10, the file has 11 and not 3: download",
    drop_one_at_the_end: r"a tensor that model\.layers\.1\.mlp\.experts\.gate_up_proj is made of is missing: download",
    drop_an_expert_wholly: r"gate_up_proj must be made of experts 0 to 10, the file has 11 and not 3: download",
    leave_a_gap: r"gate_up_proj must be made of experts 0 to 11, the file has 12 and not 3: download",
    leave_a_gap_in_one_part: r"gate_up_proj must be made of experts 0 to 11, the file has 12 and not 11: download",
    drop_the_last_expert: r"gate_up_proj must have shape \[12, 64, 64\]",
    rows_of_another_expert: r"gate_up_proj must have one shape, the file has \[30, 64\] and \[34, 64\]: download",
    stacks_of_another_order: r"experts\.down_proj is stored transposed, .* cannot be streamed: save the model once",
    mix_types: r"gate_up_proj is made of tensors in BF16 and F16: save the model once",
    store_twice: r"model\.norm\.weight and norm\.weight are both stored for model\.norm\.weight",
    store_fused_and_apart: r"are both stored for model\.layers\.1\.mlp\.experts\.down_proj",
    wrong_width: r"q_proj\.weight must have shape \[64, 64\], the file has \[64, 63\]",
    transposed: r"k_proj\.weight must have shape \[32, 64\], the file has \[64, 32\]",
    integers: r"must be bf16, fp16, fp32 or quantised, model\.norm\.weight is I32",
    no_norm: r"tensor model\.norm\.weight is missing: download the checkpoint again",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_what_cannot_be_right_is_refused(spoil: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    tensors = saved("qwen3-moe", tmp_path)
    spoil(tensors)
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=REFUSED[spoil]):
        our_state(tmp_path)


def test_a_renaming_that_leads_nowhere_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion tables are written for old names; a file that has the new ones already must not suffer from them."""
    from transformers.core_model_loading import WeightRenaming

    tensors = saved("llama", tmp_path)
    away = WeightRenaming(r"model\.norm\.", "model.no_such_norm.")
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: [away])
    assert torch.equal(our_state(tmp_path)["model.norm.weight"], tensors["model.norm.weight"])


def test_what_would_have_to_be_computed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose file holds the transpose of what the model wants."""
    from transformers.core_model_loading import Transpose, WeightConverter

    saved("llama", tmp_path)
    turn = WeightConverter("self_attn.o_proj.weight", "self_attn.o_proj.weight", operations=[Transpose(0, 1)])
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: [turn])
    with pytest.raises(UserError, match="must be computed, which cannot be streamed: save the model once"):
        our_state(tmp_path)
