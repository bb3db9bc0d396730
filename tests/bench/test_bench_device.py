"""The bench of the device path, whole, on a device that is the host: a script that is never run fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shell import Outcome, shell

from offload.bench.harness.models import PRETEND
from offload.bench.harness.synthetic import TINY, TINY_DRAFT, open_source, origin, sketch
from offload.bench.harness.tables import PROMISES
from offload.bench.latency import exact
from offload.checkpoint.packaged import PAIR, PROMPT
from offload.engine.load import load
from offload.reports.proof import draw_gaps
from offload.sampling_options import Sampling


def run_tiny(*options: object) -> tuple[int, dict[str, Any], Outcome]:
    """Exit status, the JSON on the last line, and all that was said."""
    outcome = shell("bench", "device", "--device", PRETEND, *options)
    return outcome.code, json.loads(outcome.out.splitlines()[-1]), outcome


def verdicts_of(result: dict[str, Any]) -> dict[str, bool | None]:
    return {promise["promise"]: promise["is_met"] for promise in result["promises"]}


def parts(*names: str) -> list[str]:
    return [word for name in names for word in ("--part", name)]


@pytest.mark.full
def test_every_row_is_measured(tmp_path: Path) -> None:
    code, result, outcome = run_tiny("--rows", tmp_path / "rows.jsonl")
    lines = outcome.out.splitlines()
    assert code == int(False in verdicts_of(result).values()), outcome.err
    rows = {row["row"]: row for row in result["rows"]}
    assert not [row for row in rows.values() if "error" in row]
    stored = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert stored == [{"bench": "device", **row} for row in result["rows"]]
    assert rows["layers"]["plan"]["tiers"]["host"]["num_layers"] > 2, "the sweeps of the bench must stream"
    for start, is_met in {
        "gate: float32 greedy ids equal transformers": True,
        "gate: bf16, none": True,
        "gate: bf16, 64x16": True,
        "not invariant, gate: float32 greedy ids equal transformers": True,
        "not invariant, gate: bf16, 64x16": True,
        "gate: bfloat16, ids of all trees": True,
        "gate: float16, ids of all trees": True,
        "experts, least: float32 ids": True,
        "experts, all: float32 ids": True,
        "copies of": None,
        "loading": None,
        "a pass of 24 rows: enqueued": ...,
        "sweep of 24 rows": ...,
        "not invariant, a pass of 24 rows: enqueued": ...,
        "not invariant, sweep of 24 rows": ...,
        "draft step of 1 rows": ...,  # more where time is left, which a busy machine has none of
        "none:": ...,
        "sequences:4x4": ...,
        "24x8": ...,
        "soak: sweeps": True,
        "soak: device memory": True,
        "page-locked bytes": True,
        "accelerate, CPU offload, one token, as it comes": None,
        "best tree against accelerate, as it comes": ...,
    }.items():
        (row,) = (row for name, row in rows.items() if name.startswith(start))
        assert row["value"] > 0 or "gate: bf16" in start or "memory" in start, start
        assert is_met in (..., row["is_met"]), start
    timed = [
        name for name in rows if "gate" not in name and "experts" not in name and name not in ("loading", "layers")
    ]
    assert timed[0].startswith("a pass of 24 rows: enqueued"), "what decides the most comes first"
    promises = {promise["promise"]: promise for promise in result["promises"]}
    assert promises.keys() == PROMISES.keys() and [promise["is_met"] for promise in promises.values()].count(None) <= 2
    for name, promise in promises.items():
        assert "not measured" not in promise["seen"], f"nothing is measured for {name}"
    assert len(promises["memory"]["seen"].split(";")) == len(promises["soak"]["seen"].split(";")) == 2
    assert len(promises["step"]["seen"].split(";")) == 3, "a draft step, and steps with both kinds of trees"
    said = lines[-1 - len(promises) : -1]
    assert all(any(line.split(" ", 1)[1].strip().startswith(name) for line in said) for name in promises)


def test_a_refusal_at_load_is_missed_by_all_that_hangs_on_it() -> None:
    """A blank would read as if it had not been asked."""
    asked = parts("sweeps", "drafting", "trees", "soak", "memory", "accelerate", "plain")
    code, result, _ = run_tiny(*asked, "--gpu-mem", "900MiB")
    promises = {promise["promise"]: promise for promise in result["promises"]}
    assert code == 1 and promises["exact"]["is_met"] is None
    for name in ("link", "hidden compute", "step", "soak", "memory", "against accelerate"):
        assert promises[name]["is_met"] is False, name
    for name in ("link", "hidden compute", "step", "soak", "memory"):
        assert "needs" in promises[name]["seen"] and "raise `gpu_memory` to" in promises[name]["seen"], name
    code, result, outcome = run_tiny(*asked, "--layers", 3)
    assert code == 2 and "--layers must be" in outcome.err.splitlines()[-1]
    missed = {name for name, is_met in verdicts_of(result).items() if is_met is False}
    assert missed == {*promises} - {"exact", "same bits"}, "refused before anything was loaded"


MISTAKEN: dict[str, Callable[[list[int]], list[int]]] = {
    "another last token": lambda ids: [*ids[:-1], ids[-1] + 1],
    "a token more": lambda ids: [*ids, 5],
}


@pytest.mark.full
@pytest.mark.parametrize("name", MISTAKEN)
def test_nothing_is_timed_after_a_wrong_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_ids = exact.reference_ids

    def other_ids(*args: Any) -> tuple[list[int], list[int]]:
        prompt_ids, ids = reference_ids(*args)
        return prompt_ids, MISTAKEN[name](ids)

    monkeypatch.setattr(exact, "reference_ids", other_ids)
    code, result, outcome = run_tiny()
    assert code == 2 and "not the ids of transformers" in outcome.err.splitlines()[-1]
    assert [row["promise"] for row in result["rows"]] == ["exact"] * 2 and all("error" in row for row in result["rows"])
    assert {name for name, is_met in verdicts_of(result).items() if is_met is not None} == {"exact"}
    assert shell("bench", "gate", "--device", "cpu", "-n", 5).code == 2


def test_a_synthetic_checkpoint_computes_what_the_small_one_does(tmp_path: Path) -> None:
    """Other heads, another vocabulary, a width that is no power of four times the small one."""
    target = sketch(PAIR / "target", tmp_path / "target", TINY)
    draft = sketch(PAIR / "draft", tmp_path / "draft", TINY_DRAFT)
    small = origin(PAIR / "target", tmp_path / "origin", TINY)
    options: dict[str, Any] = {"device": "cpu", "open_source": open_source, "context": 256, "threads": 1}
    with load(target, draft, "2GiB", "16x6", dtype="float32", **options) as decoder:
        ids = decoder.encode(PROMPT, raw=True)
        run = decoder.generate(ids, max_new_tokens=24)
        assert max(draw_gaps(small, ids, run.token_ids, Sampling())) < 1e-3
        assert run.stats.tokens_per_sweep > 1.5, "the draft has lost what it knew"
        drawn = decoder.generate(ids, max_new_tokens=24, temperature=0.6, seed=3, tree="none").token_ids
        assert max(drawn) < 4096, "an id that only the large vocabulary has"
