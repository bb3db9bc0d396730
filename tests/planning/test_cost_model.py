"""What a step costs: sums done by hand, the paper's own figures, and the slot cycle of runs on a counted clock."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expected import expected_tokens
from paper_l40 import PAPER_BASE_S, paper_rows
from plans import make_plan, model_shape
from test_device_planner import SHAPES
from tiny import FAMILIES, build, save

from offload.checkpoint.open import open_checkpoint
from offload.memory.plan import MemoryPlan
from offload.planning.cost_model import (
    DRAFT_OVERHEAD_S,
    KERNEL_S,
    KERNELS_PER_LAYER,
    LAUNCH_S,
    NOTHING,
    REPLAYED_KERNELS,
    VERIFY_S,
    Costs,
    Curve,
    Prediction,
    StepTime,
    Traffic,
    costs_on,
    paced,
    step_time,
)
from offload.planning.hardware import KNOWN, Hardware
from offload.planning.search import MEASURED, range_for
from offload.streaming.slot_cycle import SlotCycle
from offload.trees.topology import DEFAULT_ACCEPTANCE, PACES, DynamicShape, Shape, best_first, chain

GB = 10**9
TOY = Hardware(name="toy", gpu_bytes=48 << 30, memory_bytes_per_s=1e12, flops_per_s=2e14, link_bytes_per_s=20e9,
               ram_bytes=256 * GB, disk_bytes_per_s=4e9, memory_share=0.5, flops_share=0.5)  # fmt: skip


def test_the_papers_l40_is_predicted_from_data_sheets() -> None:
    base, *trees = paper_rows()
    assert base["paper_s"] == PAPER_BASE_S and len(trees) == 6
    for key in ("in_turn", "overlapped"):
        assert base[key] == pytest.approx(PAPER_BASE_S, rel=0.10)
        for row in trees:
            assert row[key] == pytest.approx(row["paper_s"], rel=0.15), row["row"]
    assert all(row["here"] < row["overlapped"] < row["in_turn"] for row in [base, *trees])


def test_a_pass_reads_its_weights_or_multiplies_them() -> None:
    target, draft = SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    costs = costs_on(TOY, target, draft, num_positions=1000)
    weights = sum(target.layer_bytes) + target.head_bytes
    read_s = (weights + 1000 * 80 * 2 * 8 * 128 * 2) / 0.5e12
    kernels_s = 80 * KERNELS_PER_LAYER * KERNEL_S
    assert costs.compute_s.at(1) == costs.compute_s.at(50) == pytest.approx(read_s + kernels_s)
    for rows in (512, 768, 2048):
        assert costs.compute_s.at(rows) == pytest.approx(2 * target.num_weights * rows / 1e14 + kernels_s, rel=0.005)
    assert costs.draft_step_s.at(4) == pytest.approx(
        DRAFT_OVERHEAD_S + (13.2e9 + 1000 * 32 * 8192 * 2) / 0.5e12 + 32 * REPLAYED_KERNELS * KERNEL_S, rel=0.01
    )
    assert costs_on(TOY, target, None, 0).draft_step_s == Curve((1,), (DRAFT_OVERHEAD_S,))
    # A row is multiplied with its own experts and many rows read them all.
    dense = SHAPES["Llama-2-70B"]
    routed = replace(
        dense, routed_weights=dense.num_weights // 2, routed_bytes=dense.num_bytes // 2, routed_share=1 / 8
    )
    costs, all_read = (costs_on(TOY, shape, None, 0).compute_s for shape in (routed, dense))
    row_weights, kernels_s = dense.num_weights / 2 * (1 + 1 / 8), 80 * KERNELS_PER_LAYER * KERNEL_S
    for rows in (1024, 2048):
        assert costs.at(rows) == pytest.approx(2 * row_weights * rows / 1e14 + kernels_s, rel=0.005)
        assert all_read.at(rows) == pytest.approx(2 * dense.num_weights * rows / 1e14 + kernels_s, rel=0.005)
    read_s = (sum(dense.layer_bytes) + dense.head_bytes) / 0.5e12
    for rows, share in ((1, 1 / 8), (4, 4 / 8), (8, 1.0), (50, 1.0)):
        idle_s = (1 - share) * routed.routed_bytes / 0.5e12
        assert costs.at(rows) == pytest.approx(read_s - idle_s + kernels_s), "n rows read at most n times k experts"


@pytest.mark.parametrize(("family", "share"), [("mixtral", 2 / 4), ("qwen3-moe", 2 / 12), ("llama", 1.0)])
def test_experts_are_counted_in_the_headers(family: str, share: float, tmp_path: Path) -> None:
    model = build(FAMILIES[family]())
    shape = model_shape(open_checkpoint(save(model, tmp_path)))
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    assert shape.routed_share == pytest.approx(share) and shape.routed_weights == sum(map(torch.numel, experts))
    assert shape.routed_bytes == 4 * shape.routed_weights < sum(shape.layer_bytes)


def test_a_step_is_drafting_and_the_slower_side() -> None:
    target, draft = SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    memory = make_plan(target, draft, TOY.ram_bytes, TOY.gpu_bytes, context=512, num_nodes=64)
    costs = costs_on(TOY, target, draft, 256)
    traffic, shape = Traffic.from_plan(memory, TOY), best_first([0.7, 0.2, 0.05], 64, 8)
    got = Prediction("64x8", shape, step_time(costs, traffic, shape), (2.0, 8.0))
    slots_s = 3 * memory.layer_slot_bytes / 20e9
    hidden_s, ends_s = min(slots_s, got.step.draft_s + got.step.host_s + VERIFY_S), 2 / 80 * costs.compute_s.at(64)
    assert got.step.draft_s == pytest.approx(8 * costs.draft_step_s.at(1), rel=0.01)
    assert got.step.link_s == pytest.approx(memory.streamed_bytes / 20e9 - hidden_s)
    beside_s = got.step.draft_s + got.step.host_s + VERIFY_S
    assert got.s_per_token == pytest.approx((beside_s + got.step.link_s + ends_s) / 4)
    assert got.s_per_token_range == pytest.approx((got.s_per_token / 2, got.s_per_token * 2))
    assert got.step.limit == got.as_dict()["limit"] == "link" and got.as_dict()["s_per_token"] == got.s_per_token
    slow = replace(costs, draft_step_s=Curve((1,), (2.0,)))
    assert step_time(slow, traffic, chain(9)).limit == "draft"
    quick = replace(costs, link_bytes_per_s=1e15)
    assert step_time(quick, traffic, chain(1)).limit == "compute"
    # The disk sets the pace where it feeds the card too slowly.
    target = SHAPES["Llama-2-70B"]
    memory = make_plan(target, None, 64 * GB, TOY.gpu_bytes, context=512, num_nodes=1)
    assert memory.disk_streamed_bytes > memory.streamed_bytes / 5 and Traffic.from_plan(memory, TOY).is_disk_slower
    traffic = Traffic.from_plan(memory, TOY)
    assert traffic.streamed_bytes / TOY.link_bytes_per_s == pytest.approx(memory.disk_streamed_bytes / 4e9)
    quick = replace(TOY, disk_bytes_per_s=20e9)
    rows = memory.max_prompt_rows
    assert Traffic.from_plan(memory, quick) == Traffic(memory.streamed_bytes, traffic.slots_bytes, prompt_rows=rows)


@pytest.mark.parametrize("num_nodes", [64, 128, 512])
def test_growth_goes_at_the_pace_that_costs_least(num_nodes: int) -> None:
    """Where a pass costs the same whatever its rows, few passes win; where rows cost, few rows."""
    costs, bounds = costs_on(TOY, SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"], 256), DynamicShape(num_nodes, 16)
    flat, steep = (replace(costs, draft_step_s=curve) for curve in (Curve((1,), (1.0,)), Curve((1, 64), (0.01, 0.64))))
    few, many = paced(bounds, flat).pace, paced(bounds, steep).pace
    assert {few, many} == set(PACES) and few.num_parts < many.num_parts
    assert few.rows_per_pass(num_nodes) > many.rows_per_pass(num_nodes)
    for pace, price in ((few, flat), (many, steep)):
        other = replace(bounds, pace=next(pace_ for pace_ in PACES if pace_ != pace))
        traffic = Traffic(0, 0)
        assert step_time(price, traffic, replace(bounds, pace=pace)).draft_s < step_time(price, traffic, other).draft_s


def test_every_measured_pair_lies_within_the_range_that_it_is_given() -> None:
    for measured in MEASURED:
        expected = expected_tokens(
            best_first(DEFAULT_ACCEPTANCE, measured.num_nodes, measured.depth), [*DEFAULT_ACCEPTANCE, *[0] * 99]
        )
        low, high = range_for(measured.share).around(expected)
        assert 1 < low < high and low - 1e-9 <= measured.tokens_per_sweep <= high + 1e-9, measured
    assert range_for(0.5) == range_for(0.1) != range_for(0.02) == range_for(1e-4)
    assert range_for(0.1).around(1.0) == (1.0, 1.0), "a sweep yields one token, whatever the draft"


TREES = {"none": chain(0), "static": best_first(DEFAULT_ACCEPTANCE, 768, 24), "dynamic": DynamicShape(768, 32),
         "large": DynamicShape(2048, 32)}  # fmt: skip
MACHINES = ("l40", "a100-80gb", "h100")  # of which each has room for a part of the target


def opened(machine: Hardware, shape: Shape) -> tuple[Costs, MemoryPlan]:
    target, draft = SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    costs = costs_on(machine, target, draft, 2048)
    sizes = (machine.ram_bytes, machine.gpu_bytes)
    return costs, make_plan(target, draft, *sizes, context=4096, num_nodes=shape.num_nodes)


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
    stage = SlotCycle(carry, streamed, [torch.empty(0)] * plan.num_layer_slots)
    stage.start()
    for _ in range(num_steps):
        now += step.draft_s + step.host_s + step.verify_s
        for layer in range(num_layers):
            if layer in streamed:
                now = max(now, stage.acquire(layer)[1])
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
    step = step_time(costs, Traffic.from_plan(plan, hardware), shape)
    seen_s = played_s(plan, costs, step)
    assert step.total_s == pytest.approx(seen_s, rel=0.01)
    if tree != "none":  # as if nothing were hidden behind drafting, and as if all of it were
        wrong = [Traffic.from_plan(plan, hardware)._replace(slots_bytes=slots_bytes) for slots_bytes in (0, 1 << 60)]
        wrong_s = [step_time(costs, changed, shape).total_s for changed in wrong]
        assert any(one_s != pytest.approx(seen_s, rel=0.01) for one_s in wrong_s)


def test_every_term_is_in_the_bill_and_more_slots_gain_nothing() -> None:
    shape, hardware = TREES["dynamic"], KNOWN["l40"]
    costs, plan = opened(hardware, shape)
    traffic = Traffic.from_plan(plan, hardware)
    step = step_time(costs, traffic, shape)
    for name, less in {"grow_s": NOTHING, "host_s": NOTHING, "draft_step_s": NOTHING, "ends_share": 0.0,
                       "verify_s": 0.0}.items():  # fmt: skip
        assert step_time(replace(costs, **{name: less}), traffic, shape).total_s < step.total_s, name
    resident = [layer for layer, is_resident in enumerate(plan.is_resident) if is_resident]
    tier_L = list(plan.tier_L)
    tier_L[resident[len(resident) // 2]] = next(tier for tier in tier_L if tier != plan.tier_L[resident[0]])
    other = replace(plan, tier_L=tuple(tier_L), num_layer_slots=plan.num_layer_slots + 1)  # beyond what drafting takes
    assert other.num_resident == plan.num_resident - 1
    assert played_s(other, costs, step) == pytest.approx(played_s(plan, costs, step), rel=1e-3)


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
