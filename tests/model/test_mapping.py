"""Which tensors make up which parameter: against the state that transformers itself loads from the same files."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matrix import matrix
from plans import model_shape
from refusals import set_json
from safetensors.torch import load_file, save_file
from test_families import RANKS
from tiny import FAMILIES, SIZES, build
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
from transformers.core_model_loading import Transpose, WeightConverter

from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.model import mapping as naming
from offload.model.headers import describe
from offload.model.tree_model import TreeModel

_SIZES = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 4}
_ROUTED = {"n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=12, num_experts_per_tok=2),
    "qwen3-moe": FAMILIES["qwen3-moe"],
    "deepseek-v3": lambda: DeepseekV3Config(**_SIZES, **_ROUTED, **RANKS, n_group=2, topk_group=1),
    "glm4-moe": lambda: Glm4MoeConfig(**_SIZES, **_ROUTED, head_dim=8, n_group=2, topk_group=1),
    "llama": FAMILIES["llama"],
    "llama-tied": FAMILIES["llama-tied"],
}
Spoil = Callable[[dict[str, Tensor]], None]
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


@pytest.mark.parametrize("stored", ["table", "both", "apart", "head"])
def test_tied_however_it_is_stored(stored: str, tmp_path: Path) -> None:
    """transformers does not tie what the file holds twice with different values; nor may we."""
    tensors = saved("llama-tied", tmp_path)
    assert "lm_head.weight" not in tensors
    table = tensors.pop(TIED[0])
    heads = {"table": {}, "both": {TIED[1]: table.clone()}, "apart": {TIED[1]: torch.randn_like(table)}}
    stored_tensors = {TIED[1]: table} if stored == "head" else {TIED[0]: table, **heads[stored]}
    rewrite(tmp_path, {**tensors, **stored_tensors})
    ours = assert_loads_like_transformers(tmp_path)
    assert torch.equal(ours[TIED[0]], ours[TIED[1]]) == (stored != "apart")
    assert stored != "table" or ours[TIED[0]].data_ptr() == ours[TIED[1]].data_ptr(), "one tensor for both"


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_what_a_family_keeps_in_float32_is_not_rounded(name: str, tmp_path: Path) -> None:
    """A router's bias decides which experts are asked; bfloat16 would change that."""
    tensors = saved(name, tmp_path)
    rewrite(tmp_path, {k: t if k.endswith("correction_bias") else t.bfloat16() for k, t in tensors.items()})
    set_json(tmp_path / "config.json", dtype="bfloat16")
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
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = PixtralVisionConfig(**sizes, image_size=28, patch_size=14)
    config = Mistral3Config(text_config=text, vision_config=vision.to_dict(), image_token_index=198)
    assert config.tie_word_embeddings and not config.text_config.tie_word_embeddings
    whole = Mistral3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    ours = our_state(tmp_path)
    assert torch.equal(ours["lm_head.weight"], whole.lm_head.weight)
    assert torch.equal(ours["lm_head.weight"], ours["model.embed_tokens.weight"])


def leave_a_gap(tensors: dict[str, Tensor]) -> None:
    """As many as there should be, under other numbers."""
    for name in [name for name in tensors if "layers.1.mlp.experts." in name]:
        expert = int(name.split(".")[5])
        if expert >= 3:
            tensors[name.replace(f"experts.{expert}.", f"new.{expert + 1}.")] = tensors.pop(name)
    for name in [name for name in tensors if ".new." in name]:
        tensors[name.replace(".new.", ".experts.")] = tensors.pop(name)


def rows_of_another_expert(tensors: dict[str, Tensor]) -> None:
    """Together they have as many as they should."""
    first, other = (f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in (0, 1))
    rows = torch.cat([tensors[first], tensors[other]])
    tensors[first], tensors[other] = rows[:34], rows[34:]


def stacks_of_another_order(tensors: dict[str, Tensor]) -> None:
    """All experts at once, (E, in, out) instead of (E, out, in); here gate and up are as wide as they are high."""
    stacks = {"gate_proj": torch.randn(12, 64, 64), "down_proj": torch.randn(12, 32, 64)}
    for name in [name for name in tensors if "layers.1.mlp.experts." in name]:
        del tensors[name]
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = stacks["gate_proj"]
    tensors["model.layers.1.mlp.experts.down_proj"] = stacks["down_proj"]


def dropped(*names: str) -> Spoil:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return drop


def put(name: str, make: Callable[[Tensor], Tensor], source: str = "") -> Spoil:
    """A tensor made of itself, or of another one."""
    return lambda tensors: tensors.update({name: make(tensors[source or name])})


def mix_types(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
    put(UP.format(3), Tensor.half)(tensors)


def expert(number: int) -> list[str]:
    return [f"{EXPERTS}.{number}.{part}_proj.weight" for part in ("gate", "up", "down")]


def leave_a_gap_in_one_part(tensors: dict[str, Tensor]) -> None:
    tensors[UP.format(12)] = tensors.pop(UP.format(11))


EXPERTS, UP = "model.layers.1.mlp.experts", "model.layers.1.mlp.experts.{}.up_proj.weight"
GONE = "gate_up_proj must be made of experts 0 to {}, the file has {} and not {}: download"
NORM, QUERY, KEY = "model.norm.weight", *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
ROWS = r"gate_up_proj must have one shape, the file has \[30, 64\] and \[34, 64\]: download"
TURNED = r"_proj is stored transposed, .* cannot be streamed: save the model once"
REFUSED: dict[str, tuple[Spoil, str]] = {
    "one expert": (dropped(UP.format(3)), GONE.format(10, 11, 3)),
    "one at the end": (
        dropped(UP.format(11)),
        r"a tensor that model\.layers\.1\.mlp\.experts\.gate_up_proj is made of is missing: download",
    ),
    "an expert wholly": (dropped(*expert(3)), GONE.format(10, 11, 3)),
    "a gap": (leave_a_gap, GONE.format(11, 12, 3)),
    "a gap in one part": (leave_a_gap_in_one_part, GONE.format(11, 12, 11)),
    "the last expert": (dropped(*expert(11)), r"gate_up_proj must have shape \[12, 64, 64\]"),
    "rows of another expert": (rows_of_another_expert, ROWS),
    "stacks of another order": (stacks_of_another_order, rf"experts\.down{TURNED}"),
    "types": (mix_types, "gate_up_proj is made of tensors in BF16 and F16: save the model once"),
    "twice": (put("norm.weight", Tensor.clone, NORM), r"model\.norm\.weight and norm\.weight are both stored for"),
    "fused and apart": (
        put(f"{EXPERTS}.down_proj", lambda _: torch.randn(12, 64, 32), NORM),
        r"are both stored for model\.layers\.1\.mlp\.experts\.down_proj",
    ),
    "wrong width": (
        put(QUERY, lambda tensor: tensor[:, 1:]),
        r"q_proj\.weight must have shape \[64, 64\], the file has \[64, 63\]",
    ),
    "transposed": (put(KEY, Tensor.t), r"k_proj\.weight must have shape \[32, 64\], the file has \[64, 32\]"),
    "integers": (put(NORM, Tensor.int), r"must be bf16, fp16, fp32 or quantised, model\.norm\.weight is I32"),
    "a wrapper for training": (
        lambda tensors: [tensors.update({f"module.{name}": tensors.pop(name)}) for name in [*tensors]],
        r"embed_tokens\.weight is missing, the file has module\.model\.embed.*: save the model once",
    ),
    "no head": (dropped("lm_head.weight"), r"lm_head\.weight is missing: a model that embeds or classifies has none"),
    "no norm": (dropped(NORM), r"tensor model\.norm\.weight is missing: download the checkpoint again"),
}


@pytest.mark.parametrize(("spoil", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_right_is_refused(spoil: Spoil, words: str, tmp_path: Path) -> None:
    tensors = saved("qwen3-moe", tmp_path)
    spoil(tensors)
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=words):
        our_state(tmp_path)
    if spoil is rows_of_another_expert:
        for on_demand in (False, True):
            with pytest.raises(UserError, match=words):
                TreeModel(open_checkpoint(tmp_path), "float32", on_demand=on_demand)


def test_what_would_have_to_be_computed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    turn = WeightConverter("self_attn.o_proj.weight", "self_attn.o_proj.weight", operations=[Transpose(0, 1)])
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: [turn])
    with pytest.raises(UserError, match="must be computed, which cannot be streamed: save the model once"):
        our_state(tmp_path)


@pytest.mark.parametrize("inner", [16, 32, 24])
def test_stacks_of_another_order_never_pass(inner: int, tmp_path: Path) -> None:
    """Where one of the two is square, the other shows it."""
    config = Glm4MoeConfig(**_SIZES, **{**_ROUTED, "moe_intermediate_size": inner}, head_dim=8, n_group=2, topk_group=1)
    model = build(config)
    stacks = {name: tensor.mT.contiguous() for name, tensor in model.state_dict().items() if ".mlp.experts." in name}
    assert {tuple(tensor.shape) for tensor in stacks.values()} == {(12, 32, 2 * inner), (12, inner, 32)}
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {**{key: tensor for key, tensor in tensors.items() if ".mlp.experts." not in key}, **stacks})
    with pytest.raises(UserError, match=TURNED):
        our_state(tmp_path)


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_shared_expert_is_named(part: str, on_demand: bool, tmp_path: Path) -> None:
    tensors = saved("deepseek-v3", tmp_path)
    lost = f"model.layers.1.mlp.shared_experts.{part}.weight"
    del tensors[lost]
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=f"tensor {re.escape(lost)} is missing: download the checkpoint again"):
        TreeModel(open_checkpoint(tmp_path), "float32", on_demand=on_demand)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_experts", [8, 16])
def test_a_config_with_another_number_of_experts_is_refused(num_experts: int, is_fused: bool, tmp_path: Path) -> None:
    saved("glm4-moe", tmp_path)
    if is_fused:
        rewrite(tmp_path, {key: tensor.clone() for key, tensor in our_state(tmp_path).items()})
    set_json(tmp_path / "config.json", n_routed_experts=num_experts)
    for ask in (our_state, describe):
        with pytest.raises(UserError, match=rf"must have shape \[{num_experts}, .*do not belong together"):
            ask(tmp_path)
