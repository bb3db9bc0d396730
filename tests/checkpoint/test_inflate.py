"""The inflated model is the small one: same logits, same routing, real bytes; whole or not there, in little memory.

Why: every bench figure on a big target rests on it. Invariant: each planted mistake below breaks the equality.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flipping import flip
from small_llama import LAYER_BYTES, SIZES, TARGET_BYTES, inflate, logits_of, relative_error, save_small
from small_moe import EXPERT_BYTES, MOE_SIZES, NUM_EXPERTS, save_small_moe
from torch import Tensor
from transformers import AutoModelForCausalLM

from offload.checkpoint import packaged as module
from offload.checkpoint.files import INFLATED
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import plan_inflation
from offload.checkpoint.safetensors import read_header
from offload.errors import UserError

MIXTURE_BYTES = 8_000_000
Mistake = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _little_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAYER_BYTES", LAYER_BYTES)
    monkeypatch.setattr(module, "_EXPERT_BYTES", EXPERT_BYTES)


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:

    def write(kind: str = "dense", **how: Any) -> tuple[Path, Path]:
        save, num_bytes = (save_small, TARGET_BYTES) if kind == "dense" else (save_small_moe, MIXTURE_BYTES)
        source = save(tmp_path / "small", **how)
        return source, inflate(source, tmp_path / "big", num_bytes)

    return write


Pair = Callable[..., tuple[Path, Path]]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def opened(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


KINDS = [("dense", "num_key_value_heads", 2, "intermediate_size", 80),
         ("mixture", "num_local_experts", NUM_EXPERTS, "moe_intermediate_size", 24)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 2)], ids=str)
@pytest.mark.parametrize(("kind", "kept", "number", "grown", "small_size"), KINDS, ids=["dense", "mixture"])
def test_logits_are_those_of_the_small_model(
    kind: str, kept: str, number: int, grown: str, small_size: int, dtype: torch.dtype, seed: int, pair: Pair
) -> None:
    """Computed in fp32 whatever is stored, so that only the order of summation may differ."""
    source, inflated = pair(kind, seed=seed, dtype=dtype)
    config = config_of(inflated)
    assert config["hidden_size"] == 32 * 4 and config[kept] == number
    assert config["num_hidden_layers"] > 3 and config[grown] > small_size
    assert relative_error(source, inflated) < 1e-4
    assert kind == "dense" or torch.equal(logits_of(source).argmax(-1), logits_of(inflated).argmax(-1))


def test_bf16_arithmetic_agrees_but_for_near_ties(pair: Pair) -> None:
    wanted, got = (logits_of(folder, torch.bfloat16) for folder in pair(dtype=torch.bfloat16))
    assert (wanted.argmax(-1) == got.argmax(-1)).float().mean() > 0.9
    assert (got - wanted).abs().mean() < 0.02 * wanted.std()


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_generation_through_the_kv_cache(kind: str, pair: Pair) -> None:
    prompt = torch.tensor([[5, 7, 11]])
    how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}
    assert torch.equal(*(opened(one).generate(prompt, max_new_tokens=24, **how) for one in pair(kind)))


def without(name: str, attribute: str = "_HIDDEN_WRITERS") -> Mistake:
    """Another treatment of these weights: ballast instead of zeros in what writes into the hidden state, say."""
    return lambda patch: patch.setattr(module, attribute, getattr(module, attribute) - {name})


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


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "embedding": ("dense", without("embed_tokens")),
    "o_proj": ("dense", without("o_proj")),
    "down_proj": ("dense", without("down_proj")),
    "norm": ("dense", unscaled_norm),
    "eps": ("dense", unscaled_eps),
    "heads": ("dense", heads_in_a_row),
    "experts write": ("mixture", without("down_proj")),
    "keys as large as before": ("mixture", without("self_attn.k_proj", "_HEAD_NORMED")),
    "head norm halved": ("mixture", without("self_attn.q_norm", "_HEAD_NORMS")),
    "norms as large as before": ("mixture", unscaled_norm),
}


@pytest.mark.parametrize(("kind", "plant"), MISTAKES.values(), ids=MISTAKES)
def test_planted_mistake_shows(kind: str, plant: Mistake, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epsilon of a mixture is large here, so that keys which meet another one show."""
    plant(monkeypatch)
    assert relative_error(*pair(kind, **({} if kind == "dense" else {"rms_norm_eps": 1.0}))) > 1e-3


def test_padding_is_zero_where_written_and_ballast_where_read(pair: Pair) -> None:
    model = opened(pair()[1])
    num_layers, real = len(model.model.layers), list[int]()
    for index, layer in enumerate(model.model.layers):
        down_DF, output_DH = layer.mlp.down_proj.weight, layer.self_attn.o_proj.weight
        assert bool(down_DF.any()) == bool(output_DH.any())
        real += [index] if down_DF.any() else []
        assert not down_DF[32:].any() and not down_DF[:, 80:].any()
        # 2 kv groups of 8 query heads, the first 2 of them real
        assert not output_DH[32:].any() and not output_DH.unflatten(1, (2, 8 * 16))[:, :, 2 * 16 :].any()
        for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj):
            assert 0.015 < reader.weight[:, 32:].std() < 0.025
    assert real == [num_layers * i // 6 for i in (1, 3, 5)], "real layers are spread evenly"
    assert not model.model.embed_tokens.weight[:, 32:].any()


TRAINED = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 3,
           "head_dim": 32, "vocab_size": 4096, "dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize("target_bytes", [10**8, 10**9, 7 * 10**9 + 13, 140 * 10**9])
def test_plan_hits_the_wish_within_a_layer(target_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = {**SIZES, **TRAINED, "intermediate_size": 512, "model_type": "llama"}
    plan, narrowest = plan_inflation(config, target_bytes), plan_inflation(config, 0)
    assert plan.ffn_size % 64 == 0 and plan.ffn_size >= 512 and plan.num_layers >= 6
    assert plan.layer_bytes < 27_000_000 or plan.ffn_size == narrowest.ffn_size
    assert target_bytes <= plan.total_bytes
    assert plan.total_bytes < max(target_bytes + plan.layer_bytes, narrowest.total_bytes * 1.5)
    assert plan.layer_bytes * plan.num_layers < plan.total_bytes


def test_a_wish_below_the_smallest_keeps_all_real_layers(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    inflated = inflate(source, tmp_path / "big", 1)
    config = config_of(inflated)
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (3, 128)
    assert relative_error(source, inflated) < 1e-4


@torch.no_grad()
def chosen(folder: Path) -> list[Tensor]:
    tokens = torch.randint(0, MOE_SIZES["vocab_size"], (2, 48), generator=torch.Generator().manual_seed(5))
    routers = opened(folder)(input_ids=tokens, output_router_logits=True).router_logits
    return [one.topk(MOE_SIZES["num_experts_per_tok"]).indices.sort(-1).values for one in routers]


def test_real_layers_route_as_before_and_inserted_ones_as_the_nearest(pair: Pair) -> None:
    source, inflated = pair("mixture")
    wanted, got, layers = chosen(source), chosen(inflated), opened(inflated).model.layers
    real = [len(got) * i // 6 for i in (1, 3, 5)]
    assert all(torch.equal(one, got[at]) for one, at in zip(wanted, real, strict=True))
    for index, layer in enumerate(layers):
        nearest = layers[min(real, key=lambda at: abs(at - index))]
        assert layer.mlp.experts.down_proj.any() == (index in real)
        assert torch.equal(layer.mlp.gate.weight[:, :32], nearest.mlp.gate.weight[:, :32])
        assert torch.equal(layer.post_attention_layernorm.weight[:32], nearest.post_attention_layernorm.weight[:32])


def test_an_expert_lies_in_one_run_of_the_wished_size(pair: Pair) -> None:
    _, inflated = pair("mixture", dtype=torch.bfloat16)
    plan = json.loads((inflated / INFLATED).read_text())["plan"]
    assert open_checkpoint(inflated).num_bytes == plan["total_bytes"]
    assert MIXTURE_BYTES <= plan["total_bytes"] < MIXTURE_BYTES + plan["layer_bytes"]
    header = read_header(inflated / "model.safetensors").tensors
    runs = [(key, list(run)) for key, run in groupby(header, lambda name: name.rpartition(".")[0].rpartition(".")[0])]
    experts = {key: [header[name] for name in run] for key, run in runs if ".experts." in key}
    assert len(experts) == len([key for key, _ in runs if ".experts." in key]) == NUM_EXPERTS * plan["num_layers"]
    for entries in experts.values():
        assert all(one.hi == other.lo for one, other in pairwise(entries))
        assert 0.7 * EXPERT_BYTES < entries[-1].hi - entries[0].lo < 1.4 * EXPERT_BYTES


@pytest.mark.parametrize("target_bytes", [300_000_000, 10**9, 3 * 10**9])
def test_plan_of_the_trained_mixture(target_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = {**MOE_SIZES, **TRAINED, "moe_intermediate_size": 160, "num_experts": 32, "model_type": "qwen3_moe"}
    plan = plan_inflation(sizes, target_bytes)
    assert plan.ffn_size % 64 == 0 and plan.ffn_size >= 160 and plan.num_layers >= 6
    assert 1e6 <= 3 * plan.ffn_size * plan.hidden_size * 2 <= 4e6
    assert target_bytes <= plan.total_bytes < target_bytes + plan.layer_bytes


@pytest.mark.parametrize("shard_bytes", [1 << 30, 900_000, 1], ids=["one", "some", "each"])
def test_layers_are_contiguous_runs_in_order(shard_bytes: int, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", shard_bytes)
    source, inflated = pair(dtype=torch.bfloat16)
    plan = json.loads((inflated / INFLATED).read_text())["plan"]
    checkpoint = open_checkpoint(inflated)
    assert checkpoint.num_bytes == plan["total_bytes"]
    assert (len(checkpoint.shards) == 1) == (shard_bytes == 1 << 30)
    if len(checkpoint.shards) > 1:
        index = json.loads((inflated / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == checkpoint.num_bytes
        assert set(index["weight_map"].values()) == {path.name for path in inflated.glob("*.safetensors")}
    groups: list[str] = []
    for path in checkpoint.shards:
        header = read_header(path).tensors
        end = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert end % BLOCK_BYTES == 0
        for name, entry in header.items():  # in the order of the header, which is that of the file
            assert entry.lo == end
            end = entry.hi
            group = name.split(".")[2] if ".layers." in name else "outer"
            groups += [group] if groups[-1:] != [group] else []
        assert end == path.stat().st_size
        assert end < max(shard_bytes, plan["layer_bytes"]) + 10_000
    assert groups == ["outer", *map(str, range(plan["num_layers"]))]
    assert relative_error(source, inflated) < 1e-4


def test_second_call_returns_at_once(small: Callable[..., Path], tmp_path: Path) -> None:
    source, reports = small(), []
    inflated = inflate(source, tmp_path / "deep" / "er" / "big", TARGET_BYTES, lambda *figures: reports.append(figures))
    dones, totals = zip(*reports, strict=True)
    assert list(dones) == sorted(set(dones)) and set(totals) == {dones[-1]} == {open_checkpoint(inflated).num_bytes}
    assert [path.name for path in inflated.parent.iterdir()] == ["big"]
    for name in ("tokenizer.json", "generation_config.json"):
        assert (inflated / name).read_bytes() == (source / name).read_bytes(), "companions come along"
    before = {path: path.stat().st_mtime_ns for path in inflated.iterdir()}
    assert inflate(source, inflated, TARGET_BYTES, progress=lambda *_: pytest.fail("it wrote again")) == inflated
    assert {path: path.stat().st_mtime_ns for path in inflated.iterdir()} == before
    again = inflate(source, tmp_path / "again", TARGET_BYTES)
    assert all((again / path.name).read_bytes() == path.read_bytes() for path in inflated.glob("*.safetensors"))


CHANGES: list[tuple[Callable[[Path], object], int, str]] = [
    (lambda folder: flip(folder / "small" / "model.safetensors", -1, keeps_time=False), 0, "other weights"),
    (lambda folder: (folder / "small" / "tokenizer.json").write_text('{"other": 1}'), 0, "other weights"),
    (lambda folder: os.truncate(folder / "big" / "model.safetensors", 1000), 0, "start again"),
    (lambda _: None, 1, "other sizes"),
]


@pytest.mark.parametrize(("change", "more_bytes", "words"), CHANGES)
def test_another_inflation_is_not_taken_for_this_one(
    change: Callable[[Path], object], more_bytes: int, words: str, pair: Pair, tmp_path: Path
) -> None:
    source, inflated = pair()
    change(tmp_path)
    with pytest.raises(UserError, match=words):
        inflate(source, inflated, TARGET_BYTES + more_bytes)


def test_foreign_folders_and_files_are_refused(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("two years")
    (tmp_path / "file").write_text("also mine")
    for destination in (tmp_path / "foreign", tmp_path / "file", source):
        with pytest.raises(UserError, match="choose another folder"):
            inflate(source, destination, TARGET_BYTES)
    assert (tmp_path / "foreign" / "thesis.tex").read_text() == "two years"
    (tmp_path / "empty").mkdir()
    assert (inflate(source, tmp_path / "empty", TARGET_BYTES) / "config.json").is_file()


def test_interrupted_run_leaves_nothing_and_a_killed_one_nothing_for_long(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes / 2:
            raise KeyboardInterrupt

    source = small()
    with pytest.raises(KeyboardInterrupt):
        inflate(source, tmp_path / "big", TARGET_BYTES, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", lambda _: None)  # a killed process cleans nothing
        inflate(source, tmp_path / "big", TARGET_BYTES, progress=interrupt)
    (leftover,) = (path for path in tmp_path.iterdir() if path != source)
    assert leftover.name.startswith(".") and any(leftover.iterdir())
    (leftover / "stale.safetensors").touch()
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    assert not leftover.exists() and not (inflated / "stale.safetensors").exists()


def test_a_living_run_is_left_alone(small: Callable[..., Path], tmp_path: Path) -> None:
    source, refusals = small(), []

    def second_run(*_: int) -> None:
        with pytest.raises(UserError, match="another process") as refusal:
            inflate(source, tmp_path / "big", TARGET_BYTES)
        refusals.append(refusal)

    inflated = inflate(source, tmp_path / "big", TARGET_BYTES, progress=second_run)
    assert refusals and relative_error(source, inflated) < 1e-4


def test_too_small_a_disk(small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    with pytest.raises(UserError, match=r"needs 1\.\d+ TiB more of disk, .* has 512 MiB: free some"):
        inflate(small(), tmp_path / "big", 2**40 * 5 // 4)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_memory_stays_far_below_a_layer(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak resident size, reset by the kernel before and read after: a whole layer or shard held would show."""
    source = small(dtype=torch.bfloat16)
    inflate(source, tmp_path / "warm", TARGET_BYTES)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak cannot be reset here: {error}")
    before = peak_bytes()
    monkeypatch.setattr(module, "_LAYER_BYTES", 30_000_000)
    inflate(source, tmp_path / "big", 120_000_000)
    assert peak_bytes() - before < 20_000_000


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "Linux reports the peak"
    return int(found[1]) * 1024
