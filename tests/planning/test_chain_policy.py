"""The formulas of Leviathan et al. (2211.17192) against their tables, and the lengths of chains that follow."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from offload.planning.chains import ChainPolicy, best_length, tokens_per_pass
from offload.planning.cost_model import Costs, Curve, Traffic
from offload.stats import RunningMean
from offload.trees.verification import acceptance_rate

TABLE_4 = [  # gamma, alpha, c, EXP; the first three are also those of table 2, row by row
    *[(7, 0.75, 0.02, 3.2), (7, 0.80, 0.04, 3.3), (7, 0.82, 0.11, 2.5)],
    *[(7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0)],
    *[(5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0)],
    *[(5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6)],
]
MOST = 32


def wall_clock_gain(alpha: float, gamma: int, cost: float) -> float:
    """Return the speedup over decoding without guesses (Theorem 3.8).

    `cost` is c: a draft step over a run of the target.
    """
    return tokens_per_pass(alpha, gamma) / (gamma * cost + 1)


def paper(cost: float) -> Callable[[int], float]:
    """What a step takes, in runs of the target."""
    return lambda gamma: gamma * cost + 1


@pytest.mark.parametrize(("gamma", "alpha", "cost", "expected"), TABLE_4)
def test_expected_gains_of_table_4(gamma: int, alpha: float, cost: float, expected: float) -> None:
    """To one digit; alpha and c have two themselves, whose rounding the larger c feels."""
    lowest, highest = (wall_clock_gain(alpha + sign * 0.005, gamma, cost - sign * 0.005) for sign in (-1, 1))
    assert lowest - 0.05 <= expected <= highest + 0.05
    assert wall_clock_gain(alpha, gamma, cost) == pytest.approx(expected, abs=0.07)


def test_the_lengths_of_table_2_are_nearly_the_best() -> None:
    """All within 3 % of the best integer; where alpha is low and curves are sharp they are that integer."""
    best = [best_length(alpha, MOST, paper(cost)) for _, alpha, cost, _ in TABLE_4]
    for (gamma, alpha, cost, _), own in zip(TABLE_4, best, strict=True):
        assert 0.97 <= wall_clock_gain(alpha, gamma, cost) / wall_clock_gain(alpha, own, cost) <= 1
        assert abs(own - gamma) <= 2
    assert [own for own, row in zip(best, TABLE_4, strict=True) if own == row[0]] == [5, 3]


def test_gains_are_those_of_section_3() -> None:
    # Section 3.6: alpha 0.2, c = 0 and gamma 3 give 1.25; more guesses give no more than 1 / (1 -
    # alpha).
    assert wall_clock_gain(0.2, 3, 0) == pytest.approx(1.25, abs=0.005)
    assert wall_clock_gain(0.2, 1000, 0) == pytest.approx(1 / 0.8)
    # Corollary 3.9: with alpha > c there is a gain, of (1 + alpha) / (1 + c) at least; else no
    # guess is best.
    for alpha, cost in ((0.3, 0.2), (0.21, 0.2), (0.9, 0.5)):
        gamma = best_length(alpha, MOST, paper(cost))
        assert wall_clock_gain(alpha, gamma, cost) >= (1 + alpha) / (1 + cost) > 1
    assert best_length(0.2, MOST, paper(0.2)) == best_length(0.1, MOST, paper(0.2)) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9999999, 1.0])
def test_tokens_of_a_run_are_those_of_a_capped_geometric_variable(alpha: float) -> None:
    for gamma in (0, 1, 7):
        chances = [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]
        wanted = sum((n + 1) * chance for n, chance in enumerate(chances))
        assert tokens_per_pass(alpha, gamma) == pytest.approx(wanted)


def test_alpha_is_the_overlap_and_a_chance_whatever_rounding_does() -> None:
    generator = np.random.default_rng(3)
    for p_V, q_V in generator.dirichlet(np.full(9, 0.4), (50, 2)):
        by_hand = math.fsum(q * min(1, p / q) for p, q in zip(p_V, q_V, strict=True))
        assert acceptance_rate(p_V, q_V) == pytest.approx(by_hand)
        half_of_difference = np.abs(p_V - q_V).sum() / 2  # D_LK, Lemma 3.3
        assert acceptance_rate(p_V, q_V) == pytest.approx(1 - half_of_difference)
        lenient = math.fsum(q * min(1, p / (0.3 * q)) for p, q in zip(p_V, q_V, strict=True))
        assert acceptance_rate(p_V, q_V, 0.3) == pytest.approx(lenient)
        assert lenient >= by_hand
    same_V, other_V = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])
    assert acceptance_rate(same_V, same_V) == 1 and acceptance_rate(same_V, other_V) == 0
    # It is a chance whatever rounding does.
    p_V = np.array([0.6, 0.4 + 4e-16])
    assert p_V.sum() > 1, "as sums of softmax may be"
    policy, seen = ChainPolicy.assumed(1.0, MOST), RunningMean()
    seen.add([acceptance_rate(p_V, p_V)] * 40)
    assert policy.length(seen) == MOST


def test_where_steps_take_what_the_paper_says_the_policy_is_the_papers() -> None:
    """Everything in memory, a draft step as a share c of a run: then gains and lengths are those of Theorem 3.8."""
    for _, alpha, cost, _ in TABLE_4:
        costs = Costs(
            compute_s=Curve((1,), (2.0,)), draft_step_s=Curve((1,), (2.0 * cost,)), verify_s=0, link_bytes_per_s=1
        )
        policy = ChainPolicy.from_costs(alpha, costs, Traffic(0, 0), MOST)
        assert policy.length() == best_length(alpha, MOST, paper(cost))
        for gamma in (0, 1, 5, MOST):
            gain = policy.predicted(0).s_per_token / policy.predicted(gamma).s_per_token
            assert gain == pytest.approx(wall_clock_gain(alpha, gamma, cost))


def streamed(slots_bytes: int, rows_s: float = 0.0) -> ChainPolicy:
    """A sweep of ten seconds on the link, draft steps of half a second, computing that may grow with the rows."""
    compute_s = Curve((1, 33), (1.0, 1.0 + 32 * rows_s))
    costs = Costs(compute_s=compute_s, draft_step_s=Curve((1,), (0.5,)), verify_s=0, link_bytes_per_s=1)
    return ChainPolicy.from_costs(0.8, costs, Traffic(10, slots_bytes), MOST)


def test_drafting_that_the_link_hides_makes_chains_longer_and_computing_makes_them_shorter() -> None:
    plain, hidden, computing = streamed(0).length(), streamed(8).length(), streamed(8, rows_s=2.0).length()
    assert plain == best_length(0.8, MOST, paper(0.05))
    assert hidden >= 16 > plain > computing


def test_a_run_believes_its_own_guesses_the_more_it_has_seen() -> None:
    policy, seen = ChainPolicy.assumed(0.8, MOST), RunningMean()
    lengths = [policy.length(seen)]
    for _ in range(40):
        seen.add([0.2] * 5)
        lengths.append(policy.length(seen))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == policy.length() > 5
    assert lengths[-1] == best_length(policy.belief(seen), MOST, paper(0.05)) <= 2
    assert policy.belief(seen) == pytest.approx((16 * 0.8 + 200 * 0.2) / 216)
    assert ChainPolicy.assumed(0.8, 3).length() == 3, "memory has no room for more"
    # An estimate knows how far it is to be trusted.
    values = np.random.default_rng(5).random(300)
    found = RunningMean()
    found.add(values.tolist())
    assert found.mean == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(300))
    assert RunningMean().mean is None and RunningMean(1, 1.0, 1.0).standard_error is None
