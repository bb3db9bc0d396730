"""Sweeps whose bytes depend on their rows, and how many experts a pass needs and misses, against public routing traces.

The figures are of one text on Qwen3-30B-A3B, 128 experts a layer of which 6 were chosen, and of gpt-oss-120b, 2 of 128
(github.com/Helldez/BigMoeOnEdge, docs/bench-data): unions of random tokens of the text, experts that a cache by use has
to read for a token, and what the same sums say with the shares that were counted there.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from expected import rank_trees
from known import known_of, selector
from mixture_headers import mixture
from plans import make_plan, model_shape

from offload.checkpoint.checkpoint import ModelFiles
from offload.memory.plan import MemoryBudget
from offload.memory.planner import plan_memory
from offload.planning.budget import traffic_in, with_experts
from offload.planning.choice import TreeRoom, most_nodes
from offload.planning.cost_model import (
    DEMAND_RATE,
    NEVER,
    Costs,
    Curve,
    Traffic,
    link_alone,
    overlapped_s,
    step_of,
    with_draft_reads,
)  # fmt: skip
from offload.planning.expert_traffic import ExpertRouting, ExpertTraffic
from offload.planning.hardware import Hardware
from offload.planning.profile import ExpertUses
from offload.planning.search import TreeSearch
from offload.sampling_options import Sampling
from offload.trees.spec import parse_tree
from offload.trees.topology import DEFAULT_ACCEPTANCE, SIZES, check_acceptance

MB, GB = 10**6, 10**9
LINK = 2e9
FINE, COARSE = ExpertRouting.usual(48, 128, 8), ExpertRouting.usual(32, 8, 2)  # such as Qwen3-30B-A3B and Mixtral have


def traffic(
    routing: ExpertRouting = FINE, kept: float = 0.0, slot_bytes: int = 9 * MB, dense_bytes: int = 0
) -> Traffic:
    num_kept = round(kept * routing.num_experts)
    experts = ExpertTraffic(slot_bytes, num_kept, routing, num_kept)
    return Traffic(dense_bytes, 0, experts=experts)


def costs(row_s: float = 0.0, pass_s: float = 0.0) -> Costs:
    computing = Curve((1, 1024), (pass_s + row_s, pass_s + 1024 * row_s))
    return Costs(
        compute_s=computing, draft_step_s=Curve((1,), (0.01,)), verify_s=0.0, link_bytes_per_s=LINK,
    )  # fmt: skip


def test_a_drafts_steps_wait_for_experts_on_demand() -> None:
    sparse = ExpertTraffic(9 * MB, 20, ExpertRouting.usual(1, 128, 8), 20)
    reading = with_draft_reads(costs(), Traffic(0, 0, draft_experts=sparse))
    for width in (1, 8, 64):
        waited_s = reading.draft_step_s.at(width) - costs().draft_step_s.at(width)
        assert waited_s == pytest.approx(sparse.bytes_at(width) / (DEMAND_RATE * LINK))
    assert with_draft_reads(costs(), Traffic(0, 0)) == costs()


def test_bytes_rise_with_rows_up_to_all_that_is_not_kept() -> None:
    for kept in (0.0, 0.2, 0.6):
        moved = traffic(kept=kept, dense_bytes=GB)
        assert moved.experts is not None
        sizes = [moved.bytes_at(num_rows) for num_rows in (1, 2, 4, 16, 64, 512, 1e6)]
        assert sizes == sorted(sizes) and sizes[0] > GB
        assert sizes[-1] == pytest.approx(GB + moved.experts.whole_bytes)
        assert moved.experts.whole_bytes == pytest.approx((1 - kept) * 6144 * 9 * MB, rel=1e-3)
    assert traffic().bytes_at(1) == pytest.approx(48 * 8 * 9 * MB)
    assert traffic(kept=0.2).experts.hit_share(1) > 0.5 > traffic(kept=0.05).experts.hit_share(1)  # type: ignore[union-attr]
    nothing = traffic(kept=1.0)
    assert nothing.bytes_at(64) == 0 and not nothing.is_streamed and traffic(kept=0.9).is_streamed
    # Nothing is read ahead where nothing has to come.
    assert traffic(kept=1.0).ahead_rows(costs()) == Traffic(GB, 0).ahead_rows(None) == NEVER


def test_computing_waits_for_what_routers_ask_for_unless_many_rows_read_ahead() -> None:
    moved, known = traffic(kept=0.2, dense_bytes=GB), costs(pass_s=0.5)
    step = step_of(known, moved, 4, (1, 1))
    asked_s = moved.experts.bytes_at(4) / (DEMAND_RATE * LINK)  # type: ignore[union-attr]
    dense_s = GB / LINK
    assert step.asked_s == pytest.approx(asked_s) and step.link_s == pytest.approx(dense_s + asked_s)
    assert step.draft_s == pytest.approx(0.02) and step.limit == "link"
    beside_s = max(0.5, dense_s)
    assert beside_s + 0.85 * asked_s < step.sweep_s < beside_s + asked_s, "reads and products nearly take turns"
    assert step.sweep_s == pytest.approx(overlapped_s(beside_s, asked_s, 0.9))
    assert step_of(costs(pass_s=60.0), moved, 4, ()).limit == "compute"
    # Many rows read ahead, as whole layers do.
    moved = traffic(kept=0.1)
    whole_s = moved.experts.whole_bytes / LINK  # type: ignore[union-attr]
    known = costs(row_s=1e-3 * whole_s)
    sweep = step_of(known, moved, 512, ())
    assert sweep.asked_s == 0 and sweep.sweep_s == pytest.approx(whole_s)
    assert step_of(known, moved, 1, ()).asked_s > 0


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("routing", [FINE, COARSE], ids=["fine", "coarse"])
def test_ahead_begins_where_it_is_quicker(routing: ExpertRouting, kept: float) -> None:
    moved = traffic(routing, kept, 350 * MB if routing is COARSE else 9 * MB)
    for known in (costs(), costs(row_s=1e-2), costs(pass_s=1.0), None):
        rows, curves = moved.ahead_rows(known), known or link_alone(1.0)
        assert 1 < rows < 600
        assert step_of(curves, moved, rows, ()).asked_s == 0 and step_of(curves, moved, rows - 1, ()).asked_s > 0
    assert moved.ahead_rows(costs(row_s=1e-2)) <= moved.ahead_rows(costs()), "what hides computing comes earlier"


def test_few_of_many_experts_want_small_trees_and_few_experts_large_ones() -> None:
    forest = TreeSearch(check_acceptance(DEFAULT_ACCEPTANCE), max_nodes=128)
    small = costs(pass_s=0.02)

    def best(moved: Traffic) -> int:
        return rank_trees(forest, small, lambda _: moved)[0].shape.num_nodes

    assert {3, 6} < set(SIZES) and list(SIZES) == sorted(SIZES)
    assert best(traffic(FINE, 0.2)) <= 8 < 32 <= best(traffic(COARSE, 0.05, 350 * MB))
    as_layers = Traffic(6144 * 9 * MB, 0)
    assert best(as_layers) >= 64, "of whole layers every row is free"
    measured = traffic(FINE, 0.2).routed_by(ExpertRouting(np.tile(np.where(np.arange(128) < 8, 1.0, 0.0), (48, 1))))
    assert best(measured) >= 64, "and so it is where all rows need the same experts"


def test_chains_growth_and_guesses_pay_for_their_rows() -> None:
    moved, layers, known = traffic(kept=0.2), Traffic(int(traffic(kept=0.2).bytes_at(1)), 0), costs(pass_s=0.05)
    short, long = (selector("chain:auto", seen, tried=known, link=LINK) for seen in (moved, layers))
    assert short.for_run(Sampling(), "match").shape.depth < long.for_run(Sampling(), "match").shape.depth
    trees = selector(traffic=moved, tried=known, link=LINK)
    steps = [trees.step_s(num_rows, (1,)) for num_rows in (1, 2, 8, 32)]
    assert steps == sorted(set(steps)) and steps[-1] > 2 * steps[0]
    routing = ExpertRouting(np.tile(np.where(np.arange(128) < 8, 1.0, 0.0), (48, 1)))
    trees = selector(traffic=moved, tried=known, link=LINK, routing=routing)
    assert trees.step_s(32, (1,)) == pytest.approx(trees.step_s(1, (1,))), "what was counted is what counts"
    assert trees.step_s(32, (1,)) < steps[0]
    assert trees.ahead_rows() == moved.routed_by(routing).ahead_rows(trees.knowledge.costs)


def test_a_tree_of_guesses_has_room_while_one_row_reads_no_more() -> None:
    def of(size: int) -> Traffic:
        return traffic(kept=0.3 - (0.0 if size <= 16 else 0.1))

    unranked = known_of(prior=None)
    assert most_nodes(parse_tree("auto"), unranked, TreeRoom(of)) == 16
    assert most_nodes(parse_tree("auto"), unranked, TreeRoom(lambda _: traffic(kept=0.3))) == 64
    assert selector(traffic=traffic(kept=0.3), prior=None).for_run(Sampling(), "match").shape.num_nodes == 64


def test_a_second_pool_spares_the_disk() -> None:
    """Pinned memory sends some of what a card does not keep; the rest waits for the disk."""
    machine = Hardware(name="toy", gpu_bytes=24 * GB, memory_bytes_per_s=1e12, flops_per_s=1e14, link_bytes_per_s=20e9,
                       ram_bytes=64 * GB, disk_bytes_per_s=4e9)  # fmt: skip
    shape = model_shape(mixture(num_hidden_layers=40))
    roomy = make_plan(shape, None, 1 << 40, 1 << 40, context=512, num_nodes=1, experts="demand")

    def of(num_pinned: int) -> Traffic:
        host_bytes = roomy.runtime_bytes + roomy.table_bytes + shape.head_bytes + num_pinned * roomy.expert_slot_bytes
        gpu_bytes = roomy.fixed_bytes + roomy.resident_bytes + 200 * roomy.expert_slot_bytes
        plan = make_plan(shape, None, host_bytes, gpu_bytes, context=512, num_nodes=1)
        assert plan.num_expert_slots == pytest.approx(200, abs=2) and plan.num_host_expert_slots >= num_pinned
        return Traffic.from_plan(plan, machine)

    few, many, all_of = of(10), of(600), of(1080)
    sizes = [experts.bytes_at(4) for experts in (few, many, all_of)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[2]
    assert few.is_disk_slower and not all_of.is_disk_slower
    assert all_of.bytes_at(4) == pytest.approx(all_of.experts.link_bytes_at(4))  # type: ignore[union-attr]


def test_what_a_profile_has_counted_replaces_what_is_usual() -> None:
    """The shares of experts are of texts: where all rows ask for the same ones, they add no bytes."""
    routing = ExpertUses(((1000,) * 8 + (0,) * 120,) * 48, 1000).routing
    assert routing.distinct(32) == pytest.approx(48 * 8, rel=0.2)
    moved = traffic(kept=0.1)
    routed = moved.routed_by(routing)
    assert routed.bytes_at(8) < 0.1 * moved.bytes_at(8) and moved.routed_by(None) is moved
    assert Traffic(5, 5).routed_by(routing) == Traffic(5, 5)


def room(ram_bytes: int, **options: Any) -> MemoryBudget:
    return MemoryBudget(
        **{"ram_bytes": ram_bytes, "gpu_bytes": None, "dtype": "auto", "context": 512, "rule": "match", **options}
    )


def test_demand_or_layers_is_settled_once_and_by_headers() -> None:
    fine, dense = ModelFiles(mixture(num_hidden_layers=24)), ModelFiles(mixture(num_experts_per_tok=0))
    whole_bytes = sum(model_shape(fine.target).layer_bytes)
    for share in (0.1, 0.3, 0.6):
        budget = room(int(share * whole_bytes) + 600_000_000)
        settled = with_experts(budget, fine)
        assert settled == replace(budget, experts="demand") and plan_memory(fine, settled, 1).has_experts
        assert with_experts(replace(budget, experts="layers"), fine).experts == "layers"
    assert with_experts(room(64 * GB), fine).experts == "layers", "where all of it stays there is nothing to choose"
    assert with_experts(room(2 * GB), dense).experts == "layers"
    # A named tree that needs all experts is weighed as it is.
    target = mixture(num_hidden_layers=24)
    files = ModelFiles(target, mixture(num_hidden_layers=1))
    budget = room(int(0.3 * sum(model_shape(target).layer_bytes)) + 2_000_000_000)
    assert with_experts(budget, files, num_nodes=2).experts == "demand"
    ways = {way: traffic_in(replace(budget, experts=way), files, 512) for way in ("demand", "layers")}
    known = link_alone(1.0)
    seconds = {way: step_of(known, traffic, 512, ()).sweep_s for way, traffic in ways.items() if traffic is not None}
    assert with_experts(budget, files, num_nodes=512).experts == min(seconds, key=lambda way: seconds[way])


NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 48, 128, 6
UNIONS = {2: 1.76, 4: 2.90, 8: 4.43, 16: 6.15, 32: 7.7}  # in units of k
INDEPENDENT = {2: 1.95, 4: 3.73, 8: 6.80, 16: 11.4, 32: 16.7, 64: 20.4}
MISSES = {1: {0.03: 4.2, 0.05: 3.6, 0.10: 2.5, 0.20: 1.2}, 4: {0.03: 4.8, 0.05: 4.2, 0.10: 3.1, 0.20: 1.5}}
YIELDS = {1: 1.0, 2: 1.8, 4: 2.95, 8: 4.16, 16: 5.0, 32: 5.85, 64: 6.7, 128: 7.6}  # tokens of a sweep, by its nodes


def shares(ranks: np.ndarray, num_chosen: int, num_layers: int = NUM_LAYERS) -> ExpertRouting:
    """Return shares that are the same in every layer, in proportion to `ranks`; what is above 1 goes to the others."""
    low, high = 0.0, 1e6
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(1, scale * ranks).sum() < num_chosen else (low, scale)
    return ExpertRouting(np.tile(np.minimum(1, low * ranks), (num_layers, 1)))


@pytest.fixture(scope="module")
def text() -> ExpertRouting:
    """Shares as of that text: 52 experts of a layer in use, falling with the power 0.75 of their rank."""
    rank = np.arange(1, NUM_EXPERTS + 1)
    return shares(np.where(rank <= 52, rank**-0.75, 0.0), NUM_CHOSEN)


def test_the_shares_of_a_text_say_how_many_experts_its_rows_need(text: ExpertRouting) -> None:
    per_layer = NUM_LAYERS * NUM_CHOSEN
    assert text.distinct(1) == pytest.approx(per_layer) and text.num_experts == NUM_LAYERS * NUM_EXPERTS
    for num_rows, wanted in UNIONS.items():
        assert text.distinct(num_rows) / per_layer == pytest.approx(wanted, rel=0.02)
    # Independent choices need twice as many.
    alike = shares(np.ones(NUM_EXPERTS), NUM_CHOSEN)
    for num_rows, wanted in INDEPENDENT.items():
        assert alike.distinct(num_rows) / NUM_LAYERS / NUM_CHOSEN == pytest.approx(wanted, rel=0.01)
    for num_rows in (8, 16, 32):
        assert INDEPENDENT[num_rows] > 1.5 * UNIONS[num_rows], "which is what measuring is for"
    half = alike.num_experts // 2
    assert alike.misses(4, half) == pytest.approx(alike.distinct(4) / 2), "none is better to keep"


@pytest.mark.parametrize("num_rows", MISSES)
def test_the_same_shares_say_what_a_cache_of_the_most_used_misses(num_rows: int, text: ExpertRouting) -> None:
    """Layers differ more than these do, so a little less is read there."""
    for room, wanted in MISSES[num_rows].items():
        kept = round(room * text.num_experts)
        assert text.misses(num_rows, kept) / NUM_LAYERS / YIELDS[num_rows] == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize(
    ("num_experts", "num_chosen"), [(128, 8), (128, 4), (256, 8), (64, 8), (32, 4), (8, 2), (4, 4)]
)
def test_what_is_usual_lies_between_the_traces_and_independence(num_experts: int, num_chosen: int) -> None:
    usual, alike = ExpertRouting.usual(3, num_experts, num_chosen), shares(np.ones(num_experts), num_chosen, 3)
    assert usual.q_LE.shape == (3, num_experts) and np.allclose(usual.q_LE.sum(1), num_chosen)
    for num_rows in (2, 4, 8):
        ratio = usual.distinct(num_rows) / 3 / num_chosen
        assert ratio <= alike.distinct(num_rows) / 3 / num_chosen + 1e-9
        assert ratio >= min(num_rows**0.66, 0.88 * alike.distinct(num_rows) / 3 / num_chosen)
    if num_experts >= 16 * num_chosen:
        assert usual.distinct(8) / 3 / num_chosen == pytest.approx(8**0.75, rel=0.01)


def test_misses_fall_with_room_and_needs_rise_with_rows() -> None:
    usual = ExpertRouting.usual(48, 128, 8)
    for num_rows in (1, 4, 64, 512):
        misses = [usual.misses(num_rows, kept) for kept in (0, 7, 300, 1200, 3000, 6144)]
        assert misses == sorted(misses, reverse=True) and misses[-1] == 0 and misses[0] == usual.distinct(num_rows)
    needs = [usual.distinct(num_rows) for num_rows in (0, 1, 2, 3, 8, 512, 1e6)]
    assert needs == sorted(needs) and needs[0] == 0 and needs[-1] == pytest.approx(48 * 128)
    assert usual.misses(1, 1229) < 0.5 * usual.distinct(1), "a fifth of them is more than half of what a token needs"


def test_counts_take_over_from_what_is_usual() -> None:
    generator = np.random.default_rng(0)
    truth = np.stack([generator.permutation(np.arange(1, 33.0) ** -1.2) for _ in range(5)])
    truth *= 4 / truth.sum(1, keepdims=True)
    truth = np.minimum(truth, 0.95)
    usual, exact = ExpertRouting.usual(5, 32, 4), ExpertRouting(truth)

    def counted(num_tokens: int) -> ExpertRouting:
        return ExpertRouting.counted(generator.binomial(num_tokens, truth), num_tokens)

    few, many = counted(20), counted(5000)
    assert np.abs(many.q_LE - truth).max() < 0.03
    for num_rows, kept in ((1, 0), (4, 32), (8, 60)):
        wanted = exact.misses(num_rows, kept)
        assert many.misses(num_rows, kept) == pytest.approx(wanted, rel=0.03)
        assert abs(few.misses(num_rows, kept) - wanted) < max(0.3 * wanted, abs(usual.misses(num_rows, kept) - wanted))
    nothing = ExpertRouting.counted(np.zeros((5, 32)), 0)
    assert nothing.distinct(1) == pytest.approx(5, rel=0.01), "without a count one expert a layer is all that is known"
