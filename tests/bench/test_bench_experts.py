"""Experts on demand beside whole layers, as small as they get: what is promised, and that a wrong text stops it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from shell import Outcome, shell
from small_moe import save_small_moe

from offload.bench.harness import command
from offload.bench.latency import experts
from offload.bench.latency.experts import AUTO
from offload.bench.peers import peers
from offload.bench.peers.child import Order, follow
from offload.checkpoint.packaged import PAIR


def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, spoilt: str = "") -> Outcome:
    """The command in this process, on a random mixture; what the way `spoilt` writes is changed."""
    folder = save_small_moe(tmp_path / "moe", vocab_size=4096, max_position_embeddings=512)
    shutil.copy(PAIR / "target/tokenizer.json", folder)

    def here(_: str, order: Order) -> peers.Outcome:
        figures: dict[str, Any] = follow(order)
        if order.options["experts"] == spoilt:
            runs = figures["runs"]
            figures["runs"] = [run._replace(bursts=[(at, [7] * len(ids)) for at, ids in run.bursts]) for run in runs]
        return peers.with_runs(figures)

    monkeypatch.setattr(command, "CEILING_BYTES", 1_000_000)
    monkeypatch.setattr(experts, "run_child", here)
    monkeypatch.setattr(experts, "QUICK", command.Effort(1, 6, limit_s=60.0))
    monkeypatch.setattr(experts, "TREES", {"demand": ("none", "4x2"), "layers": ("none",), AUTO: ()})
    monkeypatch.setattr(experts, "LARGEST", "4x2")
    return shell("bench", "experts", "--quick", "-m", folder, "-d", PAIR / "draft", "--room", "30")


@pytest.mark.full
def test_both_ways_write_the_same_with_every_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compared(tmp_path, monkeypatch)
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    got = {(row["experts"], row["tree"]): row for row in result["rows"]}
    ways = {("demand", "none"), ("demand", "4x2"), ("demand", AUTO), ("layers", "none"), ("layers", AUTO), (AUTO, AUTO)}
    assert set(got) == ways
    assert all(row["tokens_per_s"] > 0 and row["tokens_per_pass"] >= 1 for row in got.values())
    assert got["demand", "none"]["tokens_per_pass"] == 1 and len(result["guards"]) == 3
    assert result["settings"]["proof"]["num_exact"] > 0


@pytest.mark.full
def test_no_speed_for_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compared(tmp_path, monkeypatch, spoilt="layers")
    assert outcome.code != 0 and "tokens/s" not in outcome.out
    assert "no speed is worth printing" in outcome.err, outcome.err
