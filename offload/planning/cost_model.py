"""The seconds of a decoding step with any tree, from curves that were measured or derived.

A sweep takes as long as its slower side: computing, which grows with the tree, or the link, which
does not and fills the free slots while drafting goes on. Full slots wait, though, for the first
layer to be computed, and computing waits for the last one to arrive: these ends hide behind nothing.
Experts that a sweep reads on demand come only once a router has asked for them, and computing waits
for most of their bytes.

Curves belong to a machine, bytes to a memory plan, hence the same curves serve every budget. No
torch, no clock. Invariant: a prediction is never shorter than either side alone needs.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from offload.checkpoint.sizes import ModelShape
from offload.errors import ensure
from offload.memory.plan import MemoryPlan
from offload.memory.sizes import MAX_LOGITS_ROWS
from offload.planning.expert_traffic import ExpertRouting, ExpertTraffic
from offload.planning.hardware import Hardware
from offload.trees.topology import PACES, SIZES, DynamicShape, Shape

Limit = Literal["link", "disk", "compute", "draft"]
# The time of a draft step beside its weights, its kernels and the host's growing of the tree: masks
# and positions are sent, children ranked and drawn, some 60 launches around a recorded pass, and
# the host waits twice. Estimated at 1 to 2 ms.
DRAFT_OVERHEAD_S = 1.5e-3
# The time of a step's verification: the accepted path is walked, committed to both caches and
# learnt from, some 100 launches and two waits. Estimated.
VERIFY_S = 2e-3
# The host's part of growing a dynamic tree, for each pass: sorting and cutting candidates, in
# numpy. Measured with scores at hand (a thread's own time, trees of 64 to 2,048 nodes).
GROW_S = 0.35e-3
GROW_NODE_S = 0.95e-6
# Before the first layer: tables that tell each row its path. Measured in the same way for
# `model.path_attention`.
_TABLES_S = ((64, 0.2e-3), (768, 1.5e-3), (2048, 6e-3))
# A layer of Llama is 26 kernels, and 40 where products are made in parts of 256 rows (counted at
# 768 rows on a card that is not there, as a test does that lets no family have more than 60). A
# Python thread takes 6 to 10 us to launch one; one that is replayed takes 2 us at least (assumed).
REPLAYED_KERNELS = 26
KERNELS_PER_LAYER = 40
LAUNCH_S = 8e-6
KERNEL_S = 2e-6
_REPLAYED_ROWS = 128  # of the widest pass that is recorded, see `model.cuda_graphs`
# launches, draws and the wait for each chunk of rows of logits; estimated
_CHUNK_S = 0.3e-3
_NUM_ENDS = 2  # the first layer of a sweep, and its last
_EXPANDED_BYTES = 2  # of one number that is computed with
_FAR_ROWS = 1 << 16  # the last point of a curve, beyond any tree
# Reading on demand: experts that have arrived compute while the rest comes, and readers run dry at
# the end of every layer. Assumed.
WAITING_PENALTY = 0.9
DEMAND_RATE = 0.9
# How much the time of unused reads counts, since processors and the disk have other work.
_WASTE = 0.25
NEVER = 1 << 30  # rows that no pass has
_FINITE = 1e300
Positive = Annotated[float, Meta(gt=0, le=_FINITE)]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds against a size: linear between known sizes, with the last slope beyond them."""

    sizes: tuple[Annotated[int, Meta(ge=1, le=2**63 - 1)], ...]  # rising
    seconds: tuple[Annotated[float, Meta(le=_FINITE)], ...]

    def __post_init__(self) -> None:
        is_rising = all(a < b for a, b in pairwise(self.sizes))
        is_whole = 0 < len(self.sizes) == len(self.seconds)
        ensure(is_whole and is_rising, "a curve needs rising sizes, each a time")

    def at(self, size: float) -> float:
        """Return the seconds at `size`, which need not have been measured."""
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return self.seconds[0]
        hi = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        x0, x1 = self.sizes[hi - 1 : hi + 1]
        y0, y1 = self.seconds[hi - 1 : hi + 1]
        slope = (y1 - y0) / (x1 - x0)
        return y1 + slope * (size - x1) if size <= x1 else y1 + max(0.0, slope) * (size - x1)

    def total(self, sizes: Sequence[int]) -> float:
        """Return the seconds of all sizes together; each different one is looked up once."""
        known = {size: self.at(size) for size in set(sizes)}
        return sum(known[size] for size in sizes)

    def times(self, ratio: float) -> "Curve":
        """Return the curve of times so much longer."""
        return Curve(self.sizes, tuple(ratio * seconds for seconds in self.seconds))

    def plus(self, other: "Curve") -> "Curve":
        """Return the sum of both curves."""
        sizes = tuple(sorted({*self.sizes, *other.sizes}))
        return Curve(sizes, tuple(self.at(size) + other.at(size) for size in sizes))


NOTHING = Curve((1,), (0.0,))  # no time, or none that is known


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The curves of one pair of models on one machine."""

    compute_s: Curve  # a sweep against its rows, when it never waits for the link
    draft_step_s: Curve  # a draft step against its rows
    verify_s: Annotated[float, Meta(ge=0, le=_FINITE)]  # of one step
    link_bytes_per_s: Positive
    # The other terms are for data sheets; measured curves include them.
    grow_s: Curve = NOTHING  # the host's part of a dynamic tree's draft step, against its nodes
    host_s: Curve = NOTHING  # what the host does in a step while nothing computes, against rows
    ends_share: float = 0.0  # the part of a sweep's computing at its ends, which nothing hides


class Traffic(NamedTuple):
    """The bytes that a memory plan moves in a sweep."""

    streamed_bytes: int  # by every sweep, without experts on demand
    slots_bytes: int  # what can be there before a sweep starts
    is_disk_slower: bool = False  # than the link to the GPU, so that a sweep waits for the disk
    experts: ExpertTraffic | None = None  # where they are read on demand
    prompt_rows: int = 0  # that a pass takes in of a prompt
    draft_experts: ExpertTraffic | None = None  # of a draft whose experts are read on demand

    @classmethod
    def from_plan(cls, plan: MemoryPlan, hardware: Hardware | None = None) -> "Traffic":
        """Return the traffic of a plan.

        Where the machine's disk is slower than its link, the bytes are those that the link could
        carry meanwhile.
        """
        slots_bytes = plan.num_layer_slots * plan.layer_slot_bytes
        link_bytes = int(plan.disk_streamed_bytes * hardware.link_over_disk) if hardware else 0
        experts = ExpertTraffic.from_plan(plan, hardware) if plan.has_experts else None
        is_disk_slower = link_bytes > plan.streamed_bytes or (
            experts is not None and experts.is_disk_slower
        )
        return cls(
            max(plan.streamed_bytes, link_bytes),
            slots_bytes,
            is_disk_slower,
            experts,
            plan.max_prompt_rows,
            ExpertTraffic.of_draft(plan),
        )

    @property
    def is_streamed(self) -> bool:
        """Return True if a sweep may have to wait for any bytes."""
        return self.streamed_bytes > 0 or (
            self.experts is not None and self.experts.whole_bytes > 0
        )

    def bytes_at(self, num_rows: float) -> float:
        """Return the bytes of a sweep of `num_rows` rows that reads the experts it needs."""
        return self.streamed_bytes + (self.experts.bytes_at(num_rows) if self.experts else 0.0)

    def routed_by(self, routing: ExpertRouting | None) -> "Traffic":
        """Return this traffic for a text whose routing is known; `None` keeps the usual routing."""
        if self.experts is None or routing is None:
            return self
        return self._replace(experts=self.experts._replace(routing=routing))

    def ahead_rows(self, costs: "Costs | None") -> int:
        """Return the least rows for which prefetching all experts is better, or `NEVER`."""
        if self.experts is None:
            return NEVER
        known = link_alone(1.0) if costs is None else costs

        def is_ahead(num_rows: int) -> bool:
            sweeps = _possible_sweeps(known, self, num_rows, 0.0)
            return _best_sweep(sweeps) is sweeps[-1]

        if not is_ahead(_FAR_ROWS):
            return NEVER
        return bisect_left(range(_FAR_ROWS), True, lo=1, key=is_ahead)


class StepTime(NamedTuple):
    """The parts of one step."""

    draft_s: float
    compute_s: float
    link_s: float  # what the link still needs when the sweep begins
    verify_s: float
    is_disk_slower: bool = False  # than the link to the GPU
    asked_s: float = 0.0  # part of `link_s`: experts that routers have to ask for
    host_s: float = 0.0  # before the sweep, and between chunks of logits
    ends_s: float = 0.0  # computing by which a sweep is longer than the link needs

    @property
    def sweep_s(self) -> float:
        unasked_s = self.link_s - self.asked_s
        unasked_s += self.ends_s if unasked_s > 0 else 0.0
        dense_s = max(self.compute_s, unasked_s)
        return overlapped_s(dense_s, self.asked_s, WAITING_PENALTY)

    @property
    def total_s(self) -> float:
        return self.draft_s + self.host_s + self.sweep_s + self.verify_s

    @property
    def limit(self) -> Limit:
        """Return the longest term."""
        if self.draft_s > max(self.link_s, self.compute_s):
            return "draft"
        if self.link_s <= self.compute_s:
            return "compute"
        return "disk" if self.is_disk_slower else "link"


def step_time(costs: Costs, traffic: Traffic, shape: Shape, num_texts: int = 1) -> StepTime:
    """Return the time of one step with trees of this shape or bounds, one for each text."""
    widths = [num_texts * width for width in shape.draft_widths]
    num_rows = num_texts * shape.num_nodes
    return step_of(costs, traffic, num_rows, widths, is_grown=isinstance(shape, DynamicShape))


def step_of(
    costs: Costs, traffic: Traffic, num_rows: int, widths: Sequence[int], *, is_grown: bool = False
) -> StepTime:
    """Return the time of one step from the rows of its sweep and of each of its draft steps."""
    grow_s = len(widths) * costs.grow_s.at(num_rows) if is_grown else 0.0
    draft_s = costs.draft_step_s.total(widths) + grow_s
    host_s = costs.host_s.at(num_rows)
    hidden_s = min(draft_s + host_s + costs.verify_s, traffic.slots_bytes / costs.link_bytes_per_s)
    return _best_sweep(_possible_sweeps(costs, traffic, num_rows, hidden_s))._replace(
        draft_s=draft_s, host_s=host_s
    )


def with_draft_reads(costs: Costs, traffic: Traffic | None) -> Costs:
    """Return the costs of a draft whose steps also wait for experts that come on demand."""
    experts = None if traffic is None else traffic.draft_experts
    if experts is None:
        return costs
    rate = DEMAND_RATE * costs.link_bytes_per_s
    read_s = Curve(SIZES, tuple(experts.bytes_at(num_rows) / rate for num_rows in SIZES))
    return replace(costs, draft_step_s=costs.draft_step_s.plus(read_s))


def _best_sweep(sweeps: Sequence[StepTime]) -> StepTime:
    """Prefetch experts only if the time saved exceeds the cost of unused reads."""
    demand = sweeps[0]
    ahead = sweeps[-1]
    unused_s = max(0.0, ahead.link_s - demand.link_s)
    return ahead if demand.sweep_s - ahead.sweep_s > _WASTE * unused_s else demand


def _possible_sweeps(
    costs: Costs, traffic: Traffic, num_rows: int, hidden_s: float
) -> list[StepTime]:
    """Return the possible sweeps: one, or two with experts, whose bytes no drafting hides."""
    link_s = max(0.0, traffic.streamed_bytes / costs.link_bytes_per_s - hidden_s)
    compute_s = costs.compute_s.at(num_rows)
    fixed = (costs.verify_s, traffic.is_disk_slower)
    if traffic.experts is None:
        return [StepTime(0.0, compute_s, link_s, *fixed, ends_s=costs.ends_share * compute_s)]
    asked_s = traffic.experts.bytes_at(num_rows) / (DEMAND_RATE * costs.link_bytes_per_s)
    ahead_s = traffic.experts.whole_bytes / costs.link_bytes_per_s
    demand = StepTime(0.0, compute_s, link_s + asked_s, *fixed, asked_s)
    return [demand, StepTime(0.0, compute_s, link_s + ahead_s, *fixed)]


class PromptPass(NamedTuple):
    """A pass that takes in as many prompt tokens as it can."""

    rows_per_pass: int
    pass_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.rows_per_pass / self.pass_s

    def as_dict(self) -> dict[str, float]:
        """Return the figures for `--json`."""
        return {**self._asdict(), "tokens_per_s": self.tokens_per_s}


def prompt_pass(costs: Costs, traffic: Traffic, num_rows: int) -> PromptPass:
    """Return a pass in the middle of a long prompt, where no drafting hides anything."""
    return PromptPass(
        num_rows, _best_sweep(_possible_sweeps(costs, traffic, num_rows, 0.0)).sweep_s
    )


def paced(bounds: DynamicShape, costs: Costs) -> DynamicShape:
    """Return the bounds with the growth pace that takes the least time; of equals, fewer rows."""
    shapes = [replace(bounds, pace=pace) for pace in PACES]
    return min(shapes, key=lambda shape: costs.draft_step_s.total(shape.draft_widths))


def overlapped_s(one_s: float, other_s: float, penalty: float) -> float:
    """Return the time of two things that run in parallel: the norm of order 1 / penalty.

    With penalty 0 the shorter one costs nothing; with 1 they take turns.
    """
    longer_s = max(one_s, other_s)
    if not penalty or not longer_s:
        return longer_s
    return longer_s * (1 + (min(one_s, other_s) / longer_s) ** (1 / penalty)) ** penalty


class Prediction(NamedTuple):
    """The expected cost of decoding with one tree."""

    label: str  # its name for `--tree`
    shape: Shape  # bounds, if the tree is dynamic
    step: StepTime
    tokens_range: tuple[float, float]  # least and most tokens per sweep

    @property
    def tokens_per_sweep(self) -> float:
        """Return G(n, d): the geometric mean of the range."""
        low, high = self.tokens_range
        return low if low == high else math.sqrt(low * high)

    @property
    def s_per_token(self) -> float:
        return self.step.total_s / self.tokens_per_sweep

    @property
    def s_per_token_range(self) -> tuple[float, float]:
        low, high = self.tokens_range
        return self.step.total_s / high, self.step.total_s / low

    def as_dict(self) -> dict[str, object]:
        """Return the figures under the names of `--json`."""
        shown = ("tokens_per_sweep", "s_per_token", "s_per_token_range")
        terms = ("limit", "draft_s", "host_s", "compute_s", "ends_s", "link_s", "verify_s")
        return {
            **{"tree": self.label, "num_nodes": self.shape.num_nodes, "depth": self.shape.depth},
            **{name: getattr(self, name) for name in shown},
            **{name: getattr(self.step, name) for name in terms},
            "tokens_per_sweep_range": self.tokens_range,
            "step_s": self.step.total_s,
        }


FILLED_SHARE = 0.5  # share of the context whose keys and values a pass reads on average


def costs_on(
    hardware: Hardware, target: ModelShape, draft: ModelShape | None, num_positions: int
) -> Costs:
    """Return the costs on a described machine; a pass reads keys and values of `num_positions`."""
    steps = (
        _pass_curve(hardware, draft, num_positions, replayed_rows=_REPLAYED_ROWS)
        if draft
        else NOTHING
    )
    sizes = (1, *(rows for rows, _ in _TABLES_S))
    return Costs(
        compute_s=_pass_curve(hardware, target, num_positions),
        draft_step_s=Curve(
            steps.sizes, tuple(seconds + DRAFT_OVERHEAD_S for seconds in steps.seconds)
        ),
        verify_s=VERIFY_S,
        link_bytes_per_s=hardware.feed_bytes_per_s,
        grow_s=Curve(sizes, tuple(GROW_S + GROW_NODE_S * rows for rows in sizes)),
        host_s=_host_curve(hardware, target),
        ends_share=_NUM_ENDS / len(target.layer_bytes),
    )


def _host_curve(hardware: Hardware, target: ModelShape) -> Curve:
    """Return a step's waits beside its passes: path tables and chunks of logits on a device.

    A walk down a tree may look at every chunk; the first one is part of the sweep.
    """
    assert hardware.memory_bytes_per_s, "rates of computing are known"
    head_s = target.head_bytes / (hardware.memory_share * hardware.memory_bytes_per_s)
    chunk_s = head_s + _CHUNK_S if hardware.gpu_bytes else 0.0
    tables_s = Curve(
        (1, *(rows for rows, _ in _TABLES_S)), (0.0, *(seconds for _, seconds in _TABLES_S))
    )

    def host_s(rows: int) -> float:
        return tables_s.at(rows) + (math.ceil(rows / MAX_LOGITS_ROWS) - 1) * chunk_s

    sizes = tuple(sorted({*tables_s.sizes, MAX_LOGITS_ROWS}))
    return Curve(sizes, tuple(host_s(rows) for rows in sizes))


def link_alone(link_bytes_per_s: float) -> Costs:
    """Return the costs where computing is unknown: only moving weights takes time."""
    return Costs(
        compute_s=NOTHING, draft_step_s=NOTHING, verify_s=0.0, link_bytes_per_s=link_bytes_per_s
    )


def _pass_curve(
    hardware: Hardware, shape: ModelShape, num_positions: int, *, replayed_rows: int = 0
) -> Curve:
    """Return the time of a pass against its rows: flat while reading dominates, then proportional.

    A row meets k of E routed experts, n rows read n k at most. On a GPU no pass is quicker than its
    kernels are launched, unless it was recorded.
    """
    assert hardware.flops_per_s and hardware.memory_bytes_per_s, "rates of computing are known"
    read_bytes = (
        sum(shape.layer_bytes) + shape.head_bytes + num_positions * shape.kv_bytes_per_token
    )
    num_row_weights = shape.num_weights - (1 - shape.routed_share) * shape.routed_weights
    row_s = 2 * num_row_weights / (hardware.flops_share * hardware.flops_per_s)
    bytes_per_s = hardware.memory_share * hardware.memory_bytes_per_s
    expanded_bytes = 2 * _EXPANDED_BYTES * shape.expanded_weights  # written, and read again
    few_rows = 0 if hardware.gpu_bytes else shape.product_rows
    per_layer = REPLAYED_KERNELS if replayed_rows else KERNELS_PER_LAYER
    num_kernels = per_layer * len(shape.layer_bytes) if hardware.gpu_bytes else 0

    def pass_s(rows: int) -> float:
        idle_bytes = max(0.0, 1 - rows * shape.routed_share) * shape.routed_bytes
        moved_bytes = read_bytes - idle_bytes + (expanded_bytes if rows > few_rows else 0)
        kernels_s = max(moved_bytes / bytes_per_s, rows * row_s) + num_kernels * KERNEL_S
        return kernels_s if rows <= replayed_rows else max(kernels_s, num_kernels * LAUNCH_S)

    bend = int((read_bytes + expanded_bytes) / bytes_per_s / row_s)
    corners = {
        1,
        max(1, few_rows),
        few_rows + 1,
        max(1, replayed_rows),
        replayed_rows + 1,
        math.ceil(1 / shape.routed_share),
        max(2, min(bend, _FAR_ROWS - 1)),
        _FAR_ROWS,
    }
    return Curve(tuple(sorted(corners)), tuple(pass_s(rows) for rows in sorted(corners)))
