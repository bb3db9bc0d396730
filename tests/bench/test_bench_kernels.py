"""Kernels and expansions beside what runs without them, by a clock of the test's: no time is told of what is wrong."""

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_device import FakeDevice
from test_kernel_selection import comparison, refuses

from offload.bench.gpu import kernels as bench
from offload.bench.gpu.kernels import Timer, expand_all, time_kernel, verdicts
from offload.bench.gpu.samples import samples
from offload.kernels.expansion import EXPANSION_KERNELS
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


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_stand_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which cuts what it stores as bfloat16."""
    size = (128, 256)
    monkeypatch.setattr(bench, "SIZE", size)
    monkeypatch.setattr(bench, "DTYPE", torch.float32)
    rows = list(expand_all(FakeDevice(), clock(1.0, 0.5, 2.0)))
    assert [row["shape"] for row in rows] == [row.name for row in samples(*size)]
    assert [row["reason"] for row in rows] == [""] * len(rows)
    assert rows[0]["of_copy"] == 2 and rows[0]["bytes_per_s"] == 4 * 128 * 256 / 0.5
    broken = EXPANSION_KERNELS._replace(float8=lambda *arguments: arguments[-1].fill_(3))
    monkeypatch.setattr(bench, "EXPANSION_KERNELS", broken)
    wrong = next(expand_all(FakeDevice(), clock(1.0)))
    assert (wrong["reason"], wrong["bytes_per_s"], wrong["of_copy"]) == ("its results differ", 0, 0)
