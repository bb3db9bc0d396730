"""How many rows a pass over a prompt has: as many as are computed while the link delivers what the
pass needs.

With fewer the link is the slower side, and every token pays for more of a pass; more gain nothing
and take memory from the layers that stay. This is the one place that decides it, for every decoder,
plan and bench. No torch, no clock.
Invariant: a plan with more rows than usual is within its budgets, and a pass of it moves hardly
more.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from offload.checkpoint.sizes import ModelShape
from offload.errors import UserError
from offload.memory.plan import PROMPT_ROWS, MemoryPlan

_LEAST_ROWS = 128  # where memory has no room for the usual ones
_STEP_ROWS = 64
# Layers that make way for rows are missed in every pass, with which a text is written as well: a
# prompt that fills 4,096 positions saves seven passes at most, so what a pass loses must be a few
# hundredths of it.
_MOST_MORE = 1.05  # times the bytes of a pass


# Times the rows that balance: a prompt that is a little longer than one pass would take another
# whole one, and rates are wrong by tens of percent, by attention and by the noise of a measurement.
_LONGER = 1.5


class Rates(NamedTuple):
    """What a machine does in a second."""

    link_bytes_per_s: float  # to where layers are computed
    flops_per_s: float  # of passes of some hundred rows
    # to where the link begins, where that is not the disk itself
    disk_bytes_per_s: float = math.inf


# Of a GPU that nobody has measured yet: 16 lanes of PCIe 4 and an L40, at the shares that
# `planning.hardware` assumes. Others are within a factor of 2.5, and twice the rows cost a few
# hundredths of a pass.
USUAL_GPU = Rates(25e9, 0.6 * 181e12)


def wanted_rows(link_s: float, row_s: float, context: int) -> int:
    """Rows that are computed for somewhat longer than the link needs for a pass, in whole steps."""
    return min(context, max(1, math.ceil(_LONGER * link_s / row_s / _STEP_ROWS)) * _STEP_ROWS)


def with_prompt_rows(
    plan_of: Callable[[int], MemoryPlan], shape: ModelShape, context: int, rates: Rates | None
) -> MemoryPlan:
    """The plan with as many rows of a prompt in a pass as pay.

    Args:
        plan_of: by rows; raises `UserError` where they do not fit beside two layers.
        rates: None where the machine is not known, which leaves the usual number.

    Raises `UserError` where not even the least rows fit.
    """
    usual = _first_that_fits(plan_of, min(PROMPT_ROWS, context))
    if rates is None or not gains_by_rows(usual):
        return usual
    for rows in _parts(
        wanted_rows(_link_s(usual, rates), row_s(shape, rates.flops_per_s), context)
    ):
        try:
            plan = plan_of(rows)
        except UserError:
            continue
        if _pass_bytes(plan) <= _MOST_MORE * _pass_bytes(usual):
            return plan
    return usual


def gains_by_rows(usual: MemoryPlan) -> bool:
    """Whether there may be a better plan than that with the usual rows."""
    return (
        usual.is_streamed
        and usual.max_prompt_rows == PROMPT_ROWS < usual.context
        and not usual.source_tokens
    )


def row_s(shape: ModelShape, flops_per_s: float) -> float:
    """Seconds that one row more takes, of layers alone: of a prompt only the last row is scored."""
    num_weights = shape.layer_weights - (1 - shape.routed_share) * shape.routed_weights
    return 2 * max(1.0, num_weights) / flops_per_s


def _first_that_fits(plan_of: Callable[[int], MemoryPlan], rows: int) -> MemoryPlan:
    while rows > _LEAST_ROWS:
        try:
            return plan_of(rows)
        except UserError:
            rows = max(_LEAST_ROWS, rows // 2)
    return plan_of(rows)


def _parts(wanted: int) -> Iterator[int]:
    """In how many rows to take what would be one pass, in two passes, in three, ... while that is
    more than usual.
    """
    num_parts = 1
    while (rows := math.ceil(wanted / num_parts / _STEP_ROWS) * _STEP_ROWS) > PROMPT_ROWS:
        yield min(rows, wanted)
        num_parts += 1


def _pass_bytes(plan: MemoryPlan) -> int:
    """What a pass of many rows moves: all that does not stay, experts included."""
    return plan.streamed_bytes + (plan.num_experts - plan.num_kept_experts) * plan.expert_slot_bytes


def _link_s(plan: MemoryPlan, rates: Rates) -> float:
    num_disk_experts = max(0, plan.num_experts - plan.num_expert_slots - plan.num_host_expert_slots)
    disk_bytes = plan.disk_streamed_bytes + num_disk_experts * plan.expert_slot_bytes
    return max(_pass_bytes(plan) / rates.link_bytes_per_s, disk_bytes / rates.disk_bytes_per_s)
