"""How fast a CPU multiplies, and its link reads, as far as the rows of a prompt's pass depend on it.

This is asked before memory is planned. For a GPU usual rates are taken, see `memory.prompt_rows`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from offload.calibration import link
from offload.checkpoint.checkpoint import ModelFiles, compute_dtype_name
from offload.errors import UserError
from offload.machine import num_cores
from offload.memory.plan import MemoryBudget, Rates
from offload.memory.planner import plan_memory
from offload.memory.prompt_rows import gains_by_rows
from offload.memory.sizes import INNER_ROWS
from offload.streaming.disk import OpenSource
from offload.timer import fastest_s, timed

if TYPE_CHECKING:
    import torch

_WIDTH = 1024  # of the matrix: larger ones are no quicker, and take longer
_BUDGET_S = 0.02


def with_rates(
    budget: MemoryBudget,
    files: ModelFiles,
    num_nodes: int,
    *,
    num_threads: int | None,
    limit_bytes_per_s: float | None,
    disk_bytes_per_s: float | None,
    open_source: OpenSource,
) -> MemoryBudget:
    """Return the budget with the rates of this machine's CPU, where plans may gain by them.

    `limit_bytes_per_s` is what the link is slowed down to, `disk_bytes_per_s` what it is said to
    be. A budget that is too small stays as it is: planning refuses it.
    """
    if (
        budget.gpu_bytes is not None
        or budget.rates is not None
        or not (disk_bytes_per_s or files.target.is_here)
    ):
        return budget
    try:
        plan = plan_memory(files, budget, num_nodes)
    except UserError:
        return budget
    if not gains_by_rows(plan):
        return budget
    read = disk_bytes_per_s or link.link_bytes_per_s(
        files.target.shards, limit_bytes_per_s=limit_bytes_per_s, open_source=open_source
    )
    flops_per_s = product_flops_per_s(
        compute_dtype_name(files.target, budget.dtype), num_threads or num_cores()
    )
    return replace(budget, rates=Rates(read, flops_per_s))


def product_flops_per_s(dtype: str, num_threads: int) -> float:
    """Return the undisturbed rate of a CPU's largest products; a busy second would stay."""
    import torch  # plans of machines elsewhere are made without it

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        measure = product_timer(dtype, INNER_ROWS, _WIDTH)
        measure()  # the first is not like the others
        seconds = fastest_s(measure, _BUDGET_S, least_rounds=3)
    finally:
        torch.set_num_threads(before)
    return 2 * INNER_ROWS * _WIDTH**2 / seconds


def product_timer(
    dtype: str, num_rows: int, width: int, torch_device: "torch.device | str" = "cpu"
) -> Callable[[], float]:
    """Return what times a product of `num_rows` rows and a (width, width) matrix."""
    import torch
    from torch.nn.functional import linear

    from offload.model.wide_products import product_for

    how = {"dtype": getattr(torch, dtype), "device": torch_device}
    weight = torch.ones(width, width, **how)
    rows = torch.ones(num_rows, width, **how)
    multiply = product_for(linear, rows)
    # a number on the host is the sign that a device is done as well
    return partial(timed, lambda: float(multiply(rows, weight)[0, 0]))
