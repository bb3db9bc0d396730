"""Many ranks on the bench: figures of counts that are made up, and one run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shell import shell

from offload.bench.harness import cluster, command
from offload.bench.harness.cluster import Answer, Order
from offload.bench.harness.metrics import Burst
from offload.bench.latency import ranks
from offload.distributed.pipeline_decoder import RemoteTarget
from offload.errors import UserError
from offload.stats import RankFigures

LIMIT = 1000.0  # bytes per second


def figures(num_passes: int, *, read_bytes: int | None = None, sent: int | None = None) -> RankFigures:
    """A rank streams 500 bytes in a pass of 4 rows and sends 10 for each, whatever else it sends."""
    num_rows = 4 * num_passes
    bytes_sent = {"gather": 10 * num_rows if sent is None else sent, "WORD": 99}
    read = 500 * num_passes if read_bytes is None else read_bytes
    return RankFigures(1000, 500, 1400, num_passes, num_rows, 500, read, 0.1 * num_passes, 10, bytes_sent,
                       0.2 * num_passes)  # fmt: skip


def text(num_ranks: int, last: RankFigures, tree: str = "none", step_s: float = 0.5) -> Answer:
    """Two passes after the prompt's."""
    moments = [[figures(at)] * num_ranks for at in (3, 4)] + [[last] * num_ranks]
    bursts = [Burst(1.0, 1), Burst(1.0 + step_s, 2), Burst(1.0 + 2 * step_s, 2)]
    stats = {"tpot_s": step_s / 2, "tokens_per_sweep": 2.0}
    return Answer(Order([1], 5, tree), [7] * 5, bursts, stats, moments)


def test_a_pass_stands_beside_its_link_one_rank_and_the_plan() -> None:
    alone = text(1, figures(6), step_s=1.0)
    row = ranks.row_of(2, [text(2, figures(6))], LIMIT, [alone])
    assert (row["pass_s"], row["link_s"], row["ratio"]) == (0.5, 0.5, 0.5)
    assert row["exchange_s"] == pytest.approx(0.2) and row["compute_s"] == pytest.approx(0.5 - 0.3)
    assert row["tokens_per_s"] == pytest.approx(4.0) and row["ttft_s"] == 1.0
    rank = row["ranks"][1]
    assert rank["bytes_read"] == rank["planned_read_bytes"] == 3 * 500
    assert rank["exchanged_bytes"] == rank["planned_exchanged_bytes"] == 3 * 4 * 10 and rank["rows_per_pass"] == 4
    assert all(one["is_met"] for one in ranks.checks([row]))


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (figures(6, read_bytes=3001), "bytes read"),
        (figures(6, sent=239), "bytes exchanged"),
        (figures(6)._replace(peak_rss_bytes=1501), "peak RSS"),
    ],
)
def test_what_is_off_its_plan_is_missed(last: RankFigures, what: str) -> None:
    missed = [one["name"] for one in ranks.checks([ranks.row_of(2, [text(2, last)], LIMIT)]) if not one["is_met"]]
    assert len(missed) == 1 and missed[0].startswith(what)


def test_links_that_the_disk_could_not_have_are_refused() -> None:
    ranks.require_slower(1e8, 6e8, 3)
    with pytest.raises(UserError, match="--link-limit must be 100MB or less on this disk, got 101MB"):
        ranks.require_slower(1.01e8, 6e8, 3)


def test_ways_of_a_pipeline_are_compared_text_by_text() -> None:
    def row(way: str, step_s: float) -> dict[str, Any]:
        bursts = [Burst(1.0, 1), Burst(1.0 + step_s, 1)]
        events = [(0.0, "begun", -1, 0), (0.1, "issued", 0, 4), (0.2, "cancelled", 0, 0), (0.3, "dead", 0, 0)]
        answer = Answer(Order([1], 2), [7, 7], bursts, {"runs": events}, [])
        return ranks.staged_row(way, [answer] * 2, [1 << 20])

    rows = [row("plain", 0.6), row("sync", 0.375), row("async", 0.3), row("async,no-cancel", 0.2)]
    assert rows[0]["tokens_per_s"] == pytest.approx(1 / 0.6) and rows[0]["num_cancelled"] == rows[0]["num_dead"] == 2
    verdicts = {one["name"]: (one["value"], one["is_met"]) for one in ranks.staged_checks(rows)}
    assert verdicts["tokens_per_s, async / sync"] == (pytest.approx(1.25), True)
    assert verdicts["tokens_per_s, async,no-cancel / async"] == (pytest.approx(1.5), False)
    assert ranks._held(rows[0]["peak_rss_bytes"]) == "1 MiB"


def test_a_head_tells_figures_without_a_target_of_its_own() -> None:
    plan = SimpleNamespace(ram_bytes=8, streamed_bytes=7)
    decoder: Any = SimpleNamespace(plan=plan, target=RemoteTarget(9))
    (found,) = cluster._figures(decoder, 5, 3)
    assert (found.num_passes, found.bytes_streamed, found.stall_s) == (3, 0, 0.0)


@pytest.mark.full
def test_two_ranks_write_and_move_what_they_should(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "CEILING_BYTES", 20_000_000)
    monkeypatch.setattr(ranks, "QUICK", command.Effort(1, 6, 3, trees=("none", "dynamic:8x4")))
    monkeypatch.setattr(ranks, "SIZES", (2,))
    monkeypatch.setattr(ranks, "_DISK_MARGIN", 0.1)
    outcome = shell("bench", "ranks", "--quick", "--size", "60MB", "--link-limit", "400MB", "--json", tmp_path / "r")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out.splitlines()[-1])
    assert found == json.loads((tmp_path / "r").read_text()) and "gate: " in outcome.out
    assert [(row["num_ranks"], row["tree"]) for row in found["rows"]] == [(2, "none"), (2, "dynamic:8x4")]
    for rank in (rank for row in found["rows"] for rank in row["ranks"]):
        assert rank["bytes_read"] == rank["planned_read_bytes"] > 0
        assert rank["exchanged_bytes"] == rank["planned_exchanged_bytes"]
