"""The thread mode to begin with, from the products that a step consists of; real steps correct it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from offload.thread_waiting import ThreadWaiting
from offload.threads import Mode
from offload.timer import median_s, timed

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Fastest(NamedTuple):
    """The mode, and the seconds of each that was tried."""

    mode: Mode
    seen_s: dict[Mode, float]


def fastest_mode(
    ladder: Sequence[int],
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    budget_s: float = 0.06,
    multiply: Multiply = linear,
) -> Fastest:
    """Return the mode with the shortest product of `num_rows` rows and a (width, width) matrix.

    The time includes elementwise work between products. Counts are those of the rising `ladder`.
    Ties within a tenth go to fewer threads, and to sleeping ones: these leave the cores to others.
    `multiply` is how models here compute such products.
    """
    weight = torch.ones(width, width, dtype=dtype)
    rows = torch.ones(num_rows, width, dtype=dtype)
    before = torch.get_num_threads()
    best = Mode(ladder[0], is_asleep=True)
    seen_s = dict[Mode, float]()
    modes = [
        Mode(count, is_asleep)
        for count in ladder
        for is_asleep in (True, False)
        if is_asleep or count > 1
    ]
    with closing(ThreadWaiting()) as waiting:
        for mode in modes:
            torch.set_num_threads(mode.num_threads)
            waiting.let_sleep(mode.is_asleep)
            compute = partial(_compute, rows, weight, multiply)
            compute()  # the first is not like the others
            seen_s[mode] = median_s(partial(timed, compute), budget_s / len(modes), least_rounds=3)
            if seen_s[mode] < 0.9 * seen_s[best]:
                best = mode
    torch.set_num_threads(before)
    return Fastest(best, seen_s)


def _compute(rows: torch.Tensor, weight: torch.Tensor, multiply: Multiply) -> None:
    """Compute two products with elementwise work between: three waits of all threads."""
    multiply(silu(multiply(rows, weight)), weight)
