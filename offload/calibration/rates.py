"""What this machine does in a second, as far as the rows of a prompt's pass depend on it: before memory is planned.

On a CPU products are timed, and the link on the very files; of a GPU usual rates are taken, see `memory.prompt_rows`.
"""

from dataclasses import replace
from functools import partial

from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.hub import is_here
from offload.checkpoint.safetensors import compute_dtype_name
from offload.memory.plan import INNER_ROWS
from offload.memory.planner import Files
from offload.memory.prompt_rows import Rates, gains_by_rows
from offload.planning.room import Room
from offload.threads.cores import num_cores
from offload.timer import fastest_s, timed

_WIDTH = 1024  # of the matrix: larger ones are no quicker, and take longer
_BUDGET_S = 0.02


def with_rates(
    room: Room, files: Files, num_nodes: int, *, num_threads: int | None = None,
    limit_bytes_per_s: float | None = None, disk_bytes_per_s: float | None = None,
) -> Room:  # fmt: skip
    """The same room with the rates of this machine's CPU, where plans for so many nodes may gain by them.

    `limit_bytes_per_s` is what the link is slowed down to, `disk_bytes_per_s` what it is said to be. Raises `UserError`
    where there is too little memory.
    """
    if room.gpu is not None or room.rates is not None or not (disk_bytes_per_s or is_here(files.target)):
        return room
    if not gains_by_rows(room.plan(files, num_nodes)):
        return room
    link = disk_bytes_per_s or link_bytes_per_s(files.target.shards, limit_bytes_per_s=limit_bytes_per_s)
    flops_per_s = product_flops_per_s(compute_dtype_name(files.target, room.dtype), num_threads or num_cores())
    return replace(room, rates=Rates(link, flops_per_s))


def product_flops_per_s(dtype: str, num_threads: int) -> float:
    """Undisturbed, of products of as many rows as one has at most on a CPU: a busy second would stay in the plan."""
    import torch  # plans of machines elsewhere are made without it
    from torch.nn.functional import linear

    kind = getattr(torch, dtype)
    weight, rows = torch.ones(_WIDTH, _WIDTH, dtype=kind), torch.ones(INNER_ROWS, _WIDTH, dtype=kind)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        linear(rows, weight)  # the first is not like the others
        seconds = fastest_s(partial(timed, partial(linear, rows, weight)), _BUDGET_S, least_rounds=3)
    finally:
        torch.set_num_threads(before)
    return 2 * INNER_ROWS * _WIDTH**2 / seconds
