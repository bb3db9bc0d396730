"""Lenience: no token with more than p(x) / l, acceptance as the paper says, and exact wherever it is off."""

from functools import partial

import numpy as np
import pytest
import torch
from tables import (
    ROOT,
    VOCAB_SIZE,
    TableSampler,
    count_pairs,
    distributions,
    every_tree,
    grow,
    p_value,
    pair,
    pair_distribution,
)

from offload.sampling.sampler import Sampler
from offload.trees.token_tree import Draw, Floats, TokenTree
from offload.trees.topology import Topology, chain, k_ary
from offload.trees.verification import (
    Trials,
    acceptance,
    find_rule,
    k_sequential,
    k_sequential_trials,
    match,
    ratio,
    ratio_trials,
)
from offload.units import Sampling

HOT = Sampling(temperature=1.0, seed=2)
NUM_RUNS, LEAST_P, WRONG_P = 2_000, 1e-3, 1e-6
KINDS = {
    "sequoia": (Draw.WITHOUT_REPLACEMENT, ratio_trials),
    "specinfer": (Draw.WITH_REPLACEMENT, ratio_trials),
    "spectr": (Draw.WITH_REPLACEMENT, k_sequential_trials),
}
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
            assert 1 - rejected[-1] == pytest.approx(acceptance(target_VV[ROOT], draft_VV[ROOT], lenience), abs=1e-6)
    assert rejected == sorted(rejected, reverse=True)
    assert rejected[-1] < rejected[0] or rejected[0] < 1e-9 or draft == "disjoint"


@pytest.mark.parametrize("name", KINDS)
def test_rules_emit_as_the_trials_say(name: str) -> None:
    """The walk of a lenient rule, against the bound and against what is exact, from which it must differ."""
    (target_VV, draft_VV), lenience = pair("bad"), 0.4
    rule, probs_VV = find_rule(name, lenience), distributions(target_VV, HOT)
    assert not rule.is_exact and not rule.repeats_draws
    count_VV = count_pairs(
        partial(grow, draft_VV, k_ary(3, 4)), rule.verify, target_VV, TableSampler(HOT, rule), NUM_RUNS
    )
    first_V = count_VV.sum(1) / NUM_RUNS
    doubt_V = 4 * np.sqrt(first_V * (1 - first_V) / NUM_RUNS) + 1e-9
    assert (first_V <= probs_VV[ROOT] / lenience + doubt_V).all()
    assert p_value(count_VV, pair_distribution(probs_VV)) < WRONG_P, "lenience that is on by mistake is seen"


@pytest.mark.parametrize("name", KINDS)
def test_a_lenience_of_one_is_the_exact_rule_itself(name: str) -> None:
    assert find_rule(name, 1).verify is find_rule(name).verify in (ratio, k_sequential)
    assert find_rule(name, 1).is_exact and find_rule("match", 1).verify is match
    (target_VV, draft_VV), rule = pair("bad"), find_rule(name, 1.0)
    count_VV = count_pairs(
        partial(grow, draft_VV, k_ary(3, 4)), rule.verify, target_VV, TableSampler(HOT, rule), NUM_RUNS
    )
    assert p_value(count_VV, pair_distribution(distributions(target_VV, HOT))) > LEAST_P


def test_acceptance_grows_as_the_paper_says() -> None:
    """Section A.5: alpha is the sum of min(p / l, q), and that share of the guesses is accepted."""
    target_VV, draft_VV = pair("bad")
    p_V, q_V = (distributions(logits_VV, HOT)[ROOT] for logits_VV in (target_VV, draft_VV))
    shares = []
    for lenience in LENIENCES:
        rule = find_rule("specinfer", lenience)
        sampler, wanted = TableSampler(HOT, rule), acceptance(p_V, q_V, lenience)
        trees = grow(draft_VV, chain(1), torch.full((NUM_RUNS,), ROOT), sampler)
        steps = [rule.verify(tree, target_VV[tree.token_N], sampler, 0) for tree in trees]
        assert all(step.guesses == [pytest.approx(wanted, abs=1e-6)] for step in steps)
        shares.append(np.mean([len(step.nodes) > 1 for step in steps]))
        assert abs(shares[-1] - wanted) < 4 * (wanted * (1 - wanted) / NUM_RUNS) ** 0.5 + 1e-9
    assert shares == sorted(shares) and shares[-1] > shares[0] + 0.2


PARENTS = Topology.from_parents([-1, 0, 0, 0, 1])
TREE = TokenTree(PARENTS, torch.tensor([0, 4, 2, 1, 5]))


@pytest.mark.parametrize("name", ["match", "topk", "sequoia", "specinfer"])
@pytest.mark.parametrize(
    ("scores", "lenience", "tokens", "guesses"),
    [
        pytest.param([0, 1, 2, 3, 0, 0], 0.5, [3], [0.0], id="no child is near"),
        pytest.param([0, 1, 2.5, 3, 2.9, 0], 0.5, [4, 3], [1.0, 0.0], id="the best child of two"),
        pytest.param([0, 1, 2.9, 3, 2.5, 0], 0.5, [2, 3], [1.0], id="not the draft's own favourite"),
        pytest.param([0, 2.35, 0, 3, 0, 0], 0.5, [1, 3], [0.0], id="just so: log 0.5 is -0.69"),
        pytest.param([0, 2.25, 0, 3, 0, 0], 0.5, [3], [0.0], id="just not"),
        pytest.param([0, 3, 0, 2.9, 2.9, 0], 0.9, [1, 3], [1.0], id="the target's own argmax goes first"),
    ],
)
def test_at_temperature_0_a_child_must_be_nearly_the_likeliest(
    name: str, scores: list[float], lenience: float, tokens: list[int], guesses: list[float]
) -> None:
    """p(x) >= l max(p), where p is the distribution at temperature 1."""
    rule, last_V = find_rule(name, lenience), [0.0, 0, 0, 9, 0, 0]
    logits_NV = torch.tensor([scores, last_V, last_V, last_V, last_V])
    found = rule.verify(TREE, logits_NV, Sampler(Sampling(), VOCAB_SIZE, rule.drafting), 7)
    assert found.tokens == tokens and list(found.guesses) == guesses
