"""What dynamic trees yield: counted over windows, and carried to other bounds by their gain over fixed ones."""

import pytest

from offload.planning.acceptance import DynamicYield, bounds_to_count, gains, yields_of
from offload.planning.cost_model import Costs, Curve, Traffic
from offload.planning.search import TreeSearch, rank_trees
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape, check_acceptance

P_K = check_acceptance(DEFAULT_ACCEPTANCE)


def counted(num_nodes: int, depth: int, tokens: float) -> DynamicYield:
    return DynamicYield(num_nodes=num_nodes, depth=depth, tokens_per_sweep=tokens, num_sweeps=100)


def test_bounds_fit_into_the_largest_tree() -> None:
    assert bounds_to_count(1) == () and bounds_to_count(8) == (DynamicShape(8, 7),)
    assert bounds_to_count(100) == (
        DynamicShape(16, 8),
        DynamicShape(16, 15),
        DynamicShape(64, 8),
        DynamicShape(64, 24),
    )
    assert bounds_to_count(512)[-1] == DynamicShape(256, 24)


def test_a_yield_is_tokens_over_sweeps_of_all_windows() -> None:
    bounds = (DynamicShape(16, 8), DynamicShape(64, 8), DynamicShape(64, 24))
    windows = [[[2, 4], [5], []], [[6], [7, 9], []]]
    assert yields_of(bounds, windows) == (
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


def test_the_gain_enters_the_choice() -> None:
    """Rows cost so much that static trees stay small; where larger ones gain by growth, the choice follows."""
    costs = Costs(
        compute_s=Curve((1, 256), (0.1, 0.5)), draft_step_s=Curve((1,), (0.0,)), verify_s=0.0, link_bytes_per_s=1e9
    )
    plain = TreeSearch(P_K, max_nodes=256)
    sizes = [(64, 16, 1.0), (256, 24, 2.5)]
    better = TreeSearch(
        P_K, max_nodes=256, counted=[counted(n, d, gain * plain.expected(n, d)) for n, d, gain in sizes]
    )
    fixed, dynamic = (
        rank_trees(better, costs, lambda _: Traffic(0, 0), is_dynamic=is_dynamic)[0] for is_dynamic in (False, True)
    )
    assert fixed == rank_trees(plain, costs, lambda _: Traffic(0, 0))[0] and not isinstance(fixed.shape, DynamicShape)
    assert isinstance(dynamic.shape, DynamicShape) and dynamic.shape.num_nodes > fixed.shape.num_nodes
    assert dynamic.tokens_per_sweep == pytest.approx(
        better.expected_dynamic(dynamic.shape.num_nodes, dynamic.shape.depth)
    )
    assert better.expected_dynamic(256, 24) == pytest.approx(2.5 * plain.expected(256, 24))


def test_a_small_budget_does_not_shrink_what_a_gain_is_relative_to() -> None:
    one = [counted(256, 24, 9.0)]
    gains = [TreeSearch(P_K, max_nodes=size, counted=one)._gain(256, 24) for size in (16, 256)]
    assert gains[0] == pytest.approx(gains[1])
