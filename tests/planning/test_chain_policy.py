"""The formulas of Leviathan et al. (2211.17192) against their tables, and the lengths of chains that follow."""

import math
from typing import Any

import numpy as np
import pytest
from known import selector

from offload.planning.acceptance import SMALL
from offload.planning.choice import TreeChoice, chain_tokens
from offload.planning.cost_model import Costs, Curve, Traffic
from offload.planning.observed_passes import ObservedPass
from offload.sampling_options import Sampling
from offload.stats import RunningMean
from offload.trees.topology import DEFAULT_ACCEPTANCE, chain
from offload.trees.verification import acceptance_rate

TABLE_4 = [  # gamma, alpha, c, EXP; the first three are also those of table 2, row by row
    *[(7, 0.75, 0.02, 3.2), (7, 0.80, 0.04, 3.3), (7, 0.82, 0.11, 2.5)],
    *[(7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0)],
    *[(5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0)],
    *[(5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6)],
]
IN_MEMORY, RUN = Traffic(0, 0), Curve((1,), (1.0,))


def wall_clock_gain(alpha: float, gamma: int, cost: float) -> float:
    """Return the speedup over decoding without guesses (Theorem 3.8).

    `cost` is c: a draft step over a run of the target.
    """
    return chain_tokens(alpha, gamma) / (gamma * cost + 1)


def chosen(alpha: float, cost: float, traffic: Traffic = IN_MEMORY, compute: Curve = RUN, **options: Any) -> TreeChoice:
    """Return the chain where a draft step takes a share c of a run of the target."""
    tried = Costs(compute_s=compute, draft_step_s=Curve((1,), (cost,)), verify_s=0, link_bytes_per_s=1)
    prior = SMALL._replace(acceptance=(alpha,))
    return selector("chain:auto", traffic, prior=prior, tried=tried, **options).for_run(Sampling(), "match")


def best_length(alpha: float, cost: float) -> int:
    return chosen(alpha, cost).shape.depth


@pytest.mark.parametrize(("gamma", "alpha", "cost", "expected"), TABLE_4)
def test_expected_gains_of_table_4(gamma: int, alpha: float, cost: float, expected: float) -> None:
    """To one digit; alpha and c have two themselves, whose rounding the larger c feels."""
    lowest, highest = (wall_clock_gain(alpha + sign * 0.005, gamma, cost - sign * 0.005) for sign in (-1, 1))
    assert lowest - 0.05 <= expected <= highest + 0.05
    assert wall_clock_gain(alpha, gamma, cost) == pytest.approx(expected, abs=0.07)


def test_the_lengths_of_table_2_are_nearly_the_best() -> None:
    """All within 3 % of the best integer; where alpha is low and curves are sharp they are that integer."""
    best = [best_length(alpha, cost) for _, alpha, cost, _ in TABLE_4]
    for (gamma, alpha, cost, _), length in zip(TABLE_4, best, strict=True):
        gains = [wall_clock_gain(alpha, num, cost) for num in range(33)]
        assert gains[length] == max(gains) and gains[gamma] >= 0.97 * max(gains)
        assert abs(length - gamma) <= 2
    assert [length for length, row in zip(best, TABLE_4, strict=True) if length == row[0]] == [5, 3]


def test_gains_are_those_of_section_3() -> None:
    # Section 3.6: alpha 0.2, c = 0 and gamma 3 give 1.25; more guesses give no more than 1 / (1 -
    # alpha).
    assert wall_clock_gain(0.2, 3, 0) == pytest.approx(1.25, abs=0.005)
    assert wall_clock_gain(0.2, 1000, 0) == pytest.approx(1 / 0.8)
    # Corollary 3.9: with alpha > c there is a gain, of (1 + alpha) / (1 + c) at least; else no
    # guess is best.
    for alpha, cost in ((0.3, 0.2), (0.21, 0.2), (0.9, 0.5)):
        assert wall_clock_gain(alpha, best_length(alpha, cost), cost) >= (1 + alpha) / (1 + cost) > 1
    assert best_length(0.2, 0.2) == best_length(0.1, 0.2) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9999999, 1.0])
def test_tokens_of_a_run_are_those_of_a_capped_geometric_variable(alpha: float) -> None:
    for gamma in (0, 1, 7):
        chances = [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]
        wanted = sum((n + 1) * chance for n, chance in enumerate(chances))
        assert chain_tokens(alpha, gamma) == pytest.approx(wanted)


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
    assert acceptance_rate(p_V, p_V) <= 1


def test_drafting_that_the_link_hides_makes_chains_longer_and_computing_makes_them_shorter() -> None:
    """A sweep of ten seconds on the link, draft steps of half a second, computing that may grow with the rows."""
    slow = Curve((1, 33), (1.0, 65.0))
    plain, hidden, computing = (
        chosen(0.8, 0.5, Traffic(10, slots), compute).shape.depth for slots, compute in ((0, RUN), (8, RUN), (8, slow))
    )
    assert plain == best_length(0.8, 0.05)
    assert hidden >= 16 > plain > computing


def test_chains_follow_those_that_were_run_the_more_were_seen() -> None:
    """Nothing is known of costs: a draft step is a twentieth of a pass."""
    trees = selector("chain:auto")
    first = trees.for_run(Sampling(), "match")
    lengths = [first.shape.depth]
    for _ in range(60):
        trees.observe(ObservedPass([chain(5)], [6], [1], 1.0, 9.0, 0.0, 0))  # every first guess is wrong
        lengths.append(trees.for_run(Sampling(), "match").shape.depth)
    assert lengths[0] > 5 and lengths == sorted(lengths, reverse=True) and lengths[-1] <= 2
    prior = DEFAULT_ACCEPTANCE[0]
    assert trees.knowledge.passes.chain_alpha(prior) == pytest.approx(16 * prior / (16 + 48))
    assert "alpha" in first.why and selector("chain:auto", max_nodes=4).for_run(Sampling(), "match").shape.depth == 3
    # An estimate knows how far it is to be trusted.
    values = np.random.default_rng(5).random(300)
    mean = RunningMean()
    mean.add(values.tolist())
    assert mean.mean == pytest.approx(values.mean())
    assert mean.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(300))
    assert RunningMean().mean is None and RunningMean(1, 1.0, 1.0).standard_error is None
