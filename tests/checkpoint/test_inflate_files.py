"""An inflated model as files: layers in order, one folder for one source, whole or not there, little memory.

Why: a bench that reads a half-written folder measures nothing. Invariant: no run leaves a folder that is not whole.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_llama import LAYER_BYTES, TARGET_BYTES, inflate, relative_error

from offload.checkpoint import inflate as module
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.safetensors import INFLATED, open_checkpoint, read_header
from offload.errors import UserError


@pytest.fixture(autouse=True)
def _little_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAYER_BYTES", LAYER_BYTES)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 900_000, 1], ids=["one", "some", "each"])
def test_layers_are_contiguous_runs_in_order(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", shard_bytes)
    source = small(dtype=torch.bfloat16)
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES)
    plan = json.loads((inflated / INFLATED).read_text())["plan"]
    checkpoint = open_checkpoint(inflated)
    assert checkpoint.num_bytes == plan["total_bytes"]
    assert (len(checkpoint.shards) == 1) == (shard_bytes == 1 << 30)
    groups: list[str] = []
    for path in checkpoint.shards:
        header, _ = read_header(path)
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


def test_an_index_lists_every_tensor(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", 900_000)
    inflated = inflate(small(), tmp_path / "big", TARGET_BYTES)
    index = json.loads((inflated / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == open_checkpoint(inflated).num_bytes
    assert set(index["weight_map"].values()) == {path.name for path in inflated.glob("*.safetensors")}


def test_same_call_same_bytes(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    first, again = (inflate(source, tmp_path / name, TARGET_BYTES) / "model.safetensors" for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()


def test_second_call_returns_at_once(small: Callable[..., Path], tmp_path: Path) -> None:
    source, reports = small(), []
    inflated = inflate(source, tmp_path / "big", TARGET_BYTES, progress=lambda *figures: reports.append(figures))
    dones, totals = zip(*reports, strict=True)
    assert list(dones) == sorted(set(dones)) and set(totals) == {dones[-1]} == {open_checkpoint(inflated).num_bytes}
    before = {path: path.stat().st_mtime_ns for path in inflated.iterdir()}
    assert inflate(source, inflated, TARGET_BYTES, progress=lambda *_: pytest.fail("it wrote again")) == inflated
    assert {path: path.stat().st_mtime_ns for path in inflated.iterdir()} == before


def test_companions_come_along(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    inflated = inflate(source, tmp_path / "deep" / "er" / "big", TARGET_BYTES)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (inflated / name).read_bytes() == (source / name).read_bytes()
    assert [path.name for path in inflated.parent.iterdir()] == ["big"]


def change_weights(source: Path) -> None:
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (source / "model.safetensors").write_bytes(data)


def change_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").write_text('{"other": 1}')


@pytest.mark.parametrize("change", [change_weights, change_tokenizer])
def test_another_source_is_not_taken_for_this_one(
    small: Callable[..., Path], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    source = small()
    inflate(source, tmp_path / "big", TARGET_BYTES)
    change(source)
    with pytest.raises(UserError, match="other weights"):
        inflate(source, tmp_path / "big", TARGET_BYTES)


def test_other_sizes_are_not_taken_for_these(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    inflate(source, tmp_path / "big", TARGET_BYTES)
    with pytest.raises(UserError, match="other sizes"):
        inflate(source, tmp_path / "big", TARGET_BYTES + 1)


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


def test_a_damaged_inflation_is_reported(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    os.truncate(inflate(source, tmp_path / "big", TARGET_BYTES) / "model.safetensors", 1000)
    with pytest.raises(UserError, match="start again"):
        inflate(source, tmp_path / "big", TARGET_BYTES)


def test_interrupted_run_leaves_nothing(small: Callable[..., Path], tmp_path: Path) -> None:
    def interrupt(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes / 2:
            raise KeyboardInterrupt

    source = small()
    with pytest.raises(KeyboardInterrupt):
        inflate(source, tmp_path / "big", TARGET_BYTES, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_leftovers_of_a_killed_run_are_removed(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    source = small()
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
    with pytest.raises(UserError, match=r"needs 1\.\d+ TiB of disk, .* has 512 MiB: free some"):
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
