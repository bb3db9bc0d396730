"""The commands of `offload bench`, as small as they get: what they end in, and that wrong tokens stop them."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shell import Outcome, process, shell

from offload.bench import suite
from offload.bench.harness import command as commands
from offload.bench.harness import compare, setting
from offload.bench.harness.record import read
from offload.bench.harness.timeline import read_trace
from offload.bench.latency import decode, link, passes, prediction
from offload.errors import UserError
from offload.stats import Stats
from offload.streaming.layers import Layers

SIZE = ["--size", "100MB"]
RAM = ["--ram", "230MB"]
FEW = ["--num-prompts", "1", "-n", "12", "--tree", "8x4"]


LISTS_IMPORTS = """
import sys
from offload.cli.main import main
try:
    main()
finally:
    print("heavy:", {"torch", "matplotlib", "numpy"} & sys.modules.keys())
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One small target for all, and little effort."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for module in (setting, commands):
            patch.setattr(module, "CEILING_BYTES", 20_000_000)
        patch.setattr(link, "QUICK", link.Effort(20_000_000, 2, (2,), (1,)))
        patch.setattr(passes, "QUICK", passes.Effort((1, 8), 2, 1, 0.2))
        yield


def result_of(outcome: Outcome, bench: str) -> dict[str, Any]:
    """The last line; the ceiling is the first."""
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("ceiling: ") and "gate: " in outcome.out
    result = json.loads(outcome.out.splitlines()[-1])
    assert result["bench"] == bench and result["rows"] and result["ceiling"]["bytes_per_s"] > 0
    return result


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored result of `decode`, with its trace beside it."""
    folder = tmp_path_factory.mktemp("decoded")
    files = ["--json", folder / "decode.json", "--trace", folder / "trace.json"]
    result = result_of(shell("bench", "decode", "--quick", *SIZE, *RAM, *FEW, *files), "decode")
    assert read(folder / "decode.json").as_dict() == result
    return folder


def test_decode_tells_what_every_case_took(decoded: Path) -> None:
    rows = {row["name"]: row for row in read(decoded / "decode.json").rows}
    assert list(rows) == ["none", "T=0 match 8x4", "T=0.6 match 8x4"]
    for name, row in rows.items():
        later = sum(count for run in row["runs"] for _, count in run["bursts"][1:])
        assert row["tokens_per_sweep"] == pytest.approx(later / row["num_sweeps"])
        assert row["num_accepted_tokens"] == later - row["num_sweeps"] <= row["num_draft_tokens"]
        assert row["mean_ttft_s"] > 0 and row["p99_itl_s"] >= row["median_itl_s"] and row["peak_rss_bytes"] > 1e8
        assert ("speedup" in row) == ("none" not in name)
    assert rows["none"]["tokens_per_sweep"] == 1 and rows["none"]["accepted_per_pos"] == []
    assert len(rows["T=0 match 8x4"]["accepted_per_pos"]) == 4


def test_trace_has_every_layer_of_every_step(decoded: Path) -> None:
    events = read_trace(decoded / "trace.json")
    kinds = {kind: [event for event in events if event.kind == kind] for kind in ("draft", "sweep", "compute", "copy")}
    num_layers = 1 + max(event.layer for event in kinds["compute"])
    assert len(kinds["draft"]) == len(kinds["sweep"]) == 3
    assert [event.layer for event in kinds["compute"]] == [*range(num_layers)] * 3
    assert {event.layer for event in kinds["copy"]} <= set(range(num_layers)) and len(kinds["copy"]) >= 3
    for one in kinds["compute"]:
        assert any(sweep.start_s <= one.start_s <= one.end_s <= sweep.end_s for sweep in kinds["sweep"])
    assert "<svg" in (decoded / "trace.svg").read_text(encoding="utf-8")


def test_decode_with_rules_that_draw_afresh() -> None:
    rules = ["--rule", "match", "--rule", "sequoia", "--temp", "0.6"]
    result = result_of(shell("bench", "decode", "--quick", *SIZE, *RAM, *FEW, *rules), "decode")
    assert [row["name"] for row in result["rows"]][1:] == ["T=0.6 match 8x4", "T=0.6 sequoia 8x4"]
    assert result["settings"]["proof"]["num_by_law"] == 12


def test_on_a_device_decoding_stands_beside_copies_to_it(decoded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stands in for the device, and the layers are made in memory."""
    monkeypatch.setattr(setting, "plain_rate", None)
    command = ["bench", "decode", "--quick", "--layers", "8", "--device", "pretend", *FEW, "--temp", "0"]
    outcome = shell(*command)
    result = result_of(outcome, "decode")
    assert outcome.out.startswith("ceiling: layers to pretend, ")
    assert (result["settings"]["device"], result["settings"]["target"]) == ("pretend", "target")
    assert all(row["link_utilisation"] > 0 for row in result["rows"])
    with pytest.raises(UserError, match="device was cpu and is cuda:0"):
        compare.require_same(read(decoded / "decode.json"), "decode", {"device": "cuda:0"})


def test_rules_that_keep_distributions_take_the_static_tree() -> None:
    effort = decode.Effort(1, 1, 1, (0.6,), ("none", "8x4", "grown:8x4"), ("match", "sequoia"))
    names = ["none", "T=0.6 match 8x4", "T=0.6 match grown:8x4", "T=0.6 sequoia 8x4"]
    assert [case.name for case in effort.cases()] == names
    assert decode._largest(decode.FULL.cases()) == "128x20"


def test_no_speed_is_printed_for_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.timed_run

    def wrong(*arguments: Any, **options: Any) -> Any:
        bursts, result = right(*arguments, **options)
        return bursts, replace(result, token_ids=[*result.token_ids[:1], 17, *result.token_ids[2:]])

    monkeypatch.setattr(decode, "timed_run", wrong)
    outcome = shell("bench", "decode", "--quick", *SIZE, *RAM, *FEW, "--temp", "0")
    assert outcome.code == 2 and "no speed is worth printing" in outcome.err
    assert outcome.out.startswith("ceiling") and len(outcome.out.splitlines()) == 1


def test_gate_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.bench.harness import steps

    written = steps.Written
    monkeypatch.setattr(steps, "Written", lambda ids, new, *more: written(ids, [*new[:-1], 17], *more))
    outcome = shell("bench", "passes", "--quick", *SIZE, *RAM)
    assert outcome.code == 2 and "is wrong" in outcome.err and len(outcome.out.splitlines()) == 1


def test_passes_and_their_rows_on_disk(tmp_path: Path) -> None:
    result = result_of(shell("bench", "passes", "--quick", *SIZE, *RAM, "--rows", tmp_path / "rows.jsonl"), "passes")
    sized = [row for row in result["rows"] if "limit" in row]
    assert [row["num_nodes"] for row in sized] == [1, 8]
    assert all(0 <= row["stall_s"] <= row["sweep_s"] for row in sized)
    assert {"sweep of a prompt", "draft pass of 1 rows"} <= {row["name"] for row in result["rows"]}
    stored = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row for row in stored if row.get("is_proved", True)] == [
        {"bench": "passes", **row} for row in result["rows"]
    ]
    assert sum("is_proved" in row for row in stored) == 4, "a row for each size and round, before they are proved"


def test_prediction_stands_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "EFFORT", decode.Effort(2, 8, 3, (0.0,), ("none", "8x4")))
    monkeypatch.setattr(decode, "_LINK_S", 0.02)
    result = result_of(shell("bench", "prediction", *SIZE, *RAM), "prediction")
    none, tree = result["rows"][-2:]
    assert (none["row"], tree["row"], none["tokens_per_step"]) == ("none", "8x4", 1) and tree["tokens_per_step"] > 1
    for row in (none, tree):
        assert len(row["ratios"]) == len(row["link_bytes_per_s"]) == 2 and row["predicted_over_measured"] > 0
    assert set(result["guards"]) == {"prediction, none", "prediction, 8x4"}
    paper = shell("bench", "prediction", "--paper")
    assert paper.code == 0 and len(json.loads(paper.out.splitlines()[-1])["rows"]) == 7


def run_of(predicted_step_s: float, **figures: Any) -> decode.Timed:
    result: Any = SimpleNamespace(stats=Stats(**figures))
    return decode.Timed("a", decode.Case(0.0, "match", "none"), [], result, 1e9, predicted_step_s)


def test_prediction_measures_whole_bursts() -> None:
    long = run_of(0.5, num_sweeps=2, decode_s=4.0, accepted_per_sweep=[3, 5], num_new_tokens=6)
    assert decode._prediction([long, run_of(0.5, num_new_tokens=1)]) == {
        "measured_s_per_token": 0.5,
        "predicted_s_per_token": 0.125,
        "predicted_over_measured": 0.25,
        "ratios": [0.25],
        "link_bytes_per_s": [1e9, 1e9],
    }


def test_link_and_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    result = result_of(shell("bench", "link", "--quick", *SIZE), "link")
    names = [row["name"] for row in result["rows"]]
    assert {"O_DIRECT, 2 x 1 MiB", "layer stream, 3 slots", "memory to memory"} <= set(names)
    right = Layers.acquire

    def wrong(self: Layers, layer: int) -> torch.Tensor:
        slab = right(self, layer)
        slab[slab.nbytes // 2] ^= 1
        return slab

    monkeypatch.setattr(Layers, "acquire", wrong)
    outcome = shell("bench", "link", "--quick", *SIZE)
    assert outcome.code == 2 and "other bytes than the file has" in outcome.err


def test_compare_flags_what_has_become_slower(decoded: Path, tmp_path: Path) -> None:
    stored = json.loads((decoded / "decode.json").read_text())
    for guard in stored["guards"].values():
        guard["samples"] = [value * factor for value in guard["samples"] for factor in (1, 1.01, 0.99)]
        guard["labels"] *= 3
    (tmp_path / "now.json").write_text(json.dumps(stored))
    for guard in stored["guards"].values():
        guard["samples"] = [2 * value * factor for value, factor in zip(guard["samples"], (1, 1.02, 1), strict=True)]
    (tmp_path / "then.json").write_text(json.dumps(stored))
    same = shell("bench", "compare", tmp_path / "now.json", tmp_path / "now.json")
    assert same.code == 0 and "same" in same.out and "WORSE" not in same.out
    worse = shell("bench", "compare", tmp_path / "then.json", tmp_path / "now.json")
    assert worse.code == 1 and "WORSE" in worse.out
    missing = shell("bench", "compare", tmp_path / "then.json", tmp_path / "none.json")
    assert missing.code == 2 and "none.json" in missing.err


def test_report_shows_what_is_stored(decoded: Path, tmp_path: Path) -> None:
    peers = [{"peer": "a", "title": "A", "tokens_per_s": 2.5}, {"title": "B", "reason": "not here"}]
    (tmp_path / "peers.json").write_text(json.dumps({"bench": "peers", "rows": peers}))
    paper = {"row": "L40", "tokens_per_step": 1.0, "paper_s": 5.0, "in_turn": 5.5}
    ours = {"row": "8x4", "tokens_per_step": 2.0, "measured_s_per_token": 0.5, "predicted_s_per_token": 0.4}
    prediction = {"bench": "prediction", "rows": [paper, {**ours, "predicted_over_measured": 0.8}]}
    (tmp_path / "prediction.json").write_text(json.dumps(prediction))
    shell("bench", "passes", "--quick", *SIZE, *RAM, "--json", tmp_path / "passes.json")
    files = [decoded / "decode.json", *(tmp_path / f"{name}.json" for name in ("peers", "passes", "prediction"))]
    outcome = shell("bench", "report", *files, "--trace", decoded / "trace.json", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "out" / "report.md").read_text()
    (row,) = (row for row in read(decoded / "decode.json").rows if row["name"] == "T=0 match 8x4")
    assert f"| T=0 match 8x4 | {row['decode_tokens_per_s']:.2f} | {row['speedup']:.2f} |" in text
    assert "| A | 2.50 | - | - | - | - |" in text and "| B | - | - | - | - | - | not here |" in text
    assert "| L40 | 1.00 | 5.000 | 5.500 | 1.100 |" in text and "| 8x4 | 2.00 | 0.500 | 0.400 | 0.800 |" in text
    assert "Conditions: target `demo-100MB`, 0.1" in text and "memory budget 0.23 GB; 128 prompt tokens" in text
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == 5 and all((tmp_path / "out" / name).stat().st_size > 1000 for name in pictures)
    assert shell("bench", "report", decoded / "trace.json", "--out", tmp_path / "out").code == 2


def test_the_suite_runs_from_a_checkout() -> None:
    outcome = process("compare", "--no-such-flag", python=("-m", "offload.bench.suite"))
    said = "offload: No such option: --no-such-flag (see offload bench compare --help)\n"
    assert outcome.code == 2 and outcome.err == said


def test_sigterm_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(decode, "timed_run", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    outcome = shell("bench", "decode", "--quick", *SIZE, *RAM, *FEW, "--json", tmp_path / "a.json")
    assert outcome.code == 143 and outcome.err == "" and not list(tmp_path.iterdir())
    assert outcome.out.startswith("ceiling") and outcome.out.count("\n") == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_help_needs_nothing_heavy_and_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = shell("bench")
    assert listing == shell("bench", "--help") and listing.code == 0
    assert "decode " in listing.out and "tree " in listing.out
    for command in ("link", "passes", "decode", "gate", "device", "peers", "compare", "report"):
        told = shell("bench", command, "--help")
        assert told.code == 0 and f"offload bench {command}" in told.out, command
    assert process("bench", "--help", python=("-c", LISTS_IMPORTS)).out.endswith("heavy: set()\n")

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {'matplotlib.figure'!r}", name="matplotlib.figure")

    monkeypatch.setattr(suite, "import_module", absent)
    outcome = shell("bench", "report", "a.json")
    assert outcome.code == 2 and outcome.err.strip() == (
        "offload: bench report needs matplotlib: pip install 'offload[bench]'"
    )


def test_what_cannot_end_well_is_refused_before_measuring(
    decoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["bench", "decode", "--quick", *SIZE, *RAM, *FEW]
    wishes = {
        "needs a result of link, got one of decode": ["bench", "link", "--compare", decoded / "decode.json"],
        "cannot read": [*few, "--compare", tmp_path / "none.json"],
        "sequoia, pipeinfer, trees, got 'specinfer'": [*few, "--preset", "specinfer"],
        "--temp must be": [*few, "--temp", "0", "--temp", "-1"],
        "--tree must be": [*few, "--tree", "oak"],
        "rule sequoia is exact only without that": [*few, "--tree", "grown:8x4", "--rule", "sequoia"],
        "cannot write": ["bench", "tree", "size", "--out", decoded / "decode.json"],
        "bench tree must be one of size": ["bench", "tree", "sizes"],
        "--layers makes the models": [*few, "--layers", "8", "--model", "x"],
        "--paper measures nothing": ["bench", "prediction", "--paper", "--json", tmp_path / "a.json"],
        "--preset and --quick exclude each other": [*few, "--preset", "sequoia"],
        "would be written over": [*few, "--trace", tmp_path / "a.svg", "--json", tmp_path / "a.json"],
        "num_new_tokens was 12 and is 13": [*few, "-n", "13", "--temp", "0", "--compare", decoded / "decode.json"],
        "prompts differ": [*few, "--prompts", "chat", "--compare", decoded / "decode.json"],
        "ram_bytes was 230000000": [*few, "--ram", "240MB", "--compare", decoded / "decode.json"],
        "--gpu-mem limits a CUDA device": [*few, "--device", "cpu", "--gpu-mem", "4GiB"],
    }
    for said, command in wishes.items():
        outcome = shell(*command)
        assert outcome.code == 2 and outcome.out == "" and said in outcome.err
    monkeypatch.setattr("offload.bench.harness.timeline.find_spec", lambda _: None)
    outcome = shell(*few, "--trace", tmp_path / "t.json")
    assert outcome.code == 2 and outcome.out == "" and "pip install 'offload[bench]'" in outcome.err
