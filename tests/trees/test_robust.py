"""What each rule accepts, computed exactly: optimal transport, the cover property, and the paper's counter-examples.

Sequoia, section 3.2.2 and appendix C.4. An acceptance is an average over all children that a node can get, with their
chances; no run is made and no coin is tossed.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tables import acceptance, every_tree

from offload.drafting.static import draw_children
from offload.sampling.sampler import Sampler
from offload.trees.token_tree import Draw, Floats, TokenTree
from offload.trees.topology import k_ary
from offload.trees.verification import division_factor, k_sequential_trials, ratio_trials
from offload.units import ChildSampling, Sampling

DRAWN = {
    "sequoia": (Draw.WITHOUT_REPLACEMENT, ratio_trials),
    "specinfer": (Draw.WITH_REPLACEMENT, ratio_trials),
    "spectr": (Draw.WITH_REPLACEMENT, k_sequential_trials),
}
PAPER = ([1.0, 0.0], [0.5, 0.5])  # P, Q
ALIKE = ([0.6, 0.4], [0.6, 0.4])


def accepts(rule: str, distributions: tuple[list[float], list[float]], num_children: int) -> float:
    """The exact chance that one of `num_children` children is accepted."""
    target_V, draft_V = np.float32(distributions[0]).astype(float), np.float32(distributions[1]).astype(float)
    target_V, star = target_V / target_V.sum(), k_ary(num_children, 1 + num_children)
    if rule == "topk":
        tree = likeliest_tree(draft_V, num_children)
        return float(sum(target_V[token] for token in set(tree.tokens[1:])))
    draw, trials = DRAWN[rule]
    draft_VV = np.tile(draft_V, (len(draft_V), 1))
    trees = every_tree(draft_VV, star, 0, draw)
    return sum(chance * acceptance(trials, target_V, list(tree.offers(0))) for chance, tree in trees)


def likeliest_tree(draft_V: Floats, num_children: int) -> TokenTree:
    """A star as a draft fills it for the rule `topk`."""
    sampler = Sampler(Sampling(temperature=1), len(draft_V), ChildSampling.TOP_K)
    logits_1V = torch.from_numpy(np.log(draft_V + 1e-30))[None]
    children = draw_children(logits_1V, num_children, sampler, 0)
    assert children.probs_WV is None, "top-k children are point masses, nobody needs their law"
    return TokenTree(k_ary(num_children, 1 + num_children), torch.cat([torch.zeros(1).long(), children.token_WK[0]]))


def random_distributions(seed: int, size: int = 5, support: int = 5) -> tuple[list[float], list[float]]:
    """A target and a draft that has `support` tokens, the target's among them."""
    rng = np.random.default_rng(seed)
    distributions = []
    for size_of_support in (max(1, support - 1), support):
        probs_V = np.zeros(size)
        probs_V[:size_of_support] = rng.dirichlet(np.ones(size_of_support))
        distributions.append(probs_V.tolist())
    return distributions[0], distributions[1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", DRAWN)
def test_one_child_is_accepted_as_often_as_can_be(rule: str, seed: int) -> None:
    """Optimal transport: 1 - TV(P, Q)."""
    target, draft = distributions = random_distributions(seed)
    assert accepts(rule, distributions, 1) == pytest.approx(np.minimum(target, draft).sum(), abs=1e-6)


def test_likeliest_child_is_no_optimal_transport() -> None:
    assert accepts("topk", ALIKE, 1) == pytest.approx(0.6)
    assert accepts("sequoia", ALIKE, 1) == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", ["sequoia", "topk"])
def test_as_many_children_as_the_draft_has_tokens_cover_the_target(rule: str, seed: int) -> None:
    assert accepts(rule, random_distributions(seed, support=3), 3) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("rule", ["sequoia", "topk"])
def test_as_many_children_as_tokens_cover_any_target(rule: str) -> None:
    """Whatever the draft: here it has no token in common with the target."""
    assert accepts(rule, ([0.3, 0.7, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1]), 4) == pytest.approx(1, abs=1e-12)


def test_counter_examples_of_the_paper() -> None:
    """Two children, Q = [.5, .5], P = [1, 0]: drawn with replacement, both are wrong a quarter of the time."""
    assert accepts("specinfer", PAPER, 2) == pytest.approx(0.75, abs=1e-12)
    assert accepts("spectr", PAPER, 2) == pytest.approx(0.75, abs=1e-12)
    assert accepts("sequoia", PAPER, 2) == 1
    assert accepts("topk", PAPER, 2) == 1


@pytest.mark.parametrize("seed", range(5))
def test_spectr_accepts_what_its_formula_says(seed: int) -> None:
    """1 - (1 - beta)^k with the least valid rho, which a fine grid finds as well."""
    target, draft = distributions = random_distributions(seed)
    target_V, draft_V = np.array(target), np.array(draft)
    grid = np.linspace(1, 3, 200_001)
    beta = np.minimum(draft_V, target_V / grid[:, None]).sum(1)
    is_valid = 1 - (1 - beta) ** 3 <= grid * beta
    rho = division_factor(target_V, draft_V, 3)
    assert rho == pytest.approx(grid[is_valid][0], abs=2e-5)
    assert accepts("spectr", distributions, 3) == pytest.approx(1 - (1 - beta[is_valid][0]) ** 3, abs=2e-5)


@pytest.mark.parametrize("seed", range(20))
def test_spectr_leaves_no_negative_mass(seed: int) -> None:
    """The clamp in the rule only removes rounding: what remains is a distribution by itself."""
    target, draft = random_distributions(seed, size=6, support=6)
    target_V, draft_V = np.array(target), np.array(draft)
    for num_draws in (1, 2, 5, 16):
        rho = division_factor(target_V, draft_V, num_draws)
        common_V = np.minimum(draft_V, target_V / rho)
        beta = common_V.sum()
        left_V = target_V - common_V * (1 - (1 - beta) ** num_draws) / beta
        assert left_V.min() > -1e-12 and left_V.sum() == pytest.approx((1 - beta) ** num_draws, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", DRAWN)
def test_one_more_child_never_hurts(rule: str, seed: int) -> None:
    rates_K = [accepts(rule, random_distributions(seed, size=4, support=4), k) for k in (1, 2, 3, 4)]
    assert all(more >= less - 1e-9 for less, more in pairwise(rates_K))
