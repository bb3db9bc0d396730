"""Quantised models, end to end: a model that is streamed as it is stored writes what transformers writes from weights
that were expanded beforehand.
"""

import json
import shutil
from pathlib import Path

import pytest
import quantised
import torch
from matrix import matrix
from passes import text_scores
from plans import plan_memory
from quantised import RECIPES, Quantised, Recipe, Stored, compressed, save_quantised
from refusals import join, split
from safetensors.torch import load_file, save_file
from test_families import config_of, tiny_model
from test_tiny import prompts, reference
from tiny import FAMILIES, build, save, save_pair
from torch import Tensor
from transformers import AutoModelForCausalLM

import offload
from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.kernels.expand_integers import expand_integers_reference
from offload.memory.planner import least_budget
from offload.memory.tiers import LayerTier

FORMATS = [name for name in RECIPES if name != "mxfp4"]  # which only stacks of experts are stored in
ROWS = [  # MLX is read of families whose tensors mlx-lm leaves alone
    pytest.param(format, family, id=f"{format}-{family}")
    for format in FORMATS
    for family in ("qwen2", "qwen3-moe", "mamba", "jamba")
    if not (format.startswith("mlx") and family in ("mamba", "jamba"))
]


def expanded(model: Quantised, plain: Path, directory: Path) -> Path:
    """Return the weights as a plain checkpoint in float32."""
    directory.mkdir()
    for small in plain.glob("*.json"):
        if "safetensors" not in small.name:
            shutil.copy(small, directory)
    weights = {name: tensor.clone().contiguous() for name, tensor in model.weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("groups", [(None, None), (64, 32)])
def test_groups_that_both_fit_by_shape_are_told_by_the_models_width(
    groups: tuple[int | None, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Int4 in groups of 64 and int8 in groups of 32 have as many words and scales, and so have both by rows."""
    plain = save(build(FAMILIES["llama"]()), tmp_path / "plain")
    stores = {bits: compressed(bits, group) for bits, group in zip((4, 8), groups, strict=True)}
    config = json.loads(json.dumps(RECIPES["ct-w8"].config))
    ((_, usual),) = config["config_groups"].items()
    strategy = "channel" if groups[0] is None else "group"
    config["config_groups"] = {
        f"group_{bits}": usual
        | {"weights": {**usual["weights"], "num_bits": bits, "group_size": group, "strategy": strategy}}
        for bits, group in zip((4, 8), groups, strict=True)
    }

    def store(key: str, tensor: Tensor, recipe: Recipe) -> Stored | None:
        bits = 8 if "down_proj" in key or "k_proj" in key else 4
        return stored_as(key, tensor, recipe._replace(store=stores[bits]))

    stored_as = quantised._store
    monkeypatch.setattr(quantised, "_store", store)
    monkeypatch.setitem(RECIPES, "both", Recipe(config, stores[4]))  # type: ignore[arg-type]
    model = save_quantised(plain, "both", tmp_path / "quantised")
    prompt = prompts()[1]
    wanted = reference(expanded(model, plain, tmp_path / "expanded"), prompt, 16)
    with offload.load(model.directory, ram="1GiB", context=128, threads=1) as decoder:
        assert decoder.generate(prompt, max_new_tokens=16).token_ids == wanted


@matrix("format,family", ROWS, daily=4)
def test_streamed_ids_and_logits_are_those_of_the_expanded_weights(format: str, family: str, tmp_path: Path) -> None:
    # widths that blocks of 16 divide, where a family has narrow ones
    ranks = {"time_step_rank": "state_size", "mamba_dt_rank": "mamba_d_state"}
    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    for rank in ranks.keys() & {*vars(config)}:
        setattr(config, rank, 32)
        setattr(config, ranks[rank], 16)  # both together 64 rows: 3-bit zeros fill whole words, as GPTQ's tools demand
    target, draft = save_pair(config, tmp_path, noise=0.003)
    model = save_quantised(target, format, tmp_path / "quantised")
    plain = expanded(model, target, tmp_path / "expanded")
    prompt = prompts()[1]
    wanted = reference(plain, prompt, 24)
    files = (open_checkpoint(model.directory), open_checkpoint(draft))
    ram = least_budget(lambda size: plan_memory(files, ram=size, dtype="auto", context=256, num_nodes=64))
    with offload.load(model.directory, draft, ram=ram, context=256, tree="64x16", threads=1) as decoder:
        plan = decoder.plan
        is_streamed = (
            plan.num_layers_in(LayerTier.DISK) > plan.num_resident or 2 * plan.num_kept_experts < plan.num_experts
        )
        # zero points of six bits are opened at once, which may take as much as all layers of a tiny model
        fits_anyway = format == "ct-w6-zeros" and plan.num_layer_slots == 0
        assert is_streamed or fits_anyway, "layers, or the experts of a mixture"
        for tree in ("none", "64x16"):
            assert decoder.generate(prompt, max_new_tokens=24, tree=tree).token_ids == wanted, tree


@matrix("format", FORMATS, daily=4)
@matrix("family", ["llama", "qwen3-moe"], daily=1)
def test_logits_of_a_resident_model_equal_those_of_transformers(format: str, family: str, tmp_path: Path) -> None:
    require_equal_logits(save(build(FAMILIES[family]()), tmp_path / "plain"), format, tmp_path)


@pytest.mark.parametrize("format", ["fp8-channel", "ct-w4", "ct-int8", "gptq", "nvfp4"])
def test_a_transposed_weight_is_refused(format: str, tmp_path: Path) -> None:
    """It takes the same bytes."""
    plain = save(build(FAMILIES["llama"]()), tmp_path / "plain")
    model, base = save_quantised(plain, format, tmp_path / "quantised"), "model.layers.0.self_attn.k_proj"
    weight = model.weights[f"{base}.weight"]
    turned = RECIPES[format].store(weight.T.contiguous()).tensors
    for path in model.directory.glob("*.safetensors"):
        tensors = load_file(path)
        turned_tensors = {name: turned[name.removeprefix(base)] for name in tensors if name.startswith(base)}
        save_file(
            tensors | {name: tensor.contiguous() for name, tensor in turned_tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    rows, columns = weight.shape
    with pytest.raises(UserError, match=rf"k_proj\.weight must have shape \[{rows}, {columns}\], the file has"):
        resident_model(open_checkpoint(model.directory), "float32")


@pytest.mark.parametrize("format", ["fp8-block", "ct-w4", "gptq", "nf4", "nvfp4"])
def test_a_type_that_nobody_knows_is_refused_wherever_it_stands(format: str, tmp_path: Path) -> None:
    """It may stand among words, scales and whatever else makes up a weight."""
    plain = save(build(FAMILIES["llama"]()), tmp_path / "plain")
    folder = save_quantised(plain, format, tmp_path / "quantised", max_shard_size="1GB").directory
    header, data = split((folder / "model.safetensors").read_bytes())
    names = [name for name in header if ".0.self_attn.k_proj." in name]
    assert len(names) > 1, "words and what belongs to them"
    for name in names:
        text = json.dumps({**header, name: {**header[name], "dtype": "F302"}}).encode()
        (folder / "model.safetensors").write_bytes(join(text, data))
        with pytest.raises(UserError):
            resident_model(open_checkpoint(folder), "float32")


def test_logits_of_experts_in_mxfp4_equal_those_of_transformers(tmp_path: Path) -> None:
    require_equal_logits(save(tiny_model(config_of("gpt_oss")), tmp_path / "plain"), "mxfp4", tmp_path)


def require_equal_logits(target: Path, format: str, tmp_path: Path) -> None:
    model = save_quantised(target, format, tmp_path / "quantised")
    resident = resident_model(open_checkpoint(model.directory), "float32")
    token_T = torch.tensor(prompts()[1])
    got_TV = text_scores(resident, token_T)
    wanted_TV = logits(expanded(model, target, tmp_path / "expanded"), token_T)
    torch.testing.assert_close(got_TV, wanted_TV, rtol=1e-4, atol=1e-4)
    assert (logits(target, token_T) - wanted_TV).abs().max() > 0.01, "quantising must change them, or nothing is shown"


@pytest.mark.parametrize(("format", "suffix"), [("fp8-block", "weight_scale_inv"), ("gptq", "scales")])
def test_scales_that_are_no_numbers_are_told_with_their_layer(format: str, suffix: str, tmp_path: Path) -> None:
    target = save(build(FAMILIES["qwen2"]()), tmp_path / "plain")
    folder = save_quantised(target, format, tmp_path / "quantised").directory
    name = f"model.layers.1.self_attn.q_proj.{suffix}"
    shard = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(shard)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(offload.UserError) as caught:
        resident_model(open_checkpoint(folder), "float32")
    line = str(caught.value)
    assert line.startswith("quantised: model.layers.1.self_attn.q_proj.weight: "), line
    assert line.endswith("are not: download the checkpoint again") and line.count("again") == 1, line


def test_eight_bits_without_scales_are_refused(tmp_path: Path) -> None:
    """Where a layer lacks its scale, and where all do."""
    target = save(build(FAMILIES["qwen2"]()), tmp_path / "plain")
    folder = save_quantised(target, "fp8-block", tmp_path / "quantised", max_shard_size="1GB").directory
    tensors = load_file(folder / "model.safetensors")
    for lost in ("layers.1.mlp.up_proj.weight_scale_inv", "_scale_inv"):
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(lost)}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(offload.UserError, match=r"proj: F8_E4M3 needs a \.weight_scale_inv or \.weight_scale bes"):
            open_checkpoint(folder)


@torch.no_grad()
def logits(directory: Path, token_T: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(token_T[None]).logits[0]


def test_turned_words_of_one_column_are_expanded() -> None:
    """Torch takes a column of any stride for contiguous."""
    words_N1 = torch.randint(-(1 << 31), 1 << 31, (1, 6)).to(torch.int32).T
    scale_N1 = torch.rand(6, 1)
    turned = torch.empty(6, 8)
    straight = torch.empty(6, 8)
    expand_integers_reference(words_N1, 4, scale_N1, None, 8, turned)
    expand_integers_reference(words_N1.reshape(-1).clone()[:, None], 4, scale_N1, None, 8, straight)
    assert turned.equal(straight) and turned.any()
