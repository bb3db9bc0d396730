"""The mode to begin with, from the products that a step consists of: real steps correct it later."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import torch
from torch.nn.functional import linear, silu

from offload.threads.policy import Mode
from offload.threads.waiting import ThreadWaiting
from offload.timer import median_s, timed


def fastest_mode(
    ladder: Sequence[int], num_rows: int, width: int, dtype: torch.dtype, *, budget_s: float = 0.06
) -> Mode:
    """That with the shortest product of `num_rows` rows and a (width, width) matrix, and what follows such products.

    Counts are those of the rising `ladder`. Ties within a tenth go to fewer threads, and to those that sleep while they
    wait: these leave the cores to others.
    """
    weight = torch.ones(width, width, dtype=dtype)
    rows = torch.ones(num_rows, width, dtype=dtype)
    before, best = torch.get_num_threads(), (float("inf"), Mode(ladder[0], is_asleep=True))
    modes = [Mode(count, is_asleep) for count in ladder for is_asleep in (True, False) if is_asleep or count > 1]
    with closing(ThreadWaiting()) as waiting:
        for mode in modes:
            torch.set_num_threads(mode.num_threads)
            waiting.let_sleep(mode.is_asleep)
            _compute(rows, weight)  # the first is not like the others
            elapsed_s = median_s(partial(timed, partial(_compute, rows, weight)), budget_s / len(modes), least_rounds=3)
            if elapsed_s < 0.9 * best[0]:
                best = (elapsed_s, mode)
    torch.set_num_threads(before)
    return best[1]


def _compute(rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Two products, and the elementwise work between them: threads wait for each other three times."""
    linear(silu(linear(rows, weight)), weight)
