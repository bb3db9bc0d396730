"""Figures of hand-made runs, to the last digit."""

import numpy as np
import pytest

from offload.bench.harness.metrics import Burst, acceptance_by_depth, latencies

TWO_RUNS = [
    [Burst(1.0, 2), Burst(1.5, 3), Burst(2.5, 1)],
    [Burst(2.0, 1), Burst(2.25, 4), Burst(2.5, 0)],  # the last one was cut away whole
]


def spread(values: list[float]) -> dict[str, float]:
    kinds = {"mean": np.mean(values), "median": np.median(values), "p99": np.percentile(values, 99)}
    return {kind: pytest.approx(float(value)) for kind, value in kinds.items()}


def test_latencies_of_two_runs() -> None:
    got = latencies(TWO_RUNS)
    for name, values in {
        "ttft_s": [1.0, 2.0],
        "tpot_s": [1.5 / 4, 0.25 / 4],
        "itl_s": [0, 0.5, 0, 0, 1.0, 0.25, 0, 0, 0],
        "sweep_s": [0.5, 1.0, 0.25],
        "e2el_s": [2.5, 2.25],
    }.items():
        assert {kind: got[f"{kind}_{name}"] for kind in ("mean", "median", "p99")} == spread(values), name
    assert got["median_itl_s"] == 0 and got["p99_itl_s"] == pytest.approx(0.96)
    assert got["output_tokens_per_s"] == pytest.approx(11 / 4.75)
    assert got["decode_tokens_per_s"] == pytest.approx(8 / 1.75)
    assert len(got) == 5 * 3 + 2


def test_runs_without_tokens_and_single_bursts() -> None:
    assert latencies([[], [Burst(1.0, 0)]])["output_tokens_per_s"] == 0
    alone = latencies([[Burst(0.5, 4)]])
    assert alone["decode_tokens_per_s"] == alone["mean_tpot_s"] == 0 and alone["output_tokens_per_s"] == 8


def test_acceptance_by_depth() -> None:
    assert acceptance_by_depth([1, 3, 4, 1], 4) == [0.5, 0.5, 0.25, 0.0]
    assert acceptance_by_depth([], 2) == [0.0, 0.0]
