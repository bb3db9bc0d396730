"""The thread count to begin with, from the products that a step consists of: real steps correct it later."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch


def fastest_num_threads(
    ladder: Sequence[int], num_rows: int, width: int, dtype: torch.dtype, *, budget_s: float = 0.06
) -> int:
    """Of the rising counts of `ladder` that with the shortest product of `num_rows` rows and a (width, width) matrix.

    Ties within a tenth go to fewer.
    """
    weight = torch.ones(width, width, dtype=dtype)
    rows = torch.ones(num_rows, width, dtype=dtype)
    before, best = torch.get_num_threads(), (float("inf"), ladder[0])
    for count in ladder:
        torch.set_num_threads(count)
        elapsed_s = _median_s(lambda: torch.nn.functional.linear(rows, weight), budget_s / len(ladder))
        if elapsed_s < 0.9 * best[0]:
            best = (elapsed_s, count)
    torch.set_num_threads(before)
    return best[1]


def _median_s(work: Callable[[], object], budget_s: float) -> float:
    work()
    times: list[float] = []
    stop = time.perf_counter() + budget_s
    while time.perf_counter() < stop or len(times) < 3:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)
