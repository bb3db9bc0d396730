"""Seconds per token before the first sweep: a GPU's figures become costs, and costs become the terms of a step.

One model of time serves all: `costs.step_time` on curves, which come from measuring where the machine is at hand and
from here where it is not. A pass reads its weights from the GPU's memory or multiplies them with its rows, whichever
takes longer; layers that do not stay come over the link meanwhile.

No torch, no clock.
"""

import math
from typing import NamedTuple

from offload.checkpoint.sizes import ModelShape
from offload.memory.plan import MemoryPlan
from offload.planning.cost_model import Costs, Curve, StepTime, Traffic, step_time
from offload.planning.hardware import Hardware
from offload.tree.topology import Shape

# Launching, sorting and drawing of one draft step, most of it replayed from a captured graph, and of one verification.
# Assumed: of the size of ten kernels a layer at some microseconds each; a step of a second does not notice.
DRAFT_OVERHEAD_S, VERIFY_S = 1e-3, 2e-3
_FAR_ROWS = 1 << 16  # of the last point of a curve, beyond any tree


class Prediction(NamedTuple):
    """What decoding with one tree will cost."""

    label: str  # as `--tree` names it
    shape: Shape
    tokens_per_sweep: float
    step: StepTime
    is_disk_slower: bool  # than the link to the GPU

    @property
    def s_per_token(self) -> float:
        """The figure that counts."""
        return self.step.total_s / self.tokens_per_sweep

    @property
    def limit(self) -> str:
        """The longest term: link, disk, compute or draft."""
        if self.step.draft_s > max(self.step.link_s, self.step.compute_s):
            return "draft"
        return "disk" if self.step.limit == "link" and self.is_disk_slower else self.step.limit

    def as_dict(self) -> dict[str, object]:
        """The figures by the names that `--json` uses."""
        tree = {"tree": self.label, "num_nodes": self.shape.num_nodes, "depth": self.shape.depth}
        figures = {"tokens_per_sweep": self.tokens_per_sweep, "s_per_token": self.s_per_token, "limit": self.limit}
        return {**tree, **figures, **self.step._asdict(), "step_s": self.step.total_s}


def predict(
    label: str,
    costs: Costs,
    traffic: Traffic,
    shape: Shape,
    tokens_per_sweep: float,
    *,
    is_disk_slower: bool = False,
) -> Prediction:
    """One tree on one machine; the last argument only names the slower link."""
    return Prediction(label, shape, tokens_per_sweep, step_time(costs, traffic, shape), is_disk_slower)


def costs_on(hardware: Hardware, target: ModelShape, draft: ModelShape | None, num_positions: int) -> Costs:
    """What a GPU's figures make of two models.

    Args:
        num_positions: whose keys and values every pass reads.
    """
    steps = _pass_curve(hardware, draft, num_positions) if draft else Curve((1,), (0.0,))
    return Costs(
        compute_s=_pass_curve(hardware, target, num_positions),
        draft_step_s=Curve(steps.sizes, tuple(seconds + DRAFT_OVERHEAD_S for seconds in steps.seconds)),
        verify_s=VERIFY_S,
        link_bytes_per_s=hardware.link_bytes_per_s,
    )


def traffic_on(hardware: Hardware, plan: MemoryPlan) -> Traffic:
    """What the link to the GPU carries; where the disk behind it is slower, what it could have carried meanwhile."""
    own = Traffic.of(plan)
    return own._replace(streamed_bytes=max(own.streamed_bytes, _as_link_bytes(hardware, plan.disk_streamed_bytes)))


def is_disk_slower(hardware: Hardware, plan: MemoryPlan) -> bool:
    """Whether a sweep waits for the disk rather than for the link to the GPU."""
    return _as_link_bytes(hardware, plan.disk_streamed_bytes) > plan.streamed_bytes


def _as_link_bytes(hardware: Hardware, disk_bytes: int) -> int:
    return int(disk_bytes * hardware.link_bytes_per_s / hardware.disk_bytes_per_s)


def _pass_curve(hardware: Hardware, shape: ModelShape, num_positions: int) -> Curve:
    """Time of one pass against its rows: flat while reading takes longer than multiplying, then in proportion.

    Of routed experts a row is multiplied with its own k of E, and so many rows read at most so many times k of them.
    The link brings all of them nevertheless: which ones are needed is known only inside the layer.
    """
    read_bytes = sum(shape.layer_bytes) + shape.head_bytes + num_positions * shape.kv_bytes_per_token
    num_row_weights = shape.num_weights - (1 - shape.routed_share) * shape.routed_weights
    row_s = 2 * num_row_weights / (hardware.flops_share * hardware.flops_per_s)

    def pass_s(rows: int) -> float:
        idle_bytes = max(0.0, 1 - rows * shape.routed_share) * shape.routed_bytes
        return max((read_bytes - idle_bytes) / (hardware.memory_share * hardware.memory_bytes_per_s), rows * row_s)

    bend = int(read_bytes / (hardware.memory_share * hardware.memory_bytes_per_s) / row_s)
    corners = {1, math.ceil(1 / shape.routed_share), max(2, min(bend, _FAR_ROWS - 1)), _FAR_ROWS}
    return Curve(tuple(sorted(corners)), tuple(pass_s(rows) for rows in sorted(corners)))
