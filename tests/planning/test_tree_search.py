"""The choice of the tree: what a step costs, what trees yield, and which one follows."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from expected import expected_tokens, passes_of, rank_trees
from known import selector

from offload import timer
from offload.calibration import threads as probe
from offload.errors import UserError
from offload.planning.acceptance import (
    COPIES,
    NUM_RANKS,
    SMALL,
    DynamicYield,
    bounds_to_count,
    gains,
    measured_acceptance,
    yields_of,
)
from offload.planning.cost_model import (
    Costs,
    Curve,
    Prediction,
    Traffic,
    overlapped_s,
    step_time,
)
from offload.planning.search import DEPTHS, SearchTerms, TreeSearch, search
from offload.rules import RULES
from offload.sampling_options import Sampling
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    SIZES,
    DynamicShape,
    Topology,
    best_first,
    chain,
    check_acceptance,
    sequences,
)

RULE = "match"
P_K = check_acceptance(DEFAULT_ACCEPTANCE)


def costs(*, row_s: float = 0.0, draft_s: float = 0.0, link: float = 1e9) -> Costs:
    """A sweep of 0.1 s and `row_s` for every row; draft steps of equal length."""
    compute = Curve((1, 1024), (0.1 + row_s, 0.1 + 1024 * row_s))
    return Costs(compute_s=compute, draft_step_s=Curve((1,), (draft_s,)), verify_s=0.0, link_bytes_per_s=link)


def best(known: Costs, traffic: Traffic, forest: TreeSearch | None = None) -> Prediction:
    return rank_trees(forest or TreeSearch(P_K, max_nodes=512), known, lambda _: traffic)[0]


def independent_ranks(p: Sequence[float], num_windows: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    ranks, chances = [*range(len(p)), -1], [*p, 1 - sum(p)]
    return [generator.choice(ranks, 128, p=chances).tolist() for _ in range(num_windows)]


def test_curves_widths_and_steps_are_what_hand_sums_say() -> None:
    # A curve is straight between its points and goes on.
    curve = Curve((1, 11, 21), (1.0, 2.0, 4.0))
    assert [curve.at(size) for size in (0, 1, 6, 11, 16, 21, 26)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert Curve((8,), (0.5,)).at(100) == 0.5
    assert Curve((1, 2), (2.0, 1.0)).at(9) == 1.0, "beyond the last point time never falls"
    # Draft widths are the nodes with children.
    assert [shape.draft_widths for shape in (chain(0), chain(3), sequences(4, 3))] == [[], [1, 1, 1], [1, 4, 4]]
    # Step is draft plus the slower side.
    known = replace(costs(draft_s=0.05), compute_s=Curve((1, 11), (0.1, 0.2)), verify_s=0.01)
    for streamed_bytes, slots_bytes, total_s, limit in (
        (0, 0, 0.5 + 0.2 + 0.01, "draft"),
        (3 * 10**9, 0, 0.5 + 3.0 + 0.01, "link"),
        (3 * 10**9, 4 * 10**8, 0.5 + 2.6 + 0.01, "link"),  # what the slots take in meanwhile is hidden
        (3 * 10**9, 2 * 10**9, 3.0, "link"),  # and no more than the time that drafting takes
    ):
        step = step_time(known, Traffic(streamed_bytes, slots_bytes), chain(10))
        assert step.total_s == pytest.approx(total_s) and step.limit == limit


def test_two_things_at_once_take_from_the_longer_to_the_sum_of_both() -> None:
    assert overlapped_s(0.3, 0.2, 0.0) == overlapped_s(0.2, 0.3, 0.0) == 0.3 and overlapped_s(0.0, 0.0, 0.5) == 0.0
    assert overlapped_s(0.3, 0.2, 1.0) == pytest.approx(0.5), "in turn"
    assert overlapped_s(0.3, 0.3, 0.2) == pytest.approx(0.3 * 2**0.2)
    assert overlapped_s(0.3, 0.01, 0.2) == pytest.approx(0.3, rel=1e-4) and overlapped_s(0.3, 0.0, 0.2) == 0.3


def size(known: Costs, traffic: Traffic) -> int:
    return best(known, traffic).shape.num_nodes


def test_costs_of_rows_links_and_drafts_shape_the_tree() -> None:
    resident = Traffic(0, 0)
    assert size(costs(link=1e8), Traffic(10**9, 0)) == 512, "rows are free, the link is slow"
    sizes = [size(costs(row_s=row_s), resident) for row_s in (1e-5, 1e-3, 1e-2, 1.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 256 and sizes[-1] == 1, "costly rows make it small"
    slower = [costs(row_s=2e-3, draft_s=5e-3, link=link) for link in (1e11, 1e10, 3e9, 1e9, 2e8)]
    sizes = [size(known, Traffic(10**9, 10**8)) for known in slower]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1], "a slower link never makes it smaller"
    bare = [best(costs(draft_s=draft_s), resident).shape.depth for draft_s in (1e-4, 1e-2, 1.0)]
    assert bare == sorted(bare, reverse=True) and bare[-1] <= 1 < bare[0], "a costly draft makes it flat"
    slots = (0, 2 * 10**9)
    hidden = [best(costs(draft_s=0.05, link=1e9), Traffic(4 * 10**9, size)).shape.depth for size in slots]
    assert hidden[0] < hidden[1], "slots that fill meanwhile pay for deeper trees"


def test_choice_is_the_argmax_of_what_memory_and_depth_allow() -> None:
    known, traffic = costs(row_s=1e-3, draft_s=5e-3), Traffic(3 * 10**8, 10**8)
    ranked = rank_trees(TreeSearch(P_K, max_nodes=64), known, lambda _: traffic)
    assert [c.s_per_token for c in ranked] == sorted(c.s_per_token for c in ranked)
    for candidate in ranked:
        tree = candidate.shape
        assert candidate.tokens_per_sweep == pytest.approx(expected_tokens(tree, P_K))
        assert candidate.step == step_time(known, traffic, tree)
    exhaustive = min(
        step_time(known, traffic, tree).total_s / expected_tokens(tree, P_K)
        for tree in (best_first(P_K, n, d) for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) for d in DEPTHS)
    )
    assert ranked[0].s_per_token == pytest.approx(exhaustive)
    # What memory cannot hold is no candidate.
    ranked = rank_trees(TreeSearch(P_K, max_nodes=512), costs(), lambda size: Traffic(0, 0) if size <= 32 else None)
    assert max(candidate.shape.num_nodes for candidate in ranked) == 32
    assert rank_trees(TreeSearch(P_K), costs(), lambda _: None) == []
    ranked = rank_trees(TreeSearch(P_K, max_nodes=256), costs(), lambda _: Traffic(0, 0), max_depth=5)
    assert max(candidate.shape.depth for candidate in ranked) == 5


def test_passes_through_independent_ranks_yield_the_product_form() -> None:
    """The tokens of passes, walked word for word, against the sum of the chances of all nodes."""
    p, topology = (0.6, 0.2, 0.05), best_first((0.6, 0.2, 0.05), 48, 8)
    tokens = [num for ranks in independent_ranks(p, 400) for num in passes_of(topology, ranks)]
    assert np.mean(tokens) == pytest.approx(expected_tokens(topology, p), rel=0.02)
    assert TreeSearch(check_acceptance(p)).expected_of(topology) == pytest.approx(expected_tokens(topology, p))


def test_acceptance_counts_ranks_and_knows_its_error() -> None:
    p_K, error_K = measured_acceptance([[0, 0, 1, -1], [0, 2, 0, 0]])
    assert p_K[:4].tolist() == [5 / 8, 1 / 8, 1 / 8, 0] and len(p_K) == len(error_K) == NUM_RANKS
    assert error_K[3] == 0 and (error_K[:3] > 0).all()
    ranks_W = independent_ranks((0.6, 0.2), 100)
    p_K, error_K = measured_acceptance(ranks_W)
    wanted = np.sqrt(p_K * (1 - p_K) / 12800)
    assert error_K[:2] == pytest.approx(wanted[:2], rel=0.3), "independent positions: the binomial error"
    assert measured_acceptance(ranks_W[:1])[1][0] == pytest.approx(np.sqrt(p_K[0] * (1 - p_K[0]) / 128), rel=0.2)
    clumped = [[0] * 128 if index % 2 else [1] * 128 for index in range(20)]
    assert measured_acceptance(clumped)[1][0] > 0.1, "windows of one kind count as few observations"


@pytest.mark.parametrize("num_nodes", [1, 2, 17, 64, 200])
def test_the_order_has_the_best_tree_of_every_size(num_nodes: int) -> None:
    for depth in (1, 4, 16):
        order = TreeSearch(P_K, max_nodes=num_nodes, max_depth=16).whole
        tree = order.tree(num_nodes, depth)
        assert tree.depth <= depth
        if tree.num_nodes == num_nodes:
            assert tree == best_first(P_K, num_nodes, depth)
            assert order.expected(num_nodes, depth) == pytest.approx(expected_tokens(tree, P_K))
            assert order.outline(num_nodes, depth) == (num_nodes, tree.depth, tree.draft_widths)


def test_trees_without_any_measurement_fall_back_and_named_ones_are_as_named() -> None:
    choice = selector().for_run(Sampling(), RULE)
    assert choice.shape == DynamicShape(64, 16) and "nothing was measured" in choice.why
    small = selector(max_nodes=8)
    assert small.for_run(Sampling(), RULE).shape.num_nodes == 8
    trees = selector("16x4", max_nodes=32, context=8)
    assert trees.for_run(Sampling(), RULE).shape == best_first(P_K, 16, 4)
    assert trees.for_run(Sampling(), RULE, "chain:3").shape == chain(3)
    with pytest.raises(UserError, match="64 nodes, memory was planned for 32"):
        trees.for_run(Sampling(), RULE, "64x4")
    with pytest.raises(UserError, match="9 deep, the context has 8 positions"):
        trees.for_run(Sampling(), RULE, "chain:9")


@pytest.mark.parametrize("measured", [None, costs(row_s=2e-3)])
def test_scores_shape_a_chosen_tree_where_the_rule_allows_it(measured: Costs | None) -> None:
    trees = selector(traffic=Traffic(10**9, 0), link=1e9, tried=measured)
    for rule in RULES:
        choice = trees.for_run(Sampling(), rule)
        assert choice.is_dynamic == (rule in ("match", "topk")), rule
        assert choice.as_dict()["is_dynamic"] == choice.is_dynamic
        if choice.candidates:
            best = choice.candidates[0].shape
            assert (choice.shape.num_nodes, choice.shape.depth) == (best.num_nodes, best.depth)


def test_trees_choose_by_what_was_measured_and_by_todays_link() -> None:
    policies = [selector(traffic=Traffic(10**9, 0), link=link, tried=costs(row_s=2e-3)) for link in (1e11, 1e8)]
    fast, slow = (trees.for_run(Sampling(), RULE).shape.num_nodes for trees in policies)
    assert fast < slow


def test_drawn_text_is_assumed_to_be_harder_to_guess_and_named_trees_stay_what_they_are() -> None:
    """Whichever was asked for first, with a small draft; a copy's figures are of drawn text already."""
    drawn, greedy = Sampling(temperature=0.7), Sampling()
    options: dict[str, Any] = {"traffic": Traffic(10**9, 0), "link": 1e9, "tried": costs(row_s=3e-3)}
    for order in ((greedy, drawn), (drawn, greedy)):
        trees = selector(**options)
        chosen = {sampling: trees.for_run(sampling, RULE) for sampling in order}
        assert chosen[drawn].shape.depth < chosen[greedy].shape.depth
        assert chosen[drawn].candidates[0].s_per_token > chosen[greedy].candidates[0].s_per_token
        named = [trees.for_run(sampling, RULE, "64x16").shape for sampling in order]
        assert np.array_equal(*(shape.parent_N for shape in named if isinstance(shape, Topology)))
    copy = selector(prior=COPIES[4], **options)
    assert copy.for_run(greedy, RULE).shape == copy.for_run(drawn, RULE).shape


def test_the_first_run_of_a_size_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it contains a recording, many times as long as what it records."""
    now_s, seen = 0.0, set[int]()

    def measure(size: int) -> float:
        nonlocal now_s
        taken_s = float(size) if size in seen else 100.0
        seen.add(size)
        now_s += taken_s
        return taken_s

    for module in (probe, timer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    assert probe.fill_curve(measure, (1, 2, 4, 8), 24.0, 2) == Curve((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0))
    seen.clear()
    assert probe.fill_curve(measure, (1, 2, 4, 8), 9.5, 2).sizes == (1, 2, 4), "the budget still holds"
    seen.clear()
    late = probe.fill_curve(measure, (1, 2, 4, 8), 0.0, 2)
    assert late == Curve((1, 2), (1.0, 2.0)), "two sizes tell what a row takes, and neither rests on a lone run"


@pytest.mark.parametrize("budget_s", [0.0, 0.5, 60.0])
def test_a_slow_machine_still_learns_what_a_row_of_a_large_tree_takes(
    monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    """Up to 64 rows cost little and each further one .01 s: a curve that ended there was wrong by five times."""
    now_s = 0.0

    def pass_s(num_rows: int) -> float:
        return 0.4 + 0.002 * num_rows + 0.01 * max(0, num_rows - 64)

    def measure(num_rows: int) -> float:
        nonlocal now_s
        now_s += pass_s(num_rows)
        return pass_s(num_rows)

    for module in (probe, timer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(probe, "_sweep_s", lambda model, num_rows, share: measure(num_rows))
    monkeypatch.setattr(probe, "_SWEEPS_S", budget_s)
    layout = SimpleNamespace(slab_bytes=1)
    model = SimpleNamespace(
        typical_layer=0, layer_layouts=[layout], experts=None, bind_layer=lambda *_: None, unbind_layer=lambda *_: None
    )
    curve = probe.sweep_curve(cast(Any, model), np.zeros(1), probe.SWEEP_SIZES)
    for num_rows in (16, 256, 1024):
        assert curve.at(num_rows) == pytest.approx(pass_s(num_rows), rel=0.25)


@pytest.mark.parametrize("row_s", [0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2])
@pytest.mark.parametrize("num_texts", [1, 4])
def test_large_trees_are_left_out_where_they_cannot_be_better(row_s: float, num_texts: int) -> None:
    """They are ordered only where they might be, and what is chosen is what all of them would have shown."""
    known, traffic, asked = costs(row_s=row_s, draft_s=5e-3), Traffic(3 * 10**8, 10**8), list[int]()

    def trees_of(max_nodes: int) -> TreeSearch:
        asked.append(max_nodes)
        return TreeSearch(P_K, max_nodes=max_nodes)

    for is_dynamic in (False, True):
        options = {"is_dynamic": is_dynamic, "num_texts": num_texts}
        _, ranked = search(trees_of, SIZES[-1], SearchTerms(known, lambda _: traffic, **options))
        assert ranked[0] == rank_trees(TreeSearch(P_K), known, lambda _: traffic, **options)[0]
        if row_s in (0.0, 1e-2):
            assert asked == ([512] if row_s else [512, SIZES[-1]]), "most of the time goes into ordering"
        asked.clear()


def counted(num_nodes: int, depth: int, tokens: float) -> DynamicYield:
    return DynamicYield(num_nodes=num_nodes, depth=depth, tokens_per_sweep=tokens, num_sweeps=100)


def test_yields_of_bounds_are_tokens_over_sweeps() -> None:
    # Bounds fit into the largest tree.
    assert bounds_to_count(1) == () and bounds_to_count(8) == ((8, 7),)
    assert bounds_to_count(100) == ((16, 8), (16, 15), (64, 8), (64, 24))
    assert bounds_to_count(512)[-1] == (256, 24)
    windows = [[[2, 4], [5], []], [[6], [7, 9], []]]
    assert yields_of(((16, 8), (64, 8), (64, 24)), windows) == (
        DynamicYield(num_nodes=16, depth=8, tokens_per_sweep=4.0, num_sweeps=3),
        DynamicYield(num_nodes=64, depth=8, tokens_per_sweep=7.0, num_sweeps=3),
    ), "a mean of sweeps, not of windows; what has no sweep is not there"
    assert yields_of((), [[], []]) == ()


def test_gains_are_exact_where_counted_and_even_between() -> None:
    def fixed(num_nodes: int, depth: int) -> float:
        return 2.0 if num_nodes == 16 else 4.0

    gain = gains([counted(64, 24, 6.0), counted(16, 8, 2.2), counted(16, 15, 2.4), counted(64, 8, 5.0)], fixed)
    assert [gain(*size) for size in ((16, 8), (16, 15), (64, 8), (64, 24))] == pytest.approx([1.1, 1.2, 1.25, 1.5])
    assert gain(32, 8) == pytest.approx(1.175) and gain(64, 16) == pytest.approx(1.375)
    assert gain(1024, 32) == pytest.approx(1.5), "as it was at the last"
    assert gain(1, 0) == 1.0 and gain(64, 1) == 1.0
    assert gains([], fixed)(64, 8) == 1.0
    # A small budget does not shrink what a gain is relative to.
    single = [counted(256, 24, 9.0)]
    small, large = (TreeSearch(P_K, max_nodes=size, counted=single)._gain(256, 24) for size in (16, 256))
    assert small == pytest.approx(large)


def test_the_gain_enters_the_choice() -> None:
    """Rows cost so much that static trees stay small; where larger ones gain by growth, the choice follows."""
    dear = replace(costs(), compute_s=Curve((1, 256), (0.1, 0.5)))
    plain = TreeSearch(P_K, max_nodes=256)
    sizes = [(64, 16, 1.0), (256, 24, 2.5)]
    better = TreeSearch(
        P_K, max_nodes=256, counted=[counted(n, d, gain * plain.expected(n, d)) for n, d, gain in sizes]
    )
    fixed, dynamic = (
        rank_trees(better, dear, lambda _: Traffic(0, 0), is_dynamic=is_dynamic)[0] for is_dynamic in (False, True)
    )
    assert fixed == rank_trees(plain, dear, lambda _: Traffic(0, 0))[0] and not isinstance(fixed.shape, DynamicShape)
    assert isinstance(dynamic.shape, DynamicShape) and dynamic.shape.num_nodes > fixed.shape.num_nodes
    assert dynamic.tokens_per_sweep == pytest.approx(
        better.expected_dynamic(dynamic.shape.num_nodes, dynamic.shape.depth)
    )
    assert better.expected_dynamic(256, 24) == pytest.approx(2.5 * plain.expected(256, 24))


def test_a_copy_has_no_tree_larger_than_those_that_were_counted() -> None:
    """What larger ones would yield was never seen, and their passes over the copy's weights are wide."""
    fast = costs(row_s=1e-6, draft_s=1e-6)
    small, copy = (
        selector(traffic=Traffic(10**10, 0), link=1e8, tried=fast, prior=prior) for prior in (SMALL, COPIES[4])
    )
    assert copy.for_run(Sampling(), RULE).shape.num_nodes <= 128 < small.for_run(Sampling(), RULE).shape.num_nodes
