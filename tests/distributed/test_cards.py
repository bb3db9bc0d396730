"""Several cards of one machine, rehearsed on the host: one command, one text, and no process left behind.

Each start costs seconds, so every one asks several things.
"""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import matrix
from shell import ROOT, process, start
from test_device_planner import CONFIGS

import offload
from offload.cli.plan_lines import cards_lines
from offload.errors import RankError, UserError
from offload.planning.hardware import Assumptions
from offload.planning.load_options import LoadOptions
from offload.reports.cards import plan_cards
from offload.reports.tune import tune
from offload.sampling_options import Sampling

TARGET, DRAFT = (ROOT / "offload" / "demo_pair" / name for name in ("target", "draft"))
PROMPT, NUM_NEW, END_S = "def main():", 20, 30.0
HOW: dict[str, Any] = {"ram": "1GiB", "context": 128, "threads": 1, "profile": "none", "dtype": "float32"}
FLAGS = ("-m", TARGET, "-d", DRAFT, "--ram", "1GiB", "--context", 128, "--dtype", "float32", "--threads", 1)
CARDS = (*FLAGS, "--device", "cpu,cpu")


def children(parent: int) -> list[int]:
    """Processes that this one has started and that have not ended."""
    results = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, of = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(of) == parent and state != "Z":
            results.append(int(status.parent.name))
    return results


def ended(pids: list[int]) -> bool:
    """Whether all of them end in time; those that do not are killed."""
    due_s = time.monotonic() + END_S
    while (alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < due_s:
        time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return not alive


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    with offload.load(TARGET, None, tree="none", device="cpu", **HOW) as decoder:
        return decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids


@matrix("options", [{}, {"ranks": "stages:0-1"}, {"ranks": "stages:0-1", "pipeline": "sync"}, {"parallel": 2}], daily=1)
def test_python_has_a_decoder_over_all_cards(wanted: list[int], options: dict[str, Any]) -> None:
    before, environment = children(os.getpid()), dict(os.environ)
    with offload.load(TARGET, DRAFT, device="cpu,cpu", **HOW, **options) as decoder:
        (card,) = set(children(os.getpid())) - {*before}
        assert decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids == wanted
        assert decoder.plan.ram_bytes == 2**29, "the cards of a machine share its memory"
    assert ended([card]) and dict(os.environ) == environment


@pytest.mark.full
def test_a_process_that_is_killed_is_told_of() -> None:
    before = children(os.getpid())
    with offload.load(TARGET, DRAFT, device="cpu,cpu", **HOW) as decoder:
        (card,) = set(children(os.getpid())) - {*before}
        os.kill(card, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 is gone"):
            decoder.generate(PROMPT, max_new_tokens=NUM_NEW)
    with pytest.raises(UserError, match=r"layers, and .* is the least that works"):
        offload.load(TARGET, DRAFT, device="cpu,cpu", **{**HOW, "ram": "20MiB"})
    assert {*children(os.getpid())} == {*before}


KILLED = "os.kill(os.getpid(), 9)"


@matrix("ending", [KILLED, "raise UserError('`ram` 1 is too small here')", "1 / 0"], always=[KILLED])
def test_a_process_that_ends_before_ranks_have_met_is_told_of(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; from offload.errors import UserError; from offload.distributed import cards; "
    program += (
        "import offload.engine.load as load\ndef fail(*_, **__): {how}\nload.open_decoder = fail; cards.serve_card()"
    )
    monkeypatch.setattr(
        "offload.distributed.cards._PROGRAM", "import sys; sys.path[:] = {!r}; " + program.replace("{how}", ending)
    )
    words = {"o": "rank 1 was killed", "r": "rank 1: `ram` 1 is too small here", "1": "rank 1: division by zero"}[
        ending[0]
    ]
    began_s = time.monotonic()
    with pytest.raises((RankError, UserError), match=words):
        offload.load(TARGET, None, tree="none", device="cpu,cpu", **HOW)
    assert time.monotonic() - began_s < END_S


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_however_a_command_ends_no_process_is_left(number: int) -> None:
    running = start("generate", *CARDS, "-p", PROMPT, "-n", 900, "--ranks", "stages:0-1")
    assert running.stdout is not None and running.stdout.read(1)
    cards_here = children(running.pid)
    began_s = time.monotonic()
    running.send_signal(number)
    _, err = running.communicate(timeout=END_S)
    assert len(cards_here) == 1 and ended(cards_here) and time.monotonic() - began_s < END_S
    code = {signal.SIGINT: 130, signal.SIGKILL: -9, signal.SIGTERM: 143}[signal.Signals(number)]
    assert running.returncode == code and b"Traceback" not in err
    assert number != signal.SIGINT or err.decode().splitlines()[-1] == "offload: interrupted"


@pytest.mark.full
def test_commands_write_with_cards_what_they_write_without(tmp_path: Path) -> None:
    """One text, many of a file, and a chat; where an answer of many is a line, ids tell."""
    lines = [{"prompt": PROMPT, "max_tokens": 8 + number} for number in range(5)]
    (tmp_path / "many.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked = [("generate", "-p", PROMPT, "-n", 20, "--json"),
             ("generate", "-f", tmp_path / "many.jsonl", "--parallel", 3),
             ("chat", "-n", 8, "--quiet")]  # fmt: skip
    for words in asked:
        models = ("--demo", "--ram", "2GiB", "--dtype", "float32") if words[0] == "chat" else FLAGS
        alone, both = (
            process(*words, *models, "--device", device, stdin=b"What is a list?\n") for device in ("cpu", "cpu,cpu")
        )
        assert (alone.code, both.code) == (0, 0), both.err
        assert _ids(both.out) == _ids(alone.out) != []


def _ids(out: str) -> list[object]:
    """Token ids of lines of JSON by text, other lines as they are."""
    texts = [json.loads(line) if line.startswith("{") else line for line in out.splitlines()]
    return sorted((text["token_ids"] if isinstance(text, dict) else text for text in texts), key=str)


@pytest.mark.parametrize("ranks", ["shards", "stages:0-1"])
def test_a_plan_shows_every_card(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an assumed machine, and those that are here; together they have all of it."""
    options = LoadOptions(TARGET, DRAFT, device="cuda:0,1", ram="64GiB", ranks=ranks)
    plan = plan_cards(options, Assumptions.from_flags("rtx3090", None))
    assert [card.machine.name for card in plan.cards] == ["cuda:0", "cuda:1"] and plan.pass_s == 0
    assert {card.machine.ram_bytes for card in plan.cards} == {32 << 30}
    assert sum(card.share for card in plan.cards) == pytest.approx(1, abs=0.01)
    assert plan.cards[0].plan.draft_bytes and not plan.cards[1].plan.draft_bytes
    assert "cuda:1 " in cards_lines(plan) and "All of it stays" in cards_lines(plan)
    monkeypatch.setattr(
        "offload.planning.budget.available_gpu_bytes", {"cuda:0": 2 << 30, "cuda:2": 4 << 30}.__getitem__
    )
    monkeypatch.setattr("offload.streaming.cuda.find_card", lambda card: None)
    tight = replace(options, device="cuda:0,2")
    here = plan_cards(tight, Assumptions(None, 3e9)).cards
    assert [round(card.plan.gpu_bytes / 2**30, 2) for card in here] == [1.96, 3.92]  # type: ignore[operator]
    assert {card.machine.disk_bytes_per_s for card in here} == {1.5e9}


def test_a_plan_counts_what_cards_stream(tmp_path: Path) -> None:
    """Both read at once as shards, and one after the other as stages."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3-70B"]))
    where = Assumptions.from_flags("rtx3090", None)
    for ranks in ("shards", "stages:0-1"):
        plan = plan_cards(LoadOptions(tmp_path / "config.json", device="cuda:0,1", ram="128GiB", ranks=ranks), where)
        whole_bytes = sum(sum(card.plan.layer_bytes) for card in plan.cards)
        streamed_bytes = [card.plan.streamed_bytes for card in plan.cards]
        assert whole_bytes == pytest.approx(80 * 1_711_308_800, rel=1e-3)
        assert 80e9 < sum(streamed_bytes) < 110e9
        turns = max if ranks == "shards" else sum
        assert plan.pass_s == pytest.approx(turns(streamed_bytes) / 25e9)
        assert f"takes at least {plan.pass_s:.2g} seconds" in cards_lines(plan)
    with pytest.raises(UserError, match="a tune is of one process"):
        tune(LoadOptions(TARGET, DRAFT, device="cpu,cpu"), [], Sampling())


def test_a_card_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.rank_roles import RankInfo, placed
    from offload.streaming import device

    opened = list[str]()
    monkeypatch.setattr("offload.streaming.cuda.find_card", lambda name: opened.append(f"look {name}"))
    monkeypatch.setattr("offload.streaming.cuda.open_device", lambda name, *_, **__: opened.append(name))
    options = LoadOptions(TARGET, device="cuda:1,3")
    device.device_of(options)
    with placed(RankInfo(1, 2, 0, 1, 2, "here", 1)):
        device.device_of(options)
    looks = ["look cuda:1", "look cuda:3"]
    assert opened == [*looks, "cuda:1", *looks, "cuda:3"]
    assert options.ranks == "shards"
