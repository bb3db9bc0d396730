"""A soak: what drifts is seen and what wavers is not, wrong texts are refused, and a short one from end to end."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from shell import shell

from offload.bench.harness import command
from offload.bench.soak import soak
from offload.bench.soak.soak import Sample, drift, speed_kept

MIB = 1 << 20


def looks(num: int = 60, *, leak: float = 0.0, start: float = 0.0, **options: Any) -> list[Sample]:
    """A process of 500 MiB that wavers by 5, grows by `leak` MiB a look, and by `start` at first."""
    return [
        sample._replace(**{name: kind(n) for name, kind in options.items()})
        for n in range(num)
        for mib in [500 + 5 * math.sin(n) + leak * n - start * math.exp(-n)]
        for sample in [Sample(60.0 * n, int(MIB * mib), 9, 4, 0, 30.0 * n, 100 * n)]
    ]


def test_a_leak_is_told_from_what_wavers_and_from_what_is_filled_once() -> None:
    assert abs(drift(looks())) < 0.005
    assert abs(drift(looks(start=200))) < 0.005
    assert drift(looks(leak=0.5)) == pytest.approx(0.5 * 50 / 530, rel=0.2)
    assert drift(looks(leak=-0.5)) < -0.03


def test_a_process_that_becomes_slower_is_seen() -> None:
    assert speed_kept(looks()) == pytest.approx(1)
    assert speed_kept(looks(cpu_s=lambda n: 30.0 * n * (1 + n / 60))) < 0.8
    assert speed_kept(looks(time_s=lambda n: 60.0 * n**1.1)) == pytest.approx(1), "neighbours have the cores"


@pytest.mark.full
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(soak, "_LEAST_PERIOD_S", 2.0)
    monkeypatch.setattr(soak, "_LEAST_LOOKS", 3)
    monkeypatch.setattr(command, "CEILING_BYTES", 20_000_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcome = shell("bench", "soak", "--hours", "0.001", "--size", "100MB", "--rows", tmp_path / "rows")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    names = [row["process"] for row in result["rows"]]
    assert names == ["server", "server 2", "server 3"], "restarts"
    assert result["settings"]["proof"]["num_exact"] > 0 and "gate: " in outcome.out
    num_looks = sum(row["num_looks"] for row in result["rows"])
    assert len((tmp_path / "rows").read_text().splitlines()) == num_looks + len(result["rows"])
