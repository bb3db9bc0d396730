"""Memory for routed experts that come one by one: what is planned first, what is left for them, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
from mixture_headers import mixture
from plans import make_plan, model_shape, plan_memory

from offload.checkpoint.sizes import ModelShape
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import least_budget, on_demand
from offload.memory.tiers import MIN_EXPERTS, LayerTier

MIB, GIB = 1 << 20, 1 << 30
SIZES: dict[str, Any] = {"context": 512, "num_nodes": 16}
SHAPE = model_shape(mixture())
assert SHAPE.experts is not None
EXPERT, DENSE, NUM = SHAPE.experts.slot_bytes, SHAPE.experts.dense_bytes, SHAPE.experts.num_records


def plan_of(ram_bytes: int, gpu_bytes: int | None = None, *, shape: ModelShape = SHAPE, **experts: Any) -> MemoryPlan:
    return make_plan(shape, None, ram_bytes, gpu_bytes, **{**SIZES, **experts})


FIXED = plan_of(1 << 40, experts="demand").fixed_bytes


def check(plan: MemoryPlan) -> None:
    host_bytes = plan.num_host_layer_slots * plan.layer_slot_bytes + plan.num_host_expert_slots * plan.expert_slot_bytes
    here_bytes = plan.num_layer_slots * plan.layer_slot_bytes + plan.num_expert_slots * plan.expert_slot_bytes
    here_bytes += plan.fixed_bytes + plan.bytes_in(LayerTier.RESIDENT)
    if plan.gpu_bytes is None:
        assert here_bytes == plan.total_bytes <= plan.ram_bytes, "memory overflows"
        assert (plan.num_host_expert_slots, plan.num_host_layer_slots) == (0, 0)
    else:
        own_bytes = plan.runtime_bytes + plan.table_bytes + plan.staging_bytes + plan.bytes_in(LayerTier.PINNED)
        assert here_bytes == plan.gpu_total_bytes <= plan.gpu_bytes, "the card overflows"
        assert own_bytes + host_bytes == plan.total_bytes <= plan.ram_bytes, "the host overflows"
    assert plan.layer_bytes == DENSE and plan.num_experts == NUM
    assert MIN_EXPERTS <= plan.num_expert_slots <= NUM and plan.num_kept_experts + plan.num_host_expert_slots <= NUM


@pytest.mark.parametrize("room_mib", [60, 80, 120, 160, 200, 400, 1000])
def test_layers_come_first_and_experts_have_the_rest(room_mib: int) -> None:
    room_bytes = room_mib * MIB
    got = plan_of(FIXED + room_bytes)
    check(got)
    if room_bytes >= sum(DENSE) + MIN_EXPERTS * EXPERT:
        assert got.num_resident == 6 and got.num_layer_slots == 0
        assert got.num_expert_slots == (room_bytes - sum(DENSE)) // EXPERT
    else:
        assert got.num_layer_slots in (2, 3) and got.layer_slot_bytes == max(DENSE)
        assert got.num_expert_slots >= MIN_EXPERTS
        assert got.streamed_bytes == (6 - got.num_resident) * max(DENSE)
    left_bytes = got.ram_bytes - got.total_bytes
    assert left_bytes < EXPERT, "no room for an expert is left unused"
    assert got.is_streamed and 0 <= got.num_kept_experts < NUM


def test_experts_come_with_their_layers_where_that_is_named() -> None:
    whole_bytes = sum(SHAPE.layer_bytes)
    fixed = plan_of(1 << 40, experts="layers").fixed_bytes
    roomy, tight = (plan_of(fixed + whole_bytes - lacking, experts="layers") for lacking in (0, 1))
    assert not roomy.has_experts and roomy.num_layer_slots == 0 and roomy.layer_bytes == SHAPE.layer_bytes
    assert not roomy.is_streamed and tight.is_streamed and not tight.has_experts
    assert plan_of(fixed + whole_bytes).has_experts, "what is open is planned as what needs least"
    named, layers = (plan_of(1 << 40, experts=experts) for experts in ("demand", "layers"))
    assert named.num_expert_slots == named.num_kept_experts == NUM and not named.is_streamed
    assert not layers.has_experts and "experts" not in layers.as_dict() and "experts" not in repr(layers)
    # Models without experts are planned as ever.
    dense = replace(SHAPE, experts=None)
    wanted = plan_of(FIXED + 2 * GIB, experts="layers")
    assert plan_of(FIXED + 2 * GIB, shape=dense) == wanted and wanted.num_experts == 0


def test_the_least_budget_is_named_and_it_works() -> None:
    with pytest.raises(UserError, match="for two layer slots and two experts") as caught:
        plan_of(400 * MIB)
    named = re.search(r"raise `ram` to (\d+)MiB", str(caught.value))
    assert named is not None
    least = plan_of(int(named[1]) * MIB)
    check(least)
    assert (least.num_layer_slots, least.num_expert_slots, least.num_resident) == (2, MIN_EXPERTS, 0)
    exact_bytes = least_budget(plan_of)
    assert exact_bytes == least.fixed_bytes + 2 * max(DENSE) + MIN_EXPERTS * EXPERT <= int(named[1]) * MIB
    assert least.fixed_bytes < FIXED and least.max_prompt_rows < plan_of(FIXED + 2 * GIB).max_prompt_rows
    with pytest.raises(UserError, match="raise `ram` to"):
        plan_of(exact_bytes - 1)


def test_an_expert_is_expanded_by_itself_and_contributions_of_rows_are_counted() -> None:
    # Each row of a pass holds k outputs until they are added, in the type that is computed in.
    for num_nodes in (1, 16):
        demand, layers = (
            plan_of(1 << 40, experts=experts, num_nodes=num_nodes).activation_bytes for experts in ("demand", "layers")
        )
        assert demand - layers == (512 + num_nodes) * 4 * 2048 * 2
    # An expert is expanded by itself.
    experts = SHAPE.experts
    assert experts is not None
    coded = replace(SHAPE, scratch_bytes=200 * MIB, experts=experts._replace(scratch_bytes=10 * MIB))
    demand, layers = (
        plan_of(1 << 40, shape=coded, experts=experts).activation_bytes for experts in ("demand", "layers")
    )
    bare = plan_of(1 << 40, experts="demand").activation_bytes
    assert demand == bare + 10 * MIB and layers > demand + 100 * MIB
    assert on_demand(coded).layer_bytes == DENSE


@pytest.mark.parametrize("gpu_mib", [100, 300, 1000])
@pytest.mark.parametrize("ram_mib", [150, 500, 4000])
def test_a_card_has_a_pool_and_pinned_memory_a_second_one(gpu_mib: int, ram_mib: int) -> None:
    roomy = plan_of(1 << 40, 1 << 40, experts="demand")
    host_bytes = roomy.runtime_bytes + roomy.table_bytes
    got = plan_of(host_bytes + SHAPE.head_bytes + ram_mib * MIB, roomy.fixed_bytes + gpu_mib * MIB)
    check(got)
    assert got.gpu_bytes is not None and got.gpu_bytes - got.gpu_total_bytes < EXPERT
    assert got.ram_bytes - got.total_bytes < EXPERT or got.num_kept_experts + got.num_host_expert_slots == NUM
    if got.num_expert_slots < NUM:
        assert got.num_host_expert_slots >= min(MIN_EXPERTS, NUM - got.num_expert_slots), "the disk has a way in"


def test_what_cannot_come_on_demand_is_refused_and_names_what_to_do() -> None:
    experts: dict[str, Any] = {"ram": "8GiB", "dtype": "auto", **SIZES}
    files = (mixture(model_type="dbrx", num_experts_per_tok=0), None)
    with pytest.raises(UserError, match=r"read one by one, got model type dbrx: try `experts=.layers.`"):
        plan_memory(files, experts="demand", **experts)
    assert not plan_memory(files, **experts).has_experts
