"""The study of the chosen tree, as small as it gets: the chosen tree stands among others, and all is proved."""

import json
from pathlib import Path

import pytest
from shell import shell

from offload.bench.studies import choice
from offload.tree.topology import DynamicShape
from offload.tuning import tune


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
