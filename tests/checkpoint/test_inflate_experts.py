"""An inflated mixture of experts is the small one: same logits and same routing, larger experts that lie together.

Why: what experts on demand gain is measured on it. Invariant: each planted mistake breaks the equality.
"""

import json
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import inflate, logits_of, relative_error
from small_moe import EXPERT_BYTES, MOE_SIZES, NUM_EXPERTS, save_small_moe
from torch import Tensor
from transformers import AutoModelForCausalLM

from offload.checkpoint import inflate as module
from offload.checkpoint.inflate import plan_inflation
from offload.checkpoint.safetensors import INFLATED, open_checkpoint, read_header

TARGET_BYTES = 8_000_000


@pytest.fixture(autouse=True)
def _little_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EXPERT_BYTES", EXPERT_BYTES)


@torch.no_grad()
def chosen(folder: Path) -> list[Tensor]:
    """Of each layer, (tokens, chosen) in rising order."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(0, MOE_SIZES["vocab_size"], (2, 48), generator=torch.Generator().manual_seed(5))
    routers = model(input_ids=tokens, output_router_logits=True).router_logits
    return [one.topk(MOE_SIZES["num_experts_per_tok"]).indices.sort(-1).values for one in routers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_are_those_of_the_small_model(tmp_path: Path, dtype: torch.dtype, seed: int) -> None:
    source = save_small_moe(tmp_path / "small", seed=seed, dtype=dtype)
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    config = json.loads((inflated / "config.json").read_text())
    assert config["hidden_size"] == 32 * 4 and config["num_local_experts"] == NUM_EXPERTS
    assert config["num_hidden_layers"] > 3 and config["moe_intermediate_size"] > 24
    assert relative_error(source, inflated) < 1e-4
    assert torch.equal(logits_of(source).argmax(-1), logits_of(inflated).argmax(-1))


def test_greedy_ids_through_the_kv_cache(tmp_path: Path) -> None:
    source = save_small_moe(tmp_path / "small")
    prompt, written = torch.tensor([[5, 7, 11]]), []
    for folder in (source, inflate(source, tmp_path / "big", TARGET_BYTES)):
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}
        written.append(AutoModelForCausalLM.from_pretrained(folder).generate(prompt, max_new_tokens=24, **how))
    assert torch.equal(*written)


def test_real_layers_route_as_before_and_inserted_ones_as_the_nearest(tmp_path: Path) -> None:
    source = save_small_moe(tmp_path / "small")
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    wanted, got = chosen(source), chosen(inflated)
    num_layers = len(got)
    real = [num_layers * i // 6 for i in (1, 3, 5)]
    assert all(torch.equal(one, got[at]) for one, at in zip(wanted, real, strict=True))
    model = AutoModelForCausalLM.from_pretrained(inflated)
    for index, layer in enumerate(model.model.layers):
        nearest = model.model.layers[min(real, key=lambda at: abs(at - index))]
        assert layer.mlp.experts.down_proj.any() == (index in real)
        assert torch.equal(layer.mlp.gate.weight[:, :32], nearest.mlp.gate.weight[:, :32])
        assert torch.equal(layer.post_attention_layernorm.weight[:32], nearest.post_attention_layernorm.weight[:32])


def test_an_expert_lies_in_one_run_of_the_wished_size(tmp_path: Path) -> None:
    source = save_small_moe(tmp_path / "small", dtype=torch.bfloat16)
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    plan = json.loads((inflated / INFLATED).read_text())["plan"]
    assert open_checkpoint(inflated).num_bytes == plan["total_bytes"]
    assert TARGET_BYTES <= plan["total_bytes"] < TARGET_BYTES + plan["layer_bytes"]
    header, _ = read_header(inflated / "model.safetensors")
    runs = [(key, list(run)) for key, run in groupby(header, lambda name: name.rpartition(".")[0].rpartition(".")[0])]
    experts = {key: [header[name] for name in run] for key, run in runs if ".experts." in key}
    assert len(experts) == len([key for key, _ in runs if ".experts." in key]) == NUM_EXPERTS * plan["num_layers"]
    for entries in experts.values():
        assert all(one.hi == other.lo for one, other in pairwise(entries))
        assert 0.7 * EXPERT_BYTES < entries[-1].hi - entries[0].lo < 1.4 * EXPERT_BYTES


@pytest.mark.parametrize("target_bytes", [300_000_000, 10**9, 3 * 10**9])
def test_plan_of_the_trained_pair(target_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    trained = {"hidden_size": 192, "moe_intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 6}
    heads = {"num_key_value_heads": 3, "head_dim": 32, "vocab_size": 4096, "num_experts": 32, "dtype": "bfloat16"}
    plan = plan_inflation({**MOE_SIZES, **trained, **heads, "model_type": "qwen3_moe"}, target_bytes)
    assert plan.ffn_size % 64 == 0 and plan.ffn_size >= 160 and plan.num_layers >= 6
    assert 1e6 <= 3 * plan.ffn_size * plan.hidden_size * 2 <= 4e6
    assert target_bytes <= plan.total_bytes < target_bytes + plan.layer_bytes


def without(name: str, attribute: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, attribute, getattr(module, attribute) - {name})


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "experts write": without("down_proj", "_HIDDEN_WRITERS"),
    "keys as large as before": without("self_attn.k_proj", "_HEAD_NORMED"),
    "head norm halved": without("self_attn.q_norm", "_HEAD_NORMS"),
    "norms as large as before": lambda patch: patch.setattr(module, "_NORM_DIVISOR", 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """The epsilon is large here, so that keys which meet another one show."""
    source = save_small_moe(tmp_path / "small", rms_norm_eps=1.0)
    MISTAKES[mistake](monkeypatch)
    assert relative_error(source, inflate(source, tmp_path / "big", TARGET_BYTES)) > 1e-3


def test_one_planted_number_shows(tmp_path: Path) -> None:
    source = save_small_moe(tmp_path / "small")
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    model = AutoModelForCausalLM.from_pretrained(inflated)
    down_EHF = model.model.layers[len(model.model.layers) // 6].mlp.experts.down_proj
    assert not down_EHF[:, :, 24:].any() and not down_EHF[:, 32:].any()
    down_EHF.data[:, 0, 24] = 30.0
    model.save_pretrained(inflated)
    assert relative_error(source, inflated) > 1e-3


def test_inserted_router_off_its_layer_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the copies, inserted layers route by ballast, so the test above could fail."""
    source: Any = save_small_moe(tmp_path / "small")
    monkeypatch.setattr(module, "_ROUTING", frozenset())
    model = AutoModelForCausalLM.from_pretrained(inflate(source, tmp_path / "big", TARGET_BYTES))
    first, second = (model.model.layers[index].mlp.gate.weight[:, :32] for index in (0, len(model.model.layers) // 6))
    assert not torch.equal(first, second)
