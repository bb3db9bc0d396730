"""Figures of hand-made runs, to the last digit."""

import pytest

from offload.bench.metrics import Burst, Spread, acceptance_by_depth, latencies, token_gaps

TWO_RUNS = [
    [Burst(1.0, 2), Burst(1.5, 3), Burst(2.5, 1)],
    [Burst(2.0, 1), Burst(2.25, 4), Burst(2.5, 0)],  # the last one was cut away whole
]


def test_spread_is_mean_median_and_99th_percentile() -> None:
    assert Spread.of(range(101)) == (50.0, 50.0, 99.0)
    assert Spread.of([3.0, 1.0]) == (2.0, 2.0, pytest.approx(2.98))
    assert Spread.of([]) == (0.0, 0.0, 0.0)


def test_tokens_of_one_burst_arrive_together() -> None:
    assert token_gaps(TWO_RUNS[0]) == [0.0, 0.5, 0.0, 0.0, 1.0]


def test_latencies_of_two_runs() -> None:
    found = latencies(TWO_RUNS)
    assert found.ttft_s == Spread.of([1.0, 2.0])
    assert found.tpot_s == Spread.of([1.5 / 4, 0.25 / 4])
    assert found.itl_s == Spread.of([0, 0.5, 0, 0, 1.0, 0.25, 0, 0, 0])
    assert found.itl_s.median == 0 and found.itl_s.p99 == pytest.approx(0.96)
    assert found.sweep_s == Spread.of([0.5, 1.0, 0.25])
    assert found.e2el_s == Spread.of([2.5, 2.25])
    assert found.output_tokens_per_s == pytest.approx(11 / 4.75)
    assert found.decode_tokens_per_s == pytest.approx(8 / 1.75)


def test_every_token_has_one_gap_but_the_first_of_a_run() -> None:
    assert len(token_gaps(TWO_RUNS[0])) == 6 - 1 and len(token_gaps([Burst(1.0, 1)])) == 0


def test_runs_without_tokens_and_single_bursts() -> None:
    assert latencies([[], [Burst(1.0, 0)]]).output_tokens_per_s == 0
    alone = latencies([[Burst(0.5, 4)]])
    assert alone.decode_tokens_per_s == 0 and alone.tpot_s == (0, 0, 0) and alone.output_tokens_per_s == 8


def test_flat_names() -> None:
    flat = latencies(TWO_RUNS).as_dict()
    assert flat["median_itl_s"] == 0 and flat["mean_ttft_s"] == 1.5 and "decode_tokens_per_s" in flat
    assert len(flat) == 5 * 3 + 2


def test_acceptance_by_depth() -> None:
    assert acceptance_by_depth([1, 3, 4, 1], 4) == [0.5, 0.5, 0.25, 0.0]
    assert acceptance_by_depth([], 2) == [0.0, 0.0]
