"""What a reader of text feels, from the moments at which tokens arrived: the usual names of serving benchmarks.

A run is a list of bursts, since one sweep accepts several tokens at once. All of them reach the consumer in the same
moment, so the latency between tokens is zero within a burst and a whole sweep between bursts: its median says nothing
about speed here and its p99 everything about smoothness. That is why the time per sweep stands beside it.

Pure arithmetic on numbers. Invariant: every token of every run is counted once, and percentiles are over all of them.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class Burst(NamedTuple):
    """Tokens that one sweep has yielded."""

    time_s: float  # since the request
    num_tokens: int  # may be zero where a run was cut at its length


class Spread(NamedTuple):
    """One quantity over many observations."""

    mean: float
    median: float
    p99: float  # linear between observations

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of any number of observations; zeros where there are none."""
        observed = np.asarray(list(values), dtype=float)
        if not observed.size:
            return cls(0.0, 0.0, 0.0)
        return cls(float(observed.mean()), float(np.median(observed)), float(np.percentile(observed, 99)))


class Latencies(NamedTuple):
    """Of several runs, in seconds."""

    ttft_s: Spread  # to the first burst, over runs
    tpot_s: Spread  # per token after the first burst, over runs: what came with the first one is not counted as free
    itl_s: Spread  # between neighbouring tokens as the consumer sees them, over all tokens
    sweep_s: Spread  # between bursts, over all of them
    e2el_s: Spread  # to the last token, over runs
    output_tokens_per_s: float  # all tokens over all of the time, prompts included
    decode_tokens_per_s: float  # what came after the first bursts, over the time it took: without prompt time

    def as_dict(self) -> dict[str, Any]:
        """Flat, by names such as `median_itl_s`."""
        spreads = {name: value for name, value in self._asdict().items() if isinstance(value, Spread)}
        flat = {f"{kind}_{name}": value for name, spread in spreads.items() for kind, value in spread._asdict().items()}
        return flat | {name: value for name, value in self._asdict().items() if name not in spreads}


def latencies(runs: Sequence[Sequence[Burst]]) -> Latencies:
    """The figures of runs, each a list of bursts in the order of time; runs without a token are left out."""
    told = [bursts for bursts in ([burst for burst in run if burst.num_tokens] for run in runs) if bursts]
    num_later = [sum(burst.num_tokens for burst in bursts[1:]) for bursts in told]
    decode_s = [bursts[-1].time_s - bursts[0].time_s for bursts in told]
    all_s = sum(bursts[-1].time_s for bursts in told)
    num_tokens = sum(burst.num_tokens for bursts in told for burst in bursts)
    return Latencies(
        ttft_s=Spread.of(bursts[0].time_s for bursts in told),
        tpot_s=Spread.of(took_s / count for took_s, count in zip(decode_s, num_later, strict=True) if count),
        itl_s=Spread.of(gap_s for bursts in told for gap_s in token_gaps(bursts)),
        sweep_s=Spread.of(b.time_s - a.time_s for bursts in told for a, b in pairwise(bursts)),
        e2el_s=Spread.of(bursts[-1].time_s for bursts in told),
        output_tokens_per_s=num_tokens / all_s if all_s else 0.0,
        decode_tokens_per_s=sum(num_later) / sum(decode_s) if sum(decode_s) else 0.0,
    )


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
