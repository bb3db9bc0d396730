"""Kernels and expansions beside what runs without them, by a clock of the test's: no time is told of what is wrong."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from shell import shell
from test_kernel_selection import comparison, refuses

from offload.bench.gpu import kernels as bench
from offload.bench.gpu.kernels import Timer, device_timer, expand_all, time_kernel, verdicts
from offload.bench.harness.tables import say_table
from offload.bench.latency import expansion
from offload.bench.latency.expansion import Effort, measure, samples
from offload.errors import UserError
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, EXPANSION_KERNELS
from offload.kernels.jit import HAS_TRITON


def clock(*seconds: float) -> Timer:
    """Times of work in turn, over and over; nothing is run."""
    turn: Iterator[float] = iter(seconds * 1000)
    return lambda work: next(turn)


def test_both_sides_are_timed_once_they_agree() -> None:
    fast, slow = time_kernel(comparison(), clock(1.0, 2.0)), time_kernel(comparison(), clock(2.0, 1.0))
    assert (fast["kernel_s"], fast["rival_s"], fast["ratio"], slow["ratio"]) == (1.0, 2.0, 2.0, 0.5)
    assert verdicts([fast, slow])["thing"] == {"mean_ratio": 1.0, "worst_ratio": 0.5}
    assert fast == {"kernel": "thing", "shape": "N 1", "reason": "", "kernel_s": 1.0, "rival_s": 2.0, "ratio": 2.0}


@pytest.mark.parametrize("agrees", [lambda: False, refuses])
def test_no_time_is_told_of_a_wrong_kernel_or_one_that_does_not_run(agrees: Callable[[], bool]) -> None:
    right, bad = time_kernel(comparison(), clock(1.0, 9.0)), time_kernel(comparison(agrees), clock(1.0, 9.0))
    assert bad["kernel_s"] is bad["rival_s"] is None and bad["reason"] and bad["ratio"] == 0
    assert verdicts([right, bad])["thing"] == {"mean_ratio": 0.0, "worst_ratio": 0.0}, "wrong once is wrong"


class ClockDevice(FakeDevice):
    """Work on it moves its clock; writing its scratch memory takes a while, too, and is no part of any work."""

    now_s, num_fills = 0.0, 0

    def fill(self, tensor: Any, value: int, stream: Any) -> None:
        self.now_s, self.num_fills = self.now_s + 100.0, self.num_fills + 1

    def mark(self, stream: Any, *, is_timed: bool = False) -> Any:
        assert is_timed and stream is self.compute, "times are those of the compute stream"
        return self.now_s

    def synchronize(self, event: Any) -> None:
        self.num_host_waits += 1

    def elapsed_s(self, before: float, after: float) -> float:
        return after - before


def test_a_timer_leaves_out_the_first_run_and_takes_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CACHE_BYTES", 1)
    card, taken = ClockDevice(), iter([50.0, 3.0, 1.0, 9.0, 2.0, 3.0, 8.0, 1.0])

    def work() -> None:
        card.now_s += next(taken)

    assert device_timer(card)(work) == pytest.approx(3.0)
    assert next(taken, None) is None and card.num_fills == card.num_host_waits == 7


def test_the_bench_shows_both_times_or_why_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    ended = time_kernel(comparison(), clock(1.0, 2.0)), time_kernel(comparison(refuses, "broken"), clock(1.0))
    say_table(bench.COLUMNS, ended)
    _, right, wrong = capsys.readouterr().out.splitlines()
    assert right.split() == ["thing", "N", "1", "1000.0000", "2000.0000", "2.00"]
    assert wrong.split(maxsplit=3) == ["broken", "N", "1", "RuntimeError: out of shared memory"]


def test_rows_are_those_of_all_kinds_and_ways() -> None:
    rows = measure(Effort(256, 1))
    names = [one.name for one in samples(256, 256)]
    ways = {"torch", "numba"} if HAS_NUMBA else {"torch"}
    wanted = {(name, how, count) for name in names for how in ways for count in (1, 2)}
    wanted |= {("copy", "copy", count) for count in (1, 2)}
    assert {(row["name"], row["how"], row["threads"]) for row in rows} == wanted
    assert all(row["bytes_per_s"] > 0 for row in rows)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_stand_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which cuts what it stores as bfloat16."""
    size = (128, 256)
    monkeypatch.setattr(bench, "SIZE", size)
    monkeypatch.setattr(bench, "DTYPE", torch.float32)
    found = list(expand_all(FakeDevice(), clock(1.0, 0.5, 2.0)))
    assert [one["shape"] for one in found] == [one.name for one in samples(*size)]
    assert [one["reason"] for one in found] == [""] * len(found)
    assert found[0]["of_copy"] == 2 and found[0]["bytes_per_s"] == 4 * 128 * 256 / 0.5
    broken = EXPANSION_KERNELS._replace(float8=lambda *arguments: arguments[-1].fill_(3))
    monkeypatch.setattr(bench, "EXPANSION_KERNELS", broken)
    wrong = next(expand_all(FakeDevice(), clock(1.0)))
    assert (wrong["reason"], wrong["bytes_per_s"], wrong["of_copy"]) == ("its results differ", 0, 0)


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_other_bits_have_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def almost(*arguments: object, **named: object) -> None:
        out = arguments[-1]
        assert isinstance(out, torch.Tensor)
        COMPILED.float8(*arguments, **named)
        out.view(torch.int16)[0, 0] ^= 1

    monkeypatch.setattr(expansion, "COMPILED", COMPILED._replace(float8=almost))
    with pytest.raises(UserError, match="fp8, blocks: numba and torch give different bits"):
        measure(Effort(256, 1))


@pytest.mark.full
def test_states_stand_beside_products() -> None:
    outcome = shell("bench", "recurrence", "--quick")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out.splitlines()[-1])["rows"]
    assert [row["nodes"] for row in rows] == [1, 16]
    for row in rows:
        assert row["recurrent_s"] > 0 and row["share"] == pytest.approx(row["recurrent_s"] / row["products_s"])
