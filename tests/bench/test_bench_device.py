"""The bench of the device path, whole, on a device that is the host: a script nobody runs is a script that fails."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import Outcome, shell

from offload.bench import device as bench
from offload.bench import device_gate, peers_on_device
from offload.bench.gate import WrongTokenError
from offload.bench.promises import PROMISES
from offload.bench.timeline import LANES, read_trace
from offload.config import Sampling


def run_tiny(*options: object) -> tuple[int, dict[str, Any], Outcome]:
    """Exit status, the JSON on the last line, and all that was said."""
    outcome = shell("bench", "device", "--tiny", *options)
    return outcome.code, json.loads(outcome.out.splitlines()[-1]), outcome


def verdicts_of(result: dict[str, Any]) -> dict[str, bool | None]:
    return {one["promise"]: one["is_met"] for one in result["promises"]}


def test_every_row_is_measured(tmp_path: Path) -> None:
    trace = tmp_path / "steps.json" if find_spec("matplotlib") else None
    code, result, outcome = run_tiny(*(("--trace", trace) if trace else ()))
    lines = outcome.out.splitlines()
    assert code == int(False in verdicts_of(result).values()), outcome.err
    rows = {row["row"]: row for row in result["rows"]}
    assert not [row for row in rows.values() if "error" in row]
    assert rows["layers"]["plan"]["tiers"]["host"]["num_layers"] > 2, "the sweeps of the bench must stream"
    for start, is_met in {
        "gate: float32 greedy ids equal transformers": True,
        "gate: bf16, none": True,
        "gate: bf16, 64x16": True,
        "copies of": None,
        "loading": None,
        "sweep of 24 rows": ...,
        "draft step of 1 rows": ...,  # more where time is left, which a busy machine has none of
        "none:": ...,
        "sequences:4x4": ...,
        "24x8": ...,
        "soak: sweeps": True,
        "soak: device memory": True,
        "page-locked bytes": True,
        "accelerate, CPU offload, one token, as it comes": None,
        "accelerate, CPU offload, one token, weights page-locked": None,
        "best tree against accelerate, as it comes": ...,
    }.items():
        (row,) = (row for name, row in rows.items() if name.startswith(start))
        assert row["value"] > 0 or "gate: bf16" in start or "memory" in start, start
        assert is_met in (..., row["is_met"]), start
    if trace is not None:
        assert {event.kind for event in read_trace(trace)} == {"sweep", *LANES}
        assert {event.layer for event in read_trace(trace) if event.kind == "compute"} == set(range(8))
    promises = {one["promise"]: one for one in result["promises"]}
    assert promises.keys() == PROMISES.keys() and [one["is_met"] for one in promises.values()].count(None) <= 1
    assert all("not measured" not in one["seen"] for one in promises.values()), "a promise that nothing is measured for"
    assert len(promises["memory"]["seen"].split(";")) == len(promises["soak"]["seen"].split(";")) == 2
    assert len(promises["step"]["seen"].split(";")) == 2, "a step with the chosen tree, and a draft step"
    assert all(any(line.split(" ", 1)[1].strip().startswith(name) for line in lines[-8:-1]) for name in promises)


def broken(*_: object) -> list[dict[str, object]]:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_breaks_costs_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's minutes are few: a result comes out of them whatever happens."""
    monkeypatch.setattr(bench, "drafting", broken)
    monkeypatch.setattr(bench, "soak", broken)
    for slow in ("gates", "against_accelerate", "trees"):
        monkeypatch.setattr(bench, slow, lambda *_: iter(()))
    code, result, _ = run_tiny()
    promises = {one["promise"]: one for one in result["promises"]}
    assert code == 1, "a promise was missed"
    assert promises["soak"]["is_met"] is False and "out of memory" in promises["soak"]["seen"]
    assert promises["step"]["is_met"] is False and promises["memory"]["is_met"] is True
    assert promises["exact"]["is_met"] is None and promises["exact"]["seen"] == "not measured"
    assert promises["link"]["is_met"] is not None


MISTAKEN: dict[str, Callable[[list[int]], list[int]]] = {
    "another last token": lambda ids: [*ids[:-1], ids[-1] + 1],
    "a token more": lambda ids: [*ids, 5],
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_nothing_is_timed_after_a_wrong_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_ids = device_gate.reference_ids

    def other_ids(*args: Any) -> tuple[list[int], list[int]]:
        prompt_ids, ids = reference_ids(*args)
        return prompt_ids, MISTAKEN[name](ids)

    monkeypatch.setattr(device_gate, "reference_ids", other_ids)
    code, result, outcome = run_tiny()
    assert code == 2 and "not the ids of transformers" in outcome.err.splitlines()[-1]
    assert [row["promise"] for row in result["rows"]] == ["exact"] and "error" in result["rows"][0]
    assert {name for name, is_met in verdicts_of(result).items() if is_met is not None} == {"exact"}


@pytest.mark.parametrize(("wrong", "errors"), [(1, [0, 1, 0]), (2, [0, 0, 1, 1])], ids=["a tree", "the last tree"])
def test_a_tree_with_a_wrong_token_has_no_figures(
    wrong: int, errors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gaps(model: Path, prompt_ids: list[int], new_ids: list[int], sampling: Sampling) -> list[float]:
        asked.append(new_ids)
        return [0.0, 3.0] if len(asked) == wrong + 1 else [0.0]

    asked: list[list[int]] = []
    monkeypatch.setattr(bench, "draw_gaps", gaps)
    for slow in ("gates", "against_accelerate", "soak", "drafting", "sweeps"):
        monkeypatch.setattr(bench, slow, lambda *_: iter(()))
    code, result, outcome = run_tiny()
    told = [row for row in result["rows"] if row["row"].startswith(("none", "sequences", "24x8"))]
    assert [int("error" in row) for row in told] == errors
    assert all(("s_per_token" in row) != ("error" in row) for row in told)
    assert "token 1 is wrong" in told[wrong]["error"] and not told[wrong]["is_met"]
    found = verdicts_of(result)
    assert found["exact"] is False and (wrong == 1 or found["step"] is False)
    assert code == 2 and "tokens are wrong" in outcome.err.splitlines()[-1]


def test_pages_that_can_be_unlocked_are_not_copied_for_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(bench.PlainWay, "name", "registered")
    monkeypatch.setattr(bench.PlainWay, "free", lambda self, array: freed.append(len(array)))
    monkeypatch.setattr(peers_on_device, "allocate", None)
    for slow in ("gates", "trees", "soak", "drafting", "sweeps"):
        monkeypatch.setattr(bench, slow, lambda *_: iter(()))
    rows = run_tiny()[1]["rows"]
    assert [row["value"] > 0 for row in rows if row["row"].startswith("accelerate")] == [True, True], rows[-2:]
    assert len(freed) > 2


def test_the_place_where_bf16_parts_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding excuses a gap below its own size and no other."""
    wanted = [5, 6, 7, 8]
    monkeypatch.setattr(device_gate, "reference_ids", lambda *_: ([1], wanted))
    monkeypatch.setattr(device_gate, "_next_logits", lambda model, ids, place: asked.append(ids) or logits)
    monkeypatch.setattr(device_gate, "streamed_ids", lambda *_: [("none", wanted), ("64x16", [5, 6, 9, 8])])
    asked: list[list[int]] = []
    for gap, is_met in ((0.1, True), (0.4, False)):
        logits = torch.zeros(10)
        logits[7] = gap
        same, parted = device_gate._in_bf16(None, Path(), "", torch.device("cpu"), 4)  # type: ignore[arg-type]
        assert same["value"] == 0 and same["parts_at"] is None and same["is_met"]
        assert parted["value"] == pytest.approx(gap) and parted["parts_at"] == 2 and parted["is_met"] is is_met
    assert asked == [[1, 5, 6]] * 2
    monkeypatch.setattr(device_gate, "streamed_ids", lambda *_: [("none", wanted[:3])])
    with pytest.raises(WrongTokenError, match="3 of 4 tokens"):
        list(device_gate._in_bf16(None, Path(), "", torch.device("cpu"), 4))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_a_card_it_says_so() -> None:
    outcome = shell("bench", "device", "--quick")
    assert outcome.code == 2 and not outcome.out
    assert outcome.err.count("\n") == 1 and "needs a CUDA device" in outcome.err
