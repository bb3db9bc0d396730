"""The inflated model is the small one: same logits, same routing, real bytes; whole or not there, in little memory.

Why: every bench figure on a big target rests on it. Invariant: each planted mistake below breaks the equality.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import LAYER_BYTES, SIZES, TARGET_BYTES, inflate, logits_of, relative_error, save_small
from small_moe import EXPERT_BYTES, NUM_EXPERTS, save_small_moe
from transformers import AutoModelForCausalLM

from offload.checkpoint import packaged as module
from offload.checkpoint.files import INFLATED
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import plan_inflation
from offload.checkpoint.safetensors import read_header
from offload.errors import UserError

MIXTURE_BYTES = 8_000_000


@pytest.fixture(autouse=True)
def _little_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAYER_BYTES", LAYER_BYTES)
    monkeypatch.setattr(module, "_EXPERT_BYTES", EXPERT_BYTES)


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:

    def write(kind: str = "dense", **options: Any) -> tuple[Path, Path]:
        save, num_bytes = (save_small, TARGET_BYTES) if kind == "dense" else (save_small_moe, MIXTURE_BYTES)
        source = save(tmp_path / "small", **options)
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


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_generation_through_the_kv_cache(kind: str, pair: Pair) -> None:
    prompt = torch.tensor([[5, 7, 11]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}
    assert torch.equal(*(opened(folder).generate(prompt, max_new_tokens=24, **options) for folder in pair(kind)))


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


def test_a_target_of_an_earlier_pair_is_made_again(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in the cache: elsewhere a folder is its owner's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = [small(), save_small(tmp_path / "other", seed=1)]
    for source in sources:
        made = module.inflated_target(TARGET_BYTES, lambda *_: None, source)
        assert relative_error(source, made) < 1e-4
    with pytest.raises(UserError, match="was inflated from other weights"):
        inflate(sources[0], made, TARGET_BYTES)


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
