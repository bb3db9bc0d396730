"""Latencies and throughput from the arrival of tokens, as serving benchmarks name them.

A run is a list of bursts, since one weight pass accepts several tokens at once: the latency between
tokens is zero within a burst and a whole pass between bursts. Its median says nothing about speed
here and its p99 everything about smoothness, so the time per pass stands beside it.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from offload.engine.generation import Generation, Run
from offload.stats import Stats


class Burst(NamedTuple):
    time_s: float  # since the request
    num_tokens: int  # may be zero where a run was cut at its length


def followed(
    run: Run, on_burst: Callable[[int], None] = lambda number: None
) -> tuple[list[Burst], Generation]:
    """Follow a run to its end; `on_burst` is called with the number of each burst, from 1 on."""
    times = list[float]()
    started = time.perf_counter()
    for _ in run:
        times.append(time.perf_counter() - started)
        on_burst(len(times))
    result = run.result()
    counts = [result.stats.num_first_tokens, *result.stats.accepted_per_sweep]
    # the last piece may be text alone
    return [Burst(*pair) for pair in zip(times, counts, strict=False)], result


def latencies(runs: Sequence[Sequence[Burst]]) -> dict[str, float]:
    """Return mean, median and p99 (`mean_ttft_s`, ...) of runs, each a list of bursts.

    Runs without a token are left out. `ttft` and `e2el` are over runs, to the first burst and to
    the last token; `tpot` per token after the first burst, over runs; `itl` between neighbouring
    tokens, over all; `sweep` between bursts, over all. `decode_tokens_per_s` counts what came after
    the first bursts, `output_tokens_per_s` all, prompt time included.
    """
    filled = [[burst for burst in run if burst.num_tokens] for run in runs]
    texts = [bursts for bursts in filled if bursts]
    later = [
        (bursts[-1].time_s - bursts[0].time_s, sum(burst.num_tokens for burst in bursts[1:]))
        for bursts in texts
    ]
    gaps_s = [
        after.time_s - before.time_s for bursts in texts for before, after in pairwise(bursts)
    ]
    # tokens that arrived with another one
    within = sum(burst.num_tokens - 1 for bursts in texts for burst in bursts)
    observed: dict[str, list[float]] = {
        "ttft_s": [bursts[0].time_s for bursts in texts],
        "tpot_s": [took_s / count for took_s, count in later if count],
        "itl_s": gaps_s + [0.0] * within,
        "sweep_s": gaps_s,
        "e2el_s": [bursts[-1].time_s for bursts in texts],
    }
    flat = dict[str, float]()
    for name, values in observed.items():
        numbers = np.asarray(values or [0.0])
        kinds = {
            "mean": numbers.mean(),
            "median": np.median(numbers),
            "p99": np.percentile(numbers, 99),
        }
        flat |= {f"{kind}_{name}": float(value) for kind, value in kinds.items()}
    decode_s = sum(took_s for took_s, _ in later)
    num_later = sum(count for _, count in later)
    num_tokens = num_later + sum(bursts[0].num_tokens for bursts in texts)
    all_s = sum(observed["e2el_s"])
    flat["output_tokens_per_s"] = num_tokens / all_s if all_s else 0.0
    return {**flat, "decode_tokens_per_s": num_later / decode_s if decode_s else 0.0}


def per_pass(stats: Stats) -> dict[str, float]:
    """Return seconds of a token, and means over the passes behind the prompt's."""
    num_sweeps = max(1, stats.num_sweeps)
    return {
        "token_s": stats.tpot_s,
        "tokens_per_pass": stats.tokens_per_sweep,
        "pass_s": stats.sweep_s / num_sweeps,
        "stall_s": stats.stall_s / num_sweeps,
        "draft_s": stats.draft_s / num_sweeps,
        "pass_bytes": stats.bytes_streamed / num_sweeps,
    }


def acceptance_by_depth(accepted_per_sweep: Sequence[int], depth: int) -> list[float]:
    """Return the share of passes whose accepted path reached each of the depths 1..depth.

    A sweep of k tokens accepted k - 1 nodes; its last token is the target's own. The sweep that a
    run's length cuts counts with what was left of it, hence these are lower bounds by at most one
    sweep per run.
    """
    counts = np.asarray(accepted_per_sweep)
    return [float((counts - 1 >= k).mean()) if counts.size else 0.0 for k in range(1, depth + 1)]
