"""What each rule accepts, computed exactly: optimal transport, cover, counter-examples, and what lenience adds.

Sequoia, section 3.2.2 and appendix C.4. An acceptance is an average over all children that a node can get, with their
chances. Under lenience no token has more than p(x) / l, acceptance is as the paper says, and off it is exact.
"""

from functools import partial

import numpy as np
import pytest
import torch
from tables import (
    KINDS,
    LEAST_P,
    ROOT,
    VOCAB_SIZE,
    WRONG_P,
    TableSampler,
    count_pairs,
    distributions,
    every_tree,
    grow,
    p_value,
    pair,
    pair_distribution,
)
from tables import acceptance as accepted

from offload.drafting.static import draw_children
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import Floats, TokenTree
from offload.trees.topology import Topology, k_ary
from offload.trees.verification import (
    Rule,
    Trials,
    acceptance_rate,
    division_factor,
    find_rule,
    match,
)

PAPER = ([1.0, 0.0], [0.5, 0.5])  # P, Q
ALIKE = ([0.6, 0.4], [0.6, 0.4])
APART = ([0.3, 0.7, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1])  # no token in common


def accepts(rule: str, distributions: tuple[list[float], list[float]], num_children: int) -> float:
    """The exact chance that one of `num_children` children is accepted."""
    target_V, draft_V = np.float32(distributions[0]).astype(float), np.float32(distributions[1]).astype(float)
    target_V, star = target_V / target_V.sum(), k_ary(num_children, 1 + num_children)
    if rule == "topk":
        tree = likeliest_tree(draft_V, num_children)
        return float(sum(target_V[token] for token in set(tree.tokens[1:])))
    draw, trials = KINDS[rule]
    draft_VV = np.tile(draft_V, (len(draft_V), 1))
    trees = every_tree(draft_VV, star, 0, draw)
    return sum(chance * accepted(trials, target_V, list(tree.offers(0))) for chance, tree in trees)


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
    target_V, draft_V = (
        np.append(rng.dirichlet(np.ones(num)), np.zeros(size - num)) for num in (max(1, support - 1), support)
    )
    return target_V.tolist(), draft_V.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", KINDS)
def test_one_child_is_accepted_as_often_as_can_be(rule: str, seed: int) -> None:
    """Optimal transport: 1 - TV(P, Q)."""
    target, draft = distributions = random_distributions(seed)
    assert accepts(rule, distributions, 1) == pytest.approx(np.minimum(target, draft).sum(), abs=1e-6)


# The paper's own: two children, Q = [.5, .5], P = [1, 0]: drawn with replacement, both are wrong a quarter of the time.
EXAMPLES = [
    ("topk", ALIKE, 1, 0.6),  # the likeliest child is no optimal transport
    ("sequoia", ALIKE, 1, 1),
    ("sequoia", APART, 4, 1),  # as many children as tokens cover any target
    ("topk", APART, 4, 1),
    ("specinfer", PAPER, 2, 0.75),
    ("spectr", PAPER, 2, 0.75),
    ("sequoia", PAPER, 2, 1),
    ("topk", PAPER, 2, 1),
]


@pytest.mark.parametrize(("rule", "distributions", "num_children", "wanted"), EXAMPLES)
def test_examples_by_hand(
    rule: str, distributions: tuple[list[float], list[float]], num_children: int, wanted: float
) -> None:
    assert accepts(rule, distributions, num_children) == pytest.approx(wanted, abs=1e-6 if wanted == 0.6 else 1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", ["sequoia", "topk"])
def test_as_many_children_as_the_draft_has_tokens_cover_the_target(rule: str, seed: int) -> None:
    assert accepts(rule, random_distributions(seed, support=3), 3) == pytest.approx(1, abs=1e-12)


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


HOT = Sampling(temperature=1.0, seed=2)
NUM_RUNS = 2_000
LENIENCES = (1.0, 0.5, 0.3, 0.1)


def first_token(tree: TokenTree, target_V: Floats, trials: Trials, lenience: float) -> tuple[Floats, float]:
    """The exact distribution of what a root's children and its last draw give, and the chance that none is accepted."""
    probs_V, left, residual_V = np.zeros(len(target_V)), 1.0, target_V
    for child, chance, remainder_V in trials(target_V, tree.offers(0)):
        lenient = min(1.0, chance / lenience)
        probs_V[tree.tokens[child]] += left * lenient
        left, residual_V = left * (1 - lenient), remainder_V
    return probs_V + left * residual_V, left


@pytest.mark.parametrize("num_children", [1, 3])
@pytest.mark.parametrize("draft", ["good", "bad", "disjoint"])
@pytest.mark.parametrize("name", KINDS)
def test_no_token_has_more_than_its_chance_over_the_lenience(name: str, draft: str, num_children: int) -> None:
    """No sampling error: all draws of the children with their chances."""
    draw, trials = KINDS[name]
    target_VV, draft_VV = (distributions(logits_VV, HOT) for logits_VV in pair(draft))
    trees, rejected = list(every_tree(draft_VV, k_ary(num_children, 1 + num_children), ROOT, draw)), []
    for lenience in LENIENCES:
        outcomes = [(chance, *first_token(tree, target_VV[ROOT], trials, lenience)) for chance, tree in trees]
        probs_V = sum(chance * one_V for chance, one_V, _ in outcomes)
        assert (probs_V <= target_VV[ROOT] / lenience + 1e-9).all()
        assert np.abs(probs_V - target_VV[ROOT]).sum() < 1e-6 or lenience < 1
        rejected.append(sum(chance * left for chance, _, left in outcomes))
        if num_children == 1:
            assert 1 - rejected[-1] == pytest.approx(
                acceptance_rate(target_VV[ROOT], draft_VV[ROOT], lenience), abs=1e-6
            )
    assert rejected == sorted(rejected, reverse=True)
    assert rejected[-1] < rejected[0] or rejected[0] < 1e-9 or draft == "disjoint"


def counted(rule: Rule) -> Floats:
    """Runs (V, V) on trees of three children."""
    target_VV, draft_VV = pair("bad")
    grow_trees = partial(grow, draft_VV, k_ary(3, 4))
    return count_pairs(grow_trees, rule.verify, target_VV, TableSampler(HOT, rule), NUM_RUNS)


@pytest.mark.parametrize("name", [*KINDS, "match", "topk"])
def test_a_lenient_rule_says_that_it_is_not_exact(name: str) -> None:
    assert find_rule(name, 1).is_exact and not find_rule(name, 0.4).is_exact


@pytest.mark.parametrize("name", KINDS)
def test_rules_emit_as_the_trials_say(name: str) -> None:
    """The walk of a lenient rule, against the bound and against what is exact, from which it must differ."""
    rule, lenience, probs_VV = find_rule(name, 0.4), 0.4, distributions(pair("bad")[0], HOT)
    assert not rule.is_exact and not rule.repeats_draws
    count_VV = counted(rule)
    first_V = count_VV.sum(1) / NUM_RUNS
    doubt_V = 4 * np.sqrt(first_V * (1 - first_V) / NUM_RUNS) + 1e-9
    assert (first_V <= probs_VV[ROOT] / lenience + doubt_V).all()
    assert p_value(count_VV, pair_distribution(probs_VV)) < WRONG_P, "lenience that is on by mistake is seen"
    exact = find_rule(name, 1)
    assert exact.verify is find_rule(name).verify, "a lenience of one is the rule itself"
    assert exact.is_exact and find_rule("match", 1).verify is match
    assert p_value(counted(exact), pair_distribution(probs_VV)) > LEAST_P


TREE = TokenTree(Topology.from_parents([-1, 0, 0, 0, 1]), torch.tensor([0, 4, 2, 1, 5]))
NEAR: dict[str, tuple[list[float], float, list[int], list[float]]] = {
    "no child is near": ([0, 1, 2, 3, 0, 0], 0.5, [3], [0.0]),
    "the best child of two": ([0, 1, 2.5, 3, 2.9, 0], 0.5, [4, 3], [1.0, 0.0]),
    "not the draft's own favourite": ([0, 1, 2.9, 3, 2.5, 0], 0.5, [2, 3], [1.0]),
    "just so: log 0.5 is -0.69": ([0, 2.35, 0, 3, 0, 0], 0.5, [1, 3], [0.0]),
    "just not": ([0, 2.25, 0, 3, 0, 0], 0.5, [3], [0.0]),
    "the target's own argmax goes first": ([0, 3, 0, 2.9, 2.9, 0], 0.9, [1, 3], [1.0]),
}


@pytest.mark.parametrize("name", ["match", "topk", "sequoia", "specinfer"])
@pytest.mark.parametrize(("scores", "lenience", "tokens", "guesses"), NEAR.values(), ids=NEAR)
def test_at_temperature_0_a_child_must_be_nearly_the_likeliest(
    name: str, scores: list[float], lenience: float, tokens: list[int], guesses: list[float]
) -> None:
    """p(x) >= l max(p), where p is the distribution at temperature 1."""
    rule, last_V = find_rule(name, lenience), [0.0, 0, 0, 9, 0, 0]
    logits_NV = torch.tensor([scores, last_V, last_V, last_V, last_V])
    found = rule.verify(TREE, logits_NV, Sampler(Sampling(), VOCAB_SIZE, rule.drafting), 7)
    assert found.tokens == tokens and list(found.guesses) == guesses
