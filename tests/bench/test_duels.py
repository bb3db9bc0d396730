"""A kernel beside what runs without it, by a clock of the test's: no time is told of what is wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from shell import shell
from test_kernel_selection import comparison, refuses

from offload.bench.gpu import duels
from offload.bench.gpu import kernels as bench
from offload.bench.gpu.duels import Duel, Timer, device_timer, time_duel, verdicts


def clock(*seconds: float) -> Timer:
    """Times of work in turn, over and over; nothing is run."""
    turn: Iterator[float] = iter(seconds * 1000)
    return lambda work: next(turn)


def test_both_sides_are_timed_once_they_agree() -> None:
    fast, slow = time_duel(comparison(), clock(1.0, 2.0)), time_duel(comparison(), clock(2.0, 1.0))
    assert (fast.kernel_s, fast.rival_s, fast.ratio, slow.ratio) == (1.0, 2.0, 2.0, 0.5)
    assert verdicts([fast, slow])["thing"] == (1.0, 0.5)
    assert fast.as_row() == {"kernel": "thing", "shape": "N 1", "reason": "", "kernel_s": 1.0, "rival_s": 2.0,
                             "ratio": 2.0}  # fmt: skip


@pytest.mark.parametrize("agrees", [lambda: False, refuses])
def test_no_time_is_told_of_a_wrong_kernel_or_one_that_does_not_run(agrees: Callable[[], bool]) -> None:
    right, bad = time_duel(comparison(), clock(1.0, 9.0)), time_duel(comparison(agrees), clock(1.0, 9.0))
    assert bad == Duel(bad.outcome) and bad.outcome.reason and bad.ratio == 0
    assert verdicts([right, bad])["thing"] == (0.0, 0.0), "wrong once is wrong"


class ClockDevice(FakeDevice):
    """Work on it moves its clock; writing its scratch memory takes a while, too, and is no part of any work."""

    now_s, num_fills = 0.0, 0

    def fill(self, tensor: Any, value: int, stream: Any) -> None:
        self.now_s, self.num_fills = self.now_s + 100.0, self.num_fills + 1

    def record(self, stream: Any, *, is_timed: bool = False) -> Any:
        assert is_timed and stream is self.compute, "times are those of the compute stream"
        return self.now_s

    def synchronize(self, event: Any) -> None:
        self.num_host_waits += 1

    def elapsed_s(self, before: float, after: float) -> float:
        return after - before


def test_a_timer_leaves_out_the_first_run_and_takes_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duels, "_CACHE_BYTES", 1)
    card, taken = ClockDevice(), iter([50.0, 3.0, 1.0, 9.0, 2.0, 3.0, 8.0, 1.0])

    def work() -> None:
        card.now_s += next(taken)

    assert device_timer(card)(work) == pytest.approx(3.0)
    assert next(taken, None) is None and card.num_fills == card.num_host_waits == 7


def test_the_bench_shows_both_times_or_why_there_are_none() -> None:
    ended = time_duel(comparison(), clock(1.0, 2.0)), time_duel(comparison(refuses, "broken"), clock(1.0))
    assert [bench.cells(one) for one in ended] == [
        ["thing", "N 1", "1000.0000", "2000.0000", "2.00"],
        ["broken", "N 1", "RuntimeError: out of shared memory", "", ""],
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes")
def test_the_bench_says_what_it_lacks() -> None:
    outcome = shell("bench", "kernels")
    assert outcome.code == 2 and not outcome.out
    assert outcome.err.count("\n") == 1 and "needs a CUDA device" in outcome.err
