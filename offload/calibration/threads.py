"""The thread mode to begin with, from the products that a step consists of; real steps correct it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from offload import machine
from offload.model.streamed import StreamedModel
from offload.model.wide_products import product_for
from offload.rank_roles import find_place
from offload.streaming.device import Device
from offload.thread_waiting import ThreadWaiting
from offload.threads import Mode, StepModes, ThreadPolicy, thread_ladder
from offload.timer import median_s, timed

# rows of a sweep and of a draft step
_TYPICAL_NODES = 64
_TYPICAL_DRAFTED = 8

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


def thread_policy(
    target: StreamedModel,
    draft: StreamedModel | None,
    num_rows: int,
    fixed: int | None,
    device: Device | None,
) -> ThreadPolicy:
    """Return the policy of a run, whose sweeps have so many rows.

    A count that is named is `fixed`, and so is torch's own where a device computes.
    """
    if fixed is None and device is None:
        return pick_threads(target, draft, num_rows)
    return ThreadPolicy.fixed(fixed or torch.get_num_threads())


def pick_threads(
    target: StreamedModel, draft: StreamedModel | None, num_rows: int = _TYPICAL_NODES
) -> ThreadPolicy:
    """Return the policy for this CPU, beginning with the fastest modes for sweeps and drafting.

    `num_rows` are those of a sweep. Ranks on one host compute at the same time, and share its
    cores.
    """
    place = find_place()
    ladder = thread_ladder(
        max(1, machine.num_cores() // (1 if place is None else place.num_on_host))
    )
    sweep = _fastest(ladder, target, num_rows)
    drafting = _fastest(ladder, draft, _TYPICAL_DRAFTED) if draft else sweep
    return ThreadPolicy(
        ladder, StepModes(drafting.mode, sweep.mode), (drafting.seen_s, sweep.seen_s)
    )


def _fastest(ladder: Sequence[int], model: StreamedModel, num_rows: int) -> Fastest:
    width = int(getattr(model.meta_model.config, "hidden_size", 0) or 1024)
    multiply = product_for(linear, torch.empty(0, dtype=model.dtype))
    return fastest_mode(ladder, num_rows, min(width, 4096), model.dtype, multiply=multiply)
