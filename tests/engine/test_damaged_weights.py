"""Weights that are infinite, or change while they are opened: text that may be wrong is never written."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import matrix
from reciting import CONTEXT, streaming_ram
from safetensors.torch import load_file, save_file

import offload
from offload.rules import RULES
from offload.streaming.disk import DiskReader

PROMPT, LENGTH = [7, 11, 3, 42, 5], 24
WARM = {"temperature": 0.8, "seed": 3}
DRAWS = {"greedy": {}, "warm": WARM, "filtered": {**WARM, "top_k": 20, "top_p": 0.9}}
Pair = tuple[Path, Path]


def load(pair: Pair, rule: str) -> offload.Decoder:
    return offload.load(*pair, "1GiB", "16x4", rule, context=64, dtype="float32", threads=1, profile="none")


def damaged(model: Path, to: Path, tensor: str, index: int | tuple[int, int]) -> Path:
    """A copy with one weight infinite."""
    shutil.copytree(model, to)
    shard = next(path for path in to.glob("*.safetensors") if tensor in load_file(path))
    weights = load_file(shard)
    weights[tensor][index] = torch.inf
    save_file(weights, shard, {"format": "pt"})
    return to


DAMAGES: dict[str, Callable[[Path, Path], Path]] = {
    "norm": lambda model, to: damaged(model, to, "model.norm.weight", 3),
    "head": lambda model, to: damaged(model, to, "lm_head.weight", (5, 3)),
    "layer": lambda model, to: damaged(model, to, "model.layers.1.mlp.down_proj.weight", (5, 3)),
}


@pytest.mark.parametrize("where", DAMAGES)
@matrix("rule", RULES, always=["match"], daily=1)
def test_a_damaged_target_is_refused(rule: str, where: str, pair: Pair, tmp_path: Path) -> None:
    with load((DAMAGES[where](pair[0], tmp_path / "damaged"), pair[1]), rule) as decoder:
        for draw in DRAWS.values():
            for tree in ("none", "16x4"):
                with pytest.raises(offload.UserError, match="scores are not finite numbers"):
                    decoder.generate(PROMPT, max_new_tokens=LENGTH, tree=tree, **draw)


@pytest.mark.parametrize("where", DAMAGES)
@matrix("rule", RULES, always=["match"], daily=1)
def test_a_damaged_draft_changes_no_text(rule: str, where: str, pair: Pair, tmp_path: Path) -> None:
    """Rules that need the draft's distribution refuse one that is none."""
    with load((pair[0], DAMAGES[where](pair[1], tmp_path / "damaged")), rule) as decoder:
        for draw in DRAWS.values():
            wanted = decoder.generate(PROMPT, max_new_tokens=LENGTH, tree="none", **draw).token_ids
            try:
                ids = decoder.generate(PROMPT, max_new_tokens=LENGTH, **draw).token_ids
            except offload.UserError as error:
                assert "scores are not finite numbers" in str(error) and rule not in ("match", "topk")
            else:
                assert ids == wanted


def cut(shard: Path) -> None:
    os.truncate(shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little"))  # the header is still there


def replace(shard: Path) -> None:
    """By a file of the same size and time; on this file system its number tells."""
    old, other = shard.stat(), shard.with_name("other")
    other.write_bytes(bytes(old.st_size))
    os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
    other.replace(shard)


def write_over(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.write(bytes(file.seek(0, os.SEEK_END)))
    os.utime(shard, ns=(0, 0))


def append(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [cut, replace, write_over, append])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_a_shard_that_changes_before_it_is_opened_is_refused(
    whose: str, change: Callable[[Path], None], sound: Path, tmp_path: Path
) -> None:
    models = {name: Path(shutil.copytree(sound, tmp_path / name)) for name in ("target", "draft")}
    changed = sorted(models[whose].glob("*.safetensors"))[-1]

    def open_source(shards: Sequence[Path], **options: Any) -> DiskReader:
        if changed in shards:
            change(changed)
        return DiskReader(shards, **options)

    num_open, ram = len(os.listdir("/proc/self/fd")), streaming_ram(sound)
    with pytest.raises(offload.ReadError, match=f"{changed.name} changed since the model was opened: load the model"):
        offload.load(*models.values(), ram, "4x2", context=CONTEXT, threads=1, open_source=open_source)
    assert len(os.listdir("/proc/self/fd")) == num_open
