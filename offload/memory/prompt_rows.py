"""The rows of a prompt pass: as many as can be computed while the link delivers its weights.

With fewer rows the link is the slower side, and every token pays for more of a pass; with more
nothing is gained, and they take memory from the layers that stay. All decoders, plans and benches
use this one decision. No torch, no clock. Invariant: a plan with more rows than usual is within its
budgets, and its passes move hardly more bytes.
"""

import math
from collections.abc import Callable, Iterator

from offload.checkpoint.sizes import ModelShape
from offload.errors import UserError
from offload.memory.plan import MemoryPlan, Rates
from offload.memory.sizes import PROMPT_ROWS

# Rows of a prompt's pass where memory has no room for the usual ones.
_LEAST_ROWS = 128
_STEP_ROWS = 64
# Bytes of a pass over those with the usual rows, at most. Layers that make way for rows are missing
# in every later pass too: a prompt of 4,096 positions saves seven passes at most, so the loss per
# pass must be a few hundredths.
_MOST_MORE = 1.05
# Times the rows that balance: a prompt that is a little longer than one pass would take another
# whole one, and rates are wrong by tens of percent, by attention and by the noise of a measurement.
_LONGER = 1.5


# A GPU that was not measured: 16 lanes of PCIe 4 and an L40, at the shares that `planning.hardware`
# assumes. Others are within a factor of 2.5, and twice the rows cost a few hundredths of a pass.
USUAL_GPU = Rates(25e9, 0.6 * 181e12)


def wanted_rows(link_s: float, row_s: float, context: int) -> int:
    """Return the rows, in whole steps, that compute for somewhat longer than the link needs."""
    return min(context, max(1, math.ceil(_LONGER * link_s / row_s / _STEP_ROWS)) * _STEP_ROWS)


def with_prompt_rows(
    plan_of: Callable[[int], MemoryPlan], shape: ModelShape, context: int, rates: Rates | None
) -> MemoryPlan:
    """Return the plan with as many prompt rows in a pass as pay; the usual ones without rates.

    `plan_of` takes rows and raises `UserError` where they do not fit; so does this for the fewest.
    """
    usual = _first_that_fits(plan_of, min(PROMPT_ROWS, context))
    if rates is None or not gains_by_rows(usual):
        return usual
    disk_s = usual.pass_disk_bytes / rates.disk_bytes_per_s
    link_s = max(usual.pass_bytes / rates.link_bytes_per_s, disk_s)
    for rows in _parts(wanted_rows(link_s, row_s(shape, rates.flops_per_s), context)):
        try:
            plan = plan_of(rows)
        except UserError:
            continue
        if plan.pass_bytes <= _MOST_MORE * usual.pass_bytes:
            return plan
    return usual


def gains_by_rows(usual: MemoryPlan) -> bool:
    """Return True if more rows than usual could make a better plan."""
    return (
        usual.is_streamed
        and usual.max_prompt_rows == PROMPT_ROWS < usual.context
        and not usual.source_tokens
    )


def row_s(shape: ModelShape, flops_per_s: float) -> float:
    """Return the seconds of each further row in the layers; of a prompt one row is scored."""
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
    """Yield rows that take a wanted pass in one, two, three ... passes, while more than usual."""
    num_parts = 1
    while (rows := math.ceil(wanted / num_parts / _STEP_ROWS) * _STEP_ROWS) > PROMPT_ROWS:
        yield min(rows, wanted)
        num_parts += 1
