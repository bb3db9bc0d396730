"""The comparison is fair: a test for each way in which a program could be favoured. What an interruption leaves."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted_peer import NUM_NEW, PROMPT, order, plant

from offload.bench.harness.setting import Setting
from offload.bench.peers import child, peers
from offload.bench.peers.child import Order, follow
from offload.bench.peers.peers import OURS, PROGRAMS, Common, Outcome, Program, measure, run_child
from offload.checkpoint.packaged import PAIR
from offload.engine.load import load
from offload.reports.proof import draw_gaps, rounding
from offload.sampling_options import Sampling

OTHER = list(range(900, 950))


@pytest.fixture(scope="module")
def right_tokens() -> list[int]:
    """What the target writes behind PROMPT."""
    with load(PAIR / "target", None, ram="2GiB", context=128, threads=1) as decoder:
        tokens = decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids
    assert max(draw_gaps(PAIR / "target", PROMPT, tokens, Sampling())) <= rounding(Sampling())
    return tokens


def setting(*prompts: list[int], is_quick: bool = True) -> Common:
    pair = Setting(PAIR / "target", PAIR / "draft", PAIR / "target", 1 << 30)
    return Common(pair, list(prompts), (sys.executable,), is_quick)


def planted_program(tokens: list[int], num_prompts: int) -> Program:
    return Program("planted", "planted", {"tokens": tokens}, ("json",), NUM_NEW, num_prompts, threads=())


@pytest.mark.parametrize("is_quick", [True, False])
def test_all_programs_get_the_same_files_prompts_memory_and_time(
    is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: dict[str, Order] = {}
    monkeypatch.setattr(peers, "interpreter_with", lambda *_: sys.executable)
    monkeypatch.setattr(peers, "gguf_file", lambda path, python: path)
    monkeypatch.setattr(peers, "quantised", lambda path, form: path)
    common = setting(*([start] * 128 for start in range(6)), is_quick=is_quick)
    for name, program in PROGRAMS.items():

        def note(python: str, given: Order, name: str = name) -> Outcome:
            orders[name] = given
            return Outcome(reason="enough")

        monkeypatch.setattr(peers, "run_child", note)
        measure(program, common)
    for given in orders.values():
        assert given.prompts == common.prompts[: len(given.prompts)] and len(given.prompts) >= 1
        for field in ("target", "draft", "cap_bytes", "limit_s"):
            assert getattr(given, field) == getattr(orders[OURS], field), field
        assert given.num_tokens <= orders[OURS].num_tokens and len(given.prompts) <= len(orders[OURS].prompts)
    for name in ("disk-tuned", "mmap-tuned", "llama-draft"):
        assert orders[name].num_tokens == orders[OURS].num_tokens and orders[name].prompts == orders[OURS].prompts


def test_tokens_are_proved_each_behind_its_own_prompt(
    right_tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch)
    monkeypatch.setattr(peers, "new_cap", lambda _: None)
    good = measure(planted_program(right_tokens, 1), setting(PROMPT))
    assert good.reason == "" and good.runs[0].token_ids == right_tokens
    for prompts in ([OTHER], [PROMPT, OTHER]):
        assert measure(planted_program(right_tokens, 2), setting(*prompts)).reason.startswith("refused")


class FakeCap(SimpleNamespace):
    """A group that is a folder."""

    def peak_bytes(self) -> int:
        return 7

    def remove(self) -> None:
        self.is_removed = True


@pytest.fixture
def cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCap:
    plant(tmp_path, monkeypatch)
    made = FakeCap(processes=tmp_path / "procs", is_removed=False, limits=[])
    monkeypatch.setattr(peers, "new_cap", lambda cap_bytes: made.limits.append(cap_bytes) or made)
    return made


def test_the_child_joins_the_group_that_has_the_cap(cap: FakeCap, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = order(options={"tokens": [5] * NUM_NEW}, cap_bytes=12345678)
    outcome = run_child(sys.executable, wish)
    assert outcome.is_capped and outcome.peak_bytes == 7 and cap.limits == [12345678] and cap.is_removed
    assert int(cap.processes.read_text()) != os.getpid()
    monkeypatch.setattr(peers, "new_cap", lambda _: None)
    assert not run_child(sys.executable, wish).is_capped


@pytest.fixture
def events_of_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, float]]]:
    """What happens in a child, and when; the program takes its time to open."""
    events: list[tuple[str, float]] = []

    class Slow:
        def __init__(self, given: Order) -> None:
            events.append(("open", time.perf_counter()))
            time.sleep(0.3)

        def use_threads(self, count: int) -> None: ...

        def generate(self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Callable) -> None:
            for _ in range(num_tokens):
                time.sleep(0.002)
                emit([1])

    monkeypatch.setitem(sys.modules, "slow", SimpleNamespace(open_peer=Slow))
    monkeypatch.setattr(child, "drop_pages", lambda path: events.append((str(path), time.perf_counter())))
    yield events


def test_every_program_starts_with_a_cold_cache(events_of_child: list[tuple[str, float]]) -> None:
    given = order("slow")
    follow(given)
    assert [event for event, _ in events_of_child] == [given.target, "open"]


# What an interruption leaves
