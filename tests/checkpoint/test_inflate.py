"""The inflated model is the small one: same logits, real bytes.

Why: every bench figure on a big target rests on it. Invariant: each planted mistake below breaks the equality.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import LAYER_BYTES, SIZES, TARGET_BYTES, inflate, logits_of, relative_error
from transformers import AutoModelForCausalLM

from offload.checkpoint import inflate as module
from offload.checkpoint.inflate import plan_inflation


@pytest.fixture(autouse=True)
def _little_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAYER_BYTES", LAYER_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_are_those_of_the_small_model(
    small: Callable[..., Path], tmp_path: Path, dtype: torch.dtype, seed: int
) -> None:
    """Computed in fp32 whatever is stored, so that only the order of summation may differ."""
    source = small(seed=seed, dtype=dtype)
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    config = json.loads((inflated / "config.json").read_text())
    assert config["hidden_size"] == 32 * 4 and config["num_key_value_heads"] == 2
    assert config["num_hidden_layers"] > 3 and config["intermediate_size"] > 80
    assert relative_error(source, inflated) < 1e-4


def test_bf16_arithmetic_agrees_but_for_near_ties(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small(dtype=torch.bfloat16)
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    wanted, got = logits_of(source, torch.bfloat16), logits_of(inflated, torch.bfloat16)
    assert (wanted.argmax(-1) == got.argmax(-1)).float().mean() > 0.9
    assert (got - wanted).abs().mean() < 0.02 * wanted.std()


def test_generation_through_the_kv_cache(small: Callable[..., Path], tmp_path: Path) -> None:
    folders = (source := small()), inflate(source, tmp_path / "big", TARGET_BYTES)
    prompt, written = torch.tensor([[5, 7, 11]]), []
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        mask = torch.ones_like(prompt)
        written.append(
            model.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None)
        )
    assert torch.equal(*written)


@pytest.mark.parametrize("shape", [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}], ids=["mqa", "mha"])
def test_other_head_groups(small: Callable[..., Path], tmp_path: Path, shape: dict[str, int]) -> None:
    source = small(**shape)
    assert relative_error(source, inflate(source, tmp_path / "big", TARGET_BYTES)) < 1e-4


def without_writer(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Ballast instead of zeros in what writes into the hidden state."""
    return lambda patch: patch.setattr(module, "_HIDDEN_WRITERS", module._HIDDEN_WRITERS - {name})


def unscaled_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_NORM_DIVISOR", 1)


def unscaled_eps(patch: pytest.MonkeyPatch) -> None:
    right = module._widened
    patch.setattr(module, "_widened", lambda small: {**right(small), "rms_norm_eps": 1e-3})


def heads_in_a_row(patch: pytest.MonkeyPatch) -> None:
    """Real query heads first instead of spread over their kv groups."""
    right = module._layer_axes

    def flat(config: dict[str, Any]) -> dict[str, module.Axes]:
        return {part: tuple((math.prod(axis),) for axis in axes) for part, axes in right(config).items()}

    patch.setattr(module, "_layer_axes", flat)


MISTAKES = {
    "embedding": without_writer("embed_tokens"),
    "o_proj": without_writer("o_proj"),
    "down_proj": without_writer("down_proj"),
    "norm": unscaled_norm,
    "eps": unscaled_eps,
    "heads": heads_in_a_row,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_shows(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    source = small()
    MISTAKES[mistake](monkeypatch)
    assert relative_error(source, inflate(source, tmp_path / "big", TARGET_BYTES)) > 1e-3


PLANTED_ENTRIES = {
    "extra ffn column": ("mlp.down_proj", 0, 80),
    "extra head column": ("self_attn.o_proj", 0, 2 * 16),
    "extra hidden row": ("mlp.down_proj", 32, 0),
}


@pytest.mark.parametrize("entry", PLANTED_ENTRIES)
@torch.no_grad()
def test_one_planted_number_shows(small: Callable[..., Path], tmp_path: Path, entry: str) -> None:
    source, (part, row, column) = small(), PLANTED_ENTRIES[entry]
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    model = AutoModelForCausalLM.from_pretrained(inflated)
    first_real = len(model.model.layers) // 6  # the middle of the first third
    weight = model.get_parameter(f"model.layers.{first_real}.{part}.weight")
    assert weight[row, column] == 0
    weight[row, column] = 30.0
    model.save_pretrained(inflated)
    assert relative_error(source, inflated) > 1e-3


def test_padding_is_zero_where_written_and_ballast_where_read(small: Callable[..., Path], tmp_path: Path) -> None:
    inflated = inflate(small(), tmp_path / "big", TARGET_BYTES)
    model = AutoModelForCausalLM.from_pretrained(inflated)
    num_inserted = 0
    for layer in model.model.layers:
        down_DF, output_DH = layer.mlp.down_proj.weight, layer.self_attn.o_proj.weight
        num_inserted += not down_DF.any() and not output_DH.any()
        assert not down_DF[32:].any() and not down_DF[:, 80:].any()
        # 2 kv groups of 8 query heads, the first 2 of them real
        assert not output_DH[32:].any() and not output_DH.unflatten(1, (2, 8 * 16))[:, :, 2 * 16 :].any()
        for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj):
            assert 0.015 < reader.weight[:, 32:].std() < 0.025
    assert num_inserted == len(model.model.layers) - 3 > 0
    assert not model.model.embed_tokens.weight[:, 32:].any()


def test_real_layers_are_spread_evenly(small: Callable[..., Path], tmp_path: Path) -> None:
    inflated = inflate(small(), tmp_path / "big", TARGET_BYTES)
    model = AutoModelForCausalLM.from_pretrained(inflated)
    real = [index for index, layer in enumerate(model.model.layers) if layer.mlp.down_proj.weight.any()]
    num_layers = len(model.model.layers)
    assert real == [num_layers * i // 6 for i in (1, 3, 5)]


@pytest.mark.parametrize("target_bytes", [10**8, 10**9, 7 * 10**9 + 13, 140 * 10**9])
def test_plan_hits_the_wish_within_a_layer(target_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    trained = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6}
    config = {**SIZES, **trained, "num_key_value_heads": 3, "head_dim": 32, "vocab_size": 4096, "dtype": "bfloat16"}
    config["model_type"] = "llama"
    plan, narrowest = plan_inflation(config, target_bytes), plan_inflation(config, 0)
    assert plan.ffn_size % 64 == 0 and plan.ffn_size >= 512 and plan.num_layers >= 6
    assert plan.layer_bytes < 27_000_000 or plan.ffn_size == narrowest.ffn_size
    assert target_bytes <= plan.total_bytes
    assert plan.total_bytes < max(target_bytes + plan.layer_bytes, narrowest.total_bytes * 1.5)
    assert plan.layer_bytes * plan.num_layers < plan.total_bytes


def test_a_wish_below_the_smallest_keeps_all_real_layers(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    inflated = inflate(source, tmp_path / "big", 1)
    config = json.loads((inflated / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (3, 128)
    assert relative_error(source, inflated) < 1e-4
