"""The commands of `offload bench`, as small as they get: what they end in, and that wrong tokens stop them."""

import json
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from shell import Outcome, process, shell

from offload.bench import suite
from offload.bench.harness.command import Effort
from offload.bench.harness.record import read
from offload.bench.latency import decode, many, passes, quantised

SIZE = ["--size", "100MB"]
RAM = ["--ram", "230MB"]
FEW = ["--num-prompts", "1", "-n", "12", "--tree", "8x4"]


LISTS_IMPORTS = """
import sys
from offload.commands import main
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
        patch.setattr("offload.bench.harness.command.CEILING_BYTES", 20_000_000)
        patch.setattr(passes, "QUICK", passes.Effort((1, 8), 2, 1, 0.2))
        yield


def result_of(outcome: Outcome, bench: str) -> dict[str, Any]:
    """The last line; the ceiling is the first."""
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("ceiling: ") and "gate: " in outcome.out
    result = json.loads(outcome.out.splitlines()[-1])
    assert result["bench"] == bench and result["rows"]
    last = [line for line in outcome.out.splitlines() if line.startswith("ceiling: ")][-1]
    assert f" {result['ceiling']['bytes_per_s'] / 1e9:.3f} GB/s" in last, "printed and stored are one figure"
    assert all(0 < row.get("link_utilisation", 1) <= 1 for row in result["rows"])
    return result


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored result of `decode`."""
    folder = tmp_path_factory.mktemp("decoded")
    files = ["--json", folder / "decode.json"]
    files += ["--picture", folder / "sizes.png"] if find_spec("matplotlib") else []
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


@pytest.mark.full
def test_no_share_of_a_ceiling_is_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the plain reader was slow in every moment at which it looked."""
    monkeypatch.setattr("offload.bench.harness.command.plain_rate", lambda _: 1e3)
    monkeypatch.setattr(passes, "plain_read_s", lambda *_: 1e3)
    result_of(shell("bench", "decode", "--quick", *SIZE, *RAM, *FEW, "--temp", "0"), "decode")
    result_of(shell("bench", "passes", "--quick", *SIZE, *RAM), "passes")


def test_no_speed_is_printed_for_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.timed_run

    def wrong(*arguments: Any, **options: Any) -> Any:
        bursts, result = right(*arguments, **options)
        return bursts, replace(result, token_ids=[*result.token_ids[:1], 17, *result.token_ids[2:]])

    monkeypatch.setattr(decode, "timed_run", wrong)
    outcome = shell("bench", "decode", "--quick", *SIZE, *RAM, *FEW, "--temp", "0")
    assert outcome.code == 2 and "no speed is worth printing" in outcome.err
    assert outcome.out.startswith("ceiling") and len(outcome.out.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize("command", [["decode", *FEW, "--temp", "0"], ["passes"]], ids=["decode", "passes"])
def test_where_nothing_is_streamed_no_link_is_a_ceiling(command: list[str]) -> None:
    """A rate of a link that nothing passes over would be a figure that was never measured."""
    outcome = shell("bench", *command, "--quick", *SIZE, "--ram", "2GiB")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    assert result["ceiling"] == {"bytes_per_s": None} and not [name for name in result["guards"] if "ceiling" in name]
    assert {row["link_utilisation"] for row in result["rows"] if "link_utilisation" in row} == {None}


ALONE: dict[str, list[str]] = {
    "many": ["--quick", "--size", "60MB", "--parallel", "2"],
    "memory": ["--case", "dense-none", "--size", "60MB"],
    "quantised": ["--quick", "--size", "300MB"],
    "beside": ["--quick", *SIZE, *RAM, "--num-prompts", "1", "-n", "4", *["--with", "--threads 1 --tree 8x4"] * 2],
}


@pytest.mark.full
@pytest.mark.parametrize("name", ALONE)
def test_a_command_ends_with_its_table_and_its_result(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "QUICK", Effort(num_plain=4, num_tokens=24))
    monkeypatch.setattr(quantised, "QUICK", Effort(num_plain=2, num_tokens=6, trees=("none", "8x4")))
    outcome = shell("bench", name, *ALONE[name], "--json", tmp_path / "found.json", "--rows", tmp_path / "rows")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    assert result == json.loads((tmp_path / "found.json").read_text()) == read(tmp_path / "found.json").as_dict()
    assert result["bench"] == name and result["rows"] and len(outcome.out.splitlines()) > 3
    if name in ("many", "beside"):
        assert result["settings"]["proof"]["num_exact"] > 0 and "gate: " in outcome.out
        rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
        before, after = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        assert before == [{**row, "is_proved": False} for row in after], "figures of tokens that may still be wrong"


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


def test_the_suite_runs_from_a_checkout() -> None:
    outcome = process("compare", "--no-such-flag", python=("-m", "offload.bench.suite"), is_cold=True)
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
    assert "decode " in listing.out and "soak " in listing.out
    for command in ("passes", "decode", "gate", "device", "peers", "compare", "many"):
        ended = shell("bench", command, "--help")
        assert ended.code == 0 and f"offload bench {command}" in ended.out, command
    assert process("bench", "--help", python=("-c", LISTS_IMPORTS), is_cold=True).out.endswith("heavy: set()\n")

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {'accelerate.hooks'!r}", name="accelerate.hooks")

    monkeypatch.setattr(suite, "import_module", absent)
    outcome = shell("bench", "device", "--quick")
    assert outcome.code == 2 and outcome.err.strip() == (
        "offload: bench device needs accelerate: pip install 'offload[bench]'"
    )


def test_what_cannot_end_well_is_refused_before_measuring(
    decoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["bench", "decode", "--quick", *SIZE, *RAM, *FEW]
    twice = tmp_path / "twice.png"
    wishes = {
        "needs a result of passes, got one of decode": ["bench", "passes", "--compare", decoded / "decode.json"],
        "trees, sizes, rules, got 'specinfer'": [*few, "--preset", "specinfer"],
        "--temp must be": [*few, "--temp", "0", "--temp", "-1"],
        "cannot write": [*few, "--json", decoded],
        "--json alone may be printed": [*few, "--rows", "-"],
        f"--rows {twice} would be written over by --picture": [*few, "--rows", twice, "--picture", twice],
        "give --checkout DIR, or --with FLAGS": ["bench", "beside", *SIZE],
        "--checkout must be a folder that has offload in it": ["bench", "beside", "--checkout", tmp_path],
        "num_new_tokens was 12 and is 13": [*few, "-n", "13", "--temp", "0", "--compare", decoded / "decode.json"],
    }
    if find_spec("matplotlib"):
        wishes["--picture must end in one of "] = [*few, "--picture", tmp_path / "a.docx"]
    for said, command in wishes.items():
        outcome = shell(*command)
        assert outcome.code == 2 and outcome.out == "" and said in outcome.err
    monkeypatch.setattr("offload.bench.harness.picture.find_spec", lambda _: None)
    outcome = shell(*few, "--picture", tmp_path / "t.png")
    assert outcome.code == 2 and outcome.out == "" and "pip install 'offload[bench]'" in outcome.err
