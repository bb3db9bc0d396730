"""The thread count to begin with, from the products that a step consists of: real steps correct it later."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import linear

from offload.timer import median_s, timed


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
        linear(rows, weight)  # the first is not like the others
        elapsed_s = median_s(partial(timed, partial(linear, rows, weight)), budget_s / len(ladder), least_rounds=3)
        if elapsed_s < 0.9 * best[0]:
            best = (elapsed_s, count)
    torch.set_num_threads(before)
    return best[1]
