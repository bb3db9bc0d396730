"""The bench of a copy: ratios are of the best on both sides, every case has a row, and what it writes is proved."""

import json
from pathlib import Path

import pytest
from shell import shell

from offload.bench.latency import copy
from offload.bench.latency.copy import STUDIES, Wanted

ROWS = [
    {"place": "here", "temperature": 0.0, "case": case, "token_s": seconds, "tokens": tokens}
    for case, seconds, tokens in (("a", 4.0, 2.0), ("b", 3.0, 9.0), ("c", 5.0, 3.0), ("d", 10.0, 6.0))
]


def test_the_best_of_some_cases_stands_over_the_best_of_others() -> None:
    runs = [{**row, "token_s": row["token_s"] * factor} for row in ROWS for factor in (1.0, 2.0)]
    (verdict,) = Wanted("s a token", "token_s", ["a", "b"], ["c", "d"], 0.5).checks(ROWS, runs)
    assert verdict["name"] == "s a token, here, T = 0" and verdict["notes"] == ["b / c"] and not verdict["is_met"]
    assert verdict["value"] == pytest.approx(0.6) and verdict["samples"] == pytest.approx([0.6, 0.6])
    planned = [{**row, "predicted_s": 1.0 if row["case"] == "c" else 2.0} for row in ROWS]
    names = ["a", "b", "c"]
    (verdict,) = Wanted("planned", "token_s", names, names, 1.07, chosen_by="predicted_s").checks(planned, runs)
    assert verdict["notes"] == ["c / b"] and verdict["value"] == pytest.approx(5 / 3) and not verdict["is_met"]
    (verdict,) = Wanted("tokens", "tokens", ["a", "b"], ["c", "d"], 1.4, "higher").checks(ROWS, runs)
    assert verdict["notes"] == ["b / d"] and verdict["value"] == pytest.approx(1.5) and verdict["is_met"]


def test_every_ratio_is_of_cases_that_are_measured() -> None:
    for study in STUDIES.values():
        names = [case.name for case in study.cases]
        assert len(set(names)) == len(names)
        assert all({*wanted.ours, *wanted.others} <= {*names} for wanted in study.wanted)


@pytest.mark.full
def test_every_case_has_a_row_and_its_text_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(copy, "_WRITE_BYTES", 8 << 20)
    only = ["--only", "tiers", "--only", "token", "--only", "packing", "--place", "free link", "--temp", "0.7"]
    outcome = shell("bench", "copy", "--quick", "--size", "100MB", "--ram", "500MB", "-n", "4", *only)
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    rows = {(row["study"], row["case"]): row for row in result["rows"]}
    wanted = {(name, case.name) for name in ("tiers", "token") for case in STUDIES[name].cases}
    assert rows.keys() == wanted | {("packing", "packed"), ("packing", "beside")}
    assert rows["tiers", "and small"]["copy_passes"] < rows["tiers", "copy alone"]["copy_passes"]
    assert rows["packing", "beside"]["bytes_per_s"] > 0
    assert result["settings"]["proof"]["num_exact"] > 0 and "gate: " in outcome.out
    assert sum("passes of the copy" in name for name in result["guards"]) == 1
