"""The studies, as small as they get: the chosen tree stands among others, chains beside formulas; all is proved."""

import json
from pathlib import Path

import pytest
from shell import shell

from offload.bench.studies import chains, choice
from offload.reports import tune
from offload.trees.topology import DynamicShape


@pytest.mark.full
def test_the_chosen_tree_stands_in_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "QUICK", choice.Effort(32, (8, 16), (3,), (1, 1), 1, "16x4"))
    for room in (choice, tune):
        monkeypatch.setattr(room, "NUM_NEW", 32)
    monkeypatch.setattr(choice, "_AHEAD", 12)
    monkeypatch.setattr(tune, "bounds_to_count", lambda max_nodes: (DynamicShape(8, 3),))
    outcome = shell("bench", "choice", "--quick", "--size", "60MB")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    links = {row["link"] for row in result["rows"]}
    assert len(links) == 2 and len(result["guards"]) == 2
    for link in links:
        rows = {row["tree"]: row for row in result["rows"] if row["link"] == link}
        assert [row["over_chosen"] for row in rows.values() if row["is_chosen"]] == [1.0]
        assert rows["1x0"]["tokens_per_sweep"] == 1 and all(row["tokens_per_sweep"] >= 1 for row in rows.values())


@pytest.mark.full
def test_chains_stand_beside_their_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chains, "QUICK", chains.Effort(2, 24, (1, 3), 1))
    outcome = shell("bench", "chains", "--quick", "--size", "60MB")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out.splitlines()[-1])["rows"]
    assert [(row["temperature"], row["gamma"]) for row in rows] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    for row in rows:
        alpha, gamma = row["alpha"]["mean"], row["gamma"]
        assert row["predicted_tokens_per_pass"] == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
        assert row["predicted_gain"] == pytest.approx(row["predicted_tokens_per_pass"] / (gamma * row["c"] + 1))
        assert 1 <= row["tokens_per_pass"] <= gamma + 1 and row["gain"] > 0
