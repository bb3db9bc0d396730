"""The bill of a step on a GPU, played through with the slot cycle that runs use, on a clock that is only counted.

The link fills slots in their order as they come free, also while a tree grows; each layer is computed when it is there.
"""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from test_device_planner import SHAPES

from offload.memory.plan import MemoryPlan
from offload.memory.planner import Budgets, make_plan
from offload.planning.cost_model import (
    DRAFT_OVERHEAD_S,
    KERNEL_S,
    KERNELS_PER_LAYER,
    LAUNCH_S,
    NOTHING,
    REPLAYED_KERNELS,
    Costs,
    StepTime,
    Traffic,
    costs_on,
    step_time,
)
from offload.planning.hardware import KNOWN, Hardware
from offload.streaming.stage import Stage
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape, Shape, best_first, chain

TREES = {"none": chain(0), "static": best_first(DEFAULT_ACCEPTANCE, 768, 24), "dynamic": DynamicShape(768, 32),
         "large": DynamicShape(2048, 32)}  # fmt: skip
MACHINES = ("l40", "a100-80gb", "h100")  # of which each has room for a part of the target


def opened(machine: Hardware, shape: Shape) -> tuple[Costs, MemoryPlan]:
    target, draft = SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    costs = costs_on(machine, target, draft, 2048)
    budgets = Budgets(machine.ram_bytes, machine.gpu_bytes)
    return costs, make_plan(target, draft, budgets, context=4096, num_nodes=shape.num_nodes)


def played_s(plan: MemoryPlan, costs: Costs, step: StepTime, num_steps: int = 4) -> float:
    """Seconds of a step, after the first one; what neither drafts nor computes layers stands between the sweeps."""
    link_at = now = 0.0

    def carry(block: int, _: torch.Tensor, free: float | None) -> list["Future[float]"]:
        nonlocal link_at
        link_at = max(link_at, free or 0.0) + plan.layer_bytes[block] / costs.link_bytes_per_s
        arrives = Future[float]()
        arrives.set_result(link_at)
        return [arrives]

    num_layers, ends = len(plan.layer_bytes), list[float]()
    streamed = [layer for layer in range(num_layers) if not plan.is_resident[layer]]
    stage = Stage(carry, streamed, [torch.empty(0)] * plan.num_slots)
    stage.start()
    for _ in range(num_steps):
        now += step.draft_s + step.host_s + step.verify_s
        for layer in range(num_layers):
            if layer in streamed:
                now = max(now, stage.acquire(layer).ready)
            now += step.compute_s / num_layers
            if layer in streamed:
                stage.release(layer, now)
        ends.append(now)
    return (ends[-1] - ends[0]) / (num_steps - 1)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tree", TREES)
def test_a_step_takes_what_playing_it_through_says(tree: str, machine: str) -> None:
    shape, hardware = TREES[tree], KNOWN[machine]
    costs, plan = opened(hardware, shape)
    step = step_time(costs, Traffic.of(plan, hardware), shape)
    seen_s = played_s(plan, costs, step)
    assert step.total_s == pytest.approx(seen_s, rel=0.01)
    if tree != "none":  # as if nothing were hidden behind drafting, and as if all of it were
        wrong = [Traffic.of(plan, hardware)._replace(slots_bytes=slots_bytes) for slots_bytes in (0, 1 << 60)]
        wrong_s = [step_time(costs, one, shape).total_s for one in wrong]
        assert any(one_s != pytest.approx(seen_s, rel=0.01) for one_s in wrong_s)


def test_slots_beyond_what_drafting_takes_gain_nothing() -> None:
    """A layer that stays and a slot that fills while a tree grows are worth the same, so slots are few."""
    shape, hardware = TREES["dynamic"], KNOWN["l40"]
    costs, plan = opened(hardware, shape)
    step = step_time(costs, Traffic.of(plan, hardware), shape)
    resident = [layer for layer, is_resident in enumerate(plan.is_resident) if is_resident]
    tier_L = list(plan.tier_L)
    tier_L[resident[len(resident) // 2]] = next(tier for tier in tier_L if tier != plan.tier_L[resident[0]])
    other = replace(plan, tier_L=tuple(tier_L), num_slots=plan.num_slots + 1)
    assert other.num_resident == plan.num_resident - 1
    assert played_s(other, costs, step) == pytest.approx(played_s(plan, costs, step), rel=1e-3)


def test_every_term_is_in_the_bill() -> None:
    """Each of them left out makes the step shorter."""
    shape, hardware = TREES["dynamic"], KNOWN["l40"]
    costs, plan = opened(hardware, shape)
    traffic = Traffic.of(plan, hardware)
    whole = step_time(costs, traffic, shape)
    for name, less in {"grow_s": NOTHING, "host_s": NOTHING, "draft_step_s": NOTHING, "ends_share": 0.0,
                       "verify_s": 0.0}.items():  # fmt: skip
        assert step_time(replace(costs, **{name: less}), traffic, shape).total_s < whole.total_s, name


def test_kernels_are_launched_or_replayed() -> None:
    """A small draft's pass is no quicker than its kernels; a recorded one waits for no host."""
    fast = replace(KNOWN["h200"], memory_bytes_per_s=1e18, flops_per_s=1e21)
    target, draft = SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    costs, num_kernels = costs_on(fast, target, draft, 0), 32 * REPLAYED_KERNELS
    for rows, kernel_s in ((1, KERNEL_S), (128, KERNEL_S), (129, LAUNCH_S), (512, LAUNCH_S)):
        assert costs.draft_step_s.at(rows) == pytest.approx(DRAFT_OVERHEAD_S + num_kernels * kernel_s, rel=1e-3)
    for rows in (1, 2048):
        assert costs.compute_s.at(rows) == pytest.approx(80 * KERNELS_PER_LAYER * LAUNCH_S, rel=1e-3)
    host = replace(fast, gpu_bytes=None, link_bytes_per_s=None)
    assert costs_on(host, target, None, 0).compute_s.at(1) < 1e-3, "a CPU launches nothing"
