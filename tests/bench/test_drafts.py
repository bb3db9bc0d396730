"""The bench of drafts: each way has a row in each place, and what auto took is one of them."""

import json
from pathlib import Path

import pytest

from offload.bench.harness.command import Effort
from offload.bench.latency import drafts


@pytest.mark.full
def test_every_way_has_a_row_and_auto_takes_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(drafts, "QUICK", Effort(rounds=1, num_tokens=10, limit_s=0.5))
    monkeypatch.setattr(drafts, "PLACES", drafts.PLACES[1:])
    drafts.main(quick=True, source=None, json_file=tmp_path / "found.json", size="60MB", ram="400MB", temperature=0.7)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    places = [place.name for place in drafts.PLACES]
    assert [(row["place"], row["way"]) for row in rows] == [(place, way) for place in places for way in drafts.WAYS]
    for place in places:
        assert sum(row["is_chosen"] for row in rows if row["place"] == place) == 1
        assert min(row["of_best"] for row in rows if row["place"] == place) == 1
