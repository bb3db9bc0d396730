"""Folders as mlx-lm writes them: stacks of experts, families that it changes, and those that are refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import RECIPES
from refusals import set_json
from safetensors.torch import load_file, save_file
from test_tiny import prompts, reference
from tiny import FAMILIES, build, save

import offload
from offload.checkpoint.mlx import as_in_transformers
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.tensors import TensorEntry
from offload.errors import UserError


def saved(family: str, folder: Path) -> Path:
    """Write a tiny model in one file."""
    save(build(FAMILIES[family]()), folder)
    shards = [*folder.glob("*.safetensors*")]
    weights = {name: tensor for path in shards if path.suffix != ".json" for name, tensor in load_file(path).items()}
    for path in shards:
        path.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def converted(plain: Path, folder: Path, bits: int) -> dict[str, torch.Tensor]:
    """Write what mlx-lm makes of a mixture: stacks, quantised unless `bits` is 0; return what its tensors stand for."""
    weights = load_file(plain / "model.safetensors")
    experts = sorted({name for name in weights if ".experts." in name})
    stacks: dict[str, torch.Tensor] = {}
    for name in experts:
        stem, _, rest = name.partition(".experts.")
        matrix = rest.split(".")[1]
        num = sum(other.startswith(f"{stem}.experts.") and f".{matrix}." in other for other in experts)
        parts = [weights[f"{stem}.experts.{expert}.{matrix}.weight"] for expert in range(num)]
        stacks[f"{stem}.switch_mlp.{matrix}"] = torch.stack(parts)
    kept = {name: weight for name, weight in weights.items() if name not in experts}
    tensors, numbers = dict(kept), dict(weights)
    for name, stack in stacks.items():
        if not bits:
            tensors[f"{name}.weight"] = stack
            continue
        made = [RECIPES[f"mlx-{bits}"].store(tensor.float()) for tensor in stack]
        for suffix in made[0].tensors:
            tensors[name + suffix] = torch.stack([stored.tensors[suffix] for stored in made])
        for expert, stored in enumerate(made):
            numbers[name.replace("switch_mlp", f"experts.{expert}") + ".weight"] = stored.weight
    folder.mkdir()
    for small in plain.glob("*.json"):
        shutil.copy(small, folder)
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization": {"group_size": 32, "bits": bits, "mode": "affine"}} if bits else {}
    (folder / "config.json").write_text(json.dumps(config))
    named = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "mlx"})
    return numbers


@pytest.mark.parametrize("bits", [0, 4])
def test_stacks_of_experts_write_what_transformers_writes(bits: int, tmp_path: Path) -> None:
    plain = saved("qwen3-moe", tmp_path / "plain")
    numbers = converted(plain, tmp_path / "mlx", bits)
    wanted_from = tmp_path / "wanted"
    shutil.copytree(plain, wanted_from)
    floats = {name: tensor.float().contiguous() for name, tensor in numbers.items()}
    save_file(floats, wanted_from / "model.safetensors", metadata={"format": "pt"})
    prompt = prompts()[1]
    wanted = reference(wanted_from, prompt, 16)
    with offload.load(tmp_path / "mlx", plain, ram="1GiB", context=128, tree="8x4", threads=1) as decoder:
        for tree in ("none", "8x4"):
            assert decoder.generate(prompt, max_new_tokens=16, tree=tree).token_ids == wanted, tree


@pytest.mark.parametrize("family", ["deepseek_v3", "falcon_h1", "lfm2", "gpt_oss"])
def test_families_that_mlx_changes_are_refused_by_name(family: str, tmp_path: Path) -> None:
    """Whether their weights are quantised or not: numbers of some are changed."""
    plain = saved("qwen3-moe", tmp_path / "plain")
    converted(plain, tmp_path / "mlx", 0)
    set_json(tmp_path / "mlx" / "config.json", model_type=family)
    with pytest.raises(UserError, match=f"mlx-lm wrote.*{family} is not known.*: take the same model in"):
        open_checkpoint(tmp_path / "mlx")


def test_norms_of_recurrent_families_lose_what_was_added() -> None:
    def entry(*shape: int) -> TensorEntry:
        return TensorEntry(0, "BF16", shape, 0, 2 * torch.Size(shape).numel())

    names = {"model.layers.0.input_layernorm.weight": entry(8), "model.layers.0.linear_attn.norm.weight": entry(8),
             "model.layers.0.linear_attn.conv1d.weight": entry(8, 4, 1)}  # fmt: skip
    mapping = as_in_transformers("model", {"model_type": "qwen3_next"}, names)
    coding: Any = [None if entry.coded is None else entry.coded.coding for entry in mapping.values()]
    assert coding[0].added == 1 and coding[1:] == [None, None]
    assert mapping["model.layers.0.linear_attn.conv1d.weight"].shape == (8, 1, 4)


@pytest.mark.parametrize(("ending", "method"), [
    (".weight._data", "optimum-quanto"), (".q_weight", "EXL2"), (".trellis", "EXL3"), (".W_q", "HQQ")])  # fmt: skip
def test_formats_that_are_not_read_are_named_by_their_tensors(ending: str, method: str, tmp_path: Path) -> None:
    plain = saved("llama", tmp_path / "plain")
    weights = load_file(plain / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    weights[name + ending] = weights.pop(f"{name}.weight")
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"weights of {method} .*are not read: take the same model in"):
        open_checkpoint(plain)
