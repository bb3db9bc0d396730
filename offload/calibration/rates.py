"""How fast a CPU multiplies and its link reads, on which the rows of a prompt's pass depend.

Both rates are needed before memory is planned; a GPU is assumed to have usual ones, see
`memory.prompt_rows`. The rate of products is kept on disk, so that a plan need not import torch. A
load imports it anyway and measures again: the fastest rate stays, since a busy machine only slows.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from offload.calibration import link
from offload.checkpoint.checkpoint import ModelFiles, compute_dtype_name
from offload.checkpoint.files import cache_folder, read_small, write_whole
from offload.checkpoint.spec import versions
from offload.errors import UserError
from offload.machine import cpu_name, num_cores
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


class KeptRate(msgspec.Struct, frozen=True):
    """How fast products are on a machine, as it is kept.

    Attributes:
        conditions: processor, cores, threads, type, versions; all that the rate depends on.
        flops_per_s: the fastest that was measured.
        source: how the rate is known.
    """

    conditions: tuple[str, ...]
    flops_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e18)]
    source: str = "measured"


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
    flops_per_s = known_flops_per_s(
        compute_dtype_name(files.target, budget.dtype), num_threads or num_cores()
    )
    return replace(budget, rates=Rates(read, flops_per_s))


def known_flops_per_s(dtype: str, num_threads: int) -> float:
    """Return the rate of a CPU's products: as it is kept, or measured where torch is there anyway."""
    cores = f"{num_cores()} cores"
    conditions = (cpu_name(), cores, f"{num_threads} threads", dtype, *versions())
    path = _rate_file(conditions)
    kept = _kept_rate(path, conditions)
    if kept and "torch" not in sys.modules:
        return kept
    fastest = max(kept, product_flops_per_s(dtype, num_threads))
    if path is not None and fastest > kept:
        with suppress(OSError):  # it is measured again then
            write_whole(path, msgspec.json.encode(KeptRate(conditions, fastest)).decode())
    return fastest


def _rate_file(conditions: tuple[str, ...]) -> Path | None:
    key = blake2b(repr(conditions).encode(), digest_size=16).hexdigest()
    try:
        return cache_folder() / "rates" / f"{key}.json"
    except UserError:  # no home
        return None


def _kept_rate(path: Path | None, conditions: tuple[str, ...]) -> float:
    """Return the rate in a file; 0 where there is none that holds."""
    try:
        kept = msgspec.json.decode(read_small(path) if path else "", type=KeptRate)
    except (OSError, ValueError):
        return 0.0
    return kept.flops_per_s if kept.conditions == conditions else 0.0


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
    """Return a timer for a product of `num_rows` rows and a (width, width) matrix."""
    import torch
    from torch.nn.functional import linear

    from offload.model.wide_products import product_for

    placed = {"dtype": getattr(torch, dtype), "device": torch_device}
    weight = torch.ones(width, width, **placed)
    rows = torch.ones(num_rows, width, **placed)
    multiply = product_for(linear, rows)
    # a number on the host is the sign that a device is done as well
    return partial(timed, lambda: float(multiply(rows, weight)[0, 0]))
