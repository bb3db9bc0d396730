"""What a reader of text feels, from the moments at which tokens arrived: the usual names of serving benchmarks.

A run is a list of bursts, since one sweep accepts several tokens at once. All of them reach the consumer in the same
moment, so the latency between tokens is zero within a burst and a whole sweep between bursts: its median says nothing
about speed here and its p99 everything about smoothness. That is why the time per sweep stands beside it.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Burst(NamedTuple):
    """Tokens that one sweep has yielded."""

    time_s: float  # since the request
    num_tokens: int  # may be zero where a run was cut at its length


def latencies(runs: Sequence[Sequence[Burst]]) -> dict[str, float]:
    """Mean, median and p99 (`mean_ttft_s`, ...) of runs, each a list of bursts; runs without a token are left out.

    `ttft` and `e2el` are over runs, to the first burst and to the last token; `tpot` per token after the first burst,
    over runs; `itl` between neighbouring tokens, over all; `sweep` between bursts, over all. `decode_tokens_per_s`
    counts what came after the first bursts, `output_tokens_per_s` all, prompt time included.
    """
    told = [bursts for bursts in ([burst for burst in run if burst.num_tokens] for run in runs) if bursts]
    num_later = [sum(burst.num_tokens for burst in bursts[1:]) for bursts in told]
    decode_s = [bursts[-1].time_s - bursts[0].time_s for bursts in told]
    all_s, num_tokens = sum(bursts[-1].time_s for bursts in told), sum(b.num_tokens for bursts in told for b in bursts)
    observed: dict[str, Iterable[float]] = {
        "ttft_s": [bursts[0].time_s for bursts in told],
        "tpot_s": [took_s / count for took_s, count in zip(decode_s, num_later, strict=True) if count],
        "itl_s": [gap_s for bursts in told for gap_s in token_gaps(bursts)],
        "sweep_s": [b.time_s - a.time_s for bursts in told for a, b in pairwise(bursts)],
        "e2el_s": [bursts[-1].time_s for bursts in told],
    }
    flat = {f"{kind}_{name}": value for name, values in observed.items() for kind, value in spread(values).items()}
    rates = num_tokens / all_s if all_s else 0.0, sum(num_later) / sum(decode_s) if sum(decode_s) else 0.0
    return flat | dict(zip(("output_tokens_per_s", "decode_tokens_per_s"), rates, strict=True))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean, median and p99 (linear between observations); zeros where there are none."""
    found = np.asarray(list(values) or [0.0], dtype=float)
    return {"mean": float(found.mean()), "median": float(np.median(found)), "p99": float(np.percentile(found, 99))}


def token_gaps(bursts: Sequence[Burst]) -> list[float]:
    """Seconds between each token and the one before it: one gap per burst, then zeros."""
    gaps = [0.0] * (bursts[0].num_tokens - 1)
    for before, burst in pairwise(bursts):
        gaps += [burst.time_s - before.time_s, *[0.0] * (burst.num_tokens - 1)]
    return gaps


def acceptance_by_depth(accepted_per_sweep: Sequence[int], depth: int) -> list[float]:
    """Share of sweeps whose accepted path reached each of the depths 1..depth.

    A sweep of k tokens accepted k - 1 nodes; its last token is the target's own. The sweep that a run's length cuts
    counts with what was left of it, hence these are lower bounds by at most one sweep per run.
    """
    counts = np.asarray(accepted_per_sweep)
    return [float((counts - 1 >= k).mean()) if counts.size else 0.0 for k in range(1, depth + 1)]
