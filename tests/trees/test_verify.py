"""The rules: `match` on hand-written scores and against decoding without a tree; and what ratios accept, exactly."""

from functools import lru_cache, partial

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
    Verify,
    count_pairs,
    distributions,
    emitted_token,
    every_tree,
    grow,
    outcomes,
    p_value,
    pair,
    pair_distribution,
)
from test_topology import random_topology
from torch import Tensor

from offload.drafting.static import draw_children
from offload.errors import UserError
from offload.kernels.match_rows import match_rows_reference
from offload.kernels.registry import REFERENCES, KernelSet
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import Floats, Proposals, TokenTree
from offload.trees.topology import Topology, best_first, chain, k_ary
from offload.trees.verification import (
    Acceptance,
    Rule,
    acceptance_rate,
    division_factor,
    find_rule,
    match,
    ratio_trials,
    walk,
)

GREEDY = Sampler(Sampling(), 10)
#         0
#       / | \        tokens: 5; 1 2 3; 4 6 under 1; 1 under 2; 8 under 4
#      1  2  3
PARENTS, TOKENS = [-1, 0, 0, 0, 1, 1, 2, 4], [5, 1, 2, 3, 4, 6, 1, 8]


def scores(*best: int) -> Tensor:
    """Logits after every node, whose greedy choices are these."""
    return torch.nn.functional.one_hot(torch.tensor(best), 10).float()


def accept(best: list[int], tokens: list[int] = TOKENS) -> Acceptance:
    return match(TokenTree(Topology.from_parents(PARENTS), torch.tensor(tokens)), scores(*best), GREEDY, 7)


WALKS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "never": ([9, 0, 0, 0, 0, 0, 0, 0], [0], [9]),
    "always": ([1, 4, 0, 0, 8, 0, 0, 3], [0, 1, 4, 7], [1, 4, 8, 3]),
    "sometimes": ([1, 6, 0, 0, 8, 7, 0, 3], [0, 1, 5], [1, 6, 7]),
    "second child": ([2, 4, 1, 0, 8, 0, 9, 3], [0, 2, 6], [2, 1, 9]),
    "a leaf's own token": ([3, 4, 1, 7, 8, 0, 9, 3], [0, 3], [3, 7]),
    "a grandchild is no child": ([1, 8, 0, 0, 8, 0, 0, 0], [0, 1], [1, 8]),
    "the root is not its own child": ([5, 1, 0, 0, 0, 0, 0, 0], [0], [5]),
}


@pytest.mark.parametrize(("best", "nodes", "tokens"), WALKS.values(), ids=WALKS)
def test_the_walk_follows_the_targets_choices(best: list[int], nodes: list[int], tokens: list[int]) -> None:
    assert accept(best)[:2] == (nodes, tokens)


def test_of_equal_siblings_the_first_is_taken() -> None:
    """Its rows are as good as its reference's, and the draft was surer of what stands below it."""
    references = [5, 1, 1, 1, 4, 6, 9, 8]
    assert accept([1, 4, 9, 0, 8, 0, 0, 2], references)[:2] == ([0, 1, 4, 7], [1, 4, 8, 2])
    assert accept([1, 9, 9, 0, 8, 0, 0, 2], references)[:2] == ([0, 1], [1, 9]), "node 6 is a child of the twin"
    assert match(TokenTree(chain(0), torch.tensor([5])), scores(3), GREEDY, 0)[:2] == ([0], [3]), "a lone root"


AT_ONCE = REFERENCES._replace(match_rows=match_rows_reference)


@pytest.mark.parametrize("kernels", [REFERENCES, AT_ONCE], ids=["one by one", "at once"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("score", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused_on_the_way_and_nowhere_else(
    score: float, temperature: float, kernels: KernelSet
) -> None:
    """argmax would call the first of them the largest, and go on writing that token."""
    tree, sampler = TokenTree(Topology.from_parents(PARENTS), torch.tensor(TOKENS)), Sampling(temperature=temperature)
    scores_NV = 1000 * scores(1, 4, 0, 0, 8, 0, 0, 3)
    scores_NV[[2, 3, 5, 6], 7] = score
    walked = match(tree, scores_NV, Sampler(sampler, 10, kernels=kernels), 7)
    assert walked[:2] == ([0, 1, 4, 7], [1, 4, 8, 3]), "what was not accepted is not looked at"
    scores_NV[7, 2] = score
    with pytest.raises(UserError, match="scores are not finite numbers"):
        match(tree, scores_NV, Sampler(sampler, 10, kernels=kernels), 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("score", [torch.nan, torch.inf])
def test_ratio_rules_refuse_them_too(score: float, temperature: float) -> None:
    logits_1V = scores(3)
    logits_1V[0, 6] = score
    sampler = Sampler(Sampling(temperature=temperature), 10, ChildSampling.WITHOUT_REPLACEMENT)
    with pytest.raises(UserError, match="scores are not finite numbers"):
        walk(TokenTree(chain(0), torch.tensor([5])), logits_1V, sampler, ratio_trials)


@pytest.mark.parametrize("drafting", [ChildSampling.WITHOUT_REPLACEMENT, ChildSampling.WITH_REPLACEMENT])
def test_a_draft_without_numbers_is_refused_when_its_distribution_is_needed(drafting: ChildSampling) -> None:
    logits_1V, sampler = scores(3), Sampler(Sampling(temperature=1.0), 10, drafting)
    logits_1V[0, 6] = torch.nan
    token_1K, draw, distribution_1V = draw_children(logits_1V, 4, sampler, 0)
    assert distribution_1V is not None and token_1K.min() >= 0 and token_1K.max() < 10, (
        "the target can look these tokens up"
    )
    proposals = Proposals.blank(k_ary(4, 5), 10, draw)
    proposals.write([0], distribution_1V)
    tree = TokenTree(k_ary(4, 5), torch.cat([torch.tensor([5]), token_1K[0]]), proposals)
    with pytest.raises(UserError, match="scores are not finite numbers"):
        walk(tree, scores(1, 2, 3, 4, 5), sampler, ratio_trials)


NUM_WORDS = 7


@lru_cache(maxsize=1 << 14)
def next_logits(prefix: tuple[int, ...]) -> Tensor:
    """A model that looks at the whole prefix: a fixed random row for each."""
    return 2 * torch.randn(NUM_WORDS, generator=torch.Generator().manual_seed(hash(prefix) & 0xFFFFFFFF))


def plain_text(sampler: Sampler, prompt: tuple[int, ...], num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(sampler.draw(next_logits(tuple(tokens)), len(tokens)))
    return tokens[len(prompt) :]


def tree_text(
    sampler: Sampler, prompt: tuple[int, ...], num_new: int, shape: Topology, rule: Verify = match, seed: int = 0
) -> tuple[list[int], int]:
    """Decode with trees of that shape: the likeliest children, some of them replaced by chance; also counts sweeps."""
    rng, tokens, num_sweeps = np.random.default_rng(seed), list(prompt), 0
    while len(tokens) < len(prompt) + num_new:
        prefixes: list[tuple[int, ...]] = [tuple(tokens)]
        for node in range(1, shape.num_nodes):
            above = prefixes[int(shape.parent_N[node])]
            ranked = sampler.perturbed(next_logits(above)[None], len(above))[0].argsort(descending=True)
            token = int(ranked[int(shape.rank_N[node]) % NUM_WORDS])
            prefixes.append((*above, token if rng.random() < 0.7 else int(rng.integers(NUM_WORDS))))
        tree = TokenTree(shape, torch.tensor([prefix[-1] for prefix in prefixes]))
        logits_NV = torch.stack([next_logits(prefix) for prefix in prefixes])
        accepted = rule(tree, logits_NV, sampler, len(tokens) - 1)
        assert [tree.tokens[node] for node in accepted.nodes[1:]] == accepted.tokens[:-1]
        tokens += accepted.tokens
        num_sweeps += 1
    return tokens[len(prompt) :][:num_new], num_sweeps


SHAPES = {
    "none": chain(0),
    "chain": chain(4),
    "k-ary": k_ary(2, 15),
    "sequoia": best_first((0.6, 0.2, 0.1), 12, 4),
    **{f"random{seed}": random_topology(seed, 14) for seed in range(3)},
}
SAMPLINGS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}]


@pytest.mark.parametrize("settings", SAMPLINGS, ids=["greedy", "T1", "filtered"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_tree_changes_the_text(name: str, settings: dict[str, float]) -> None:
    sweeps = 0
    for seed in range(4):
        sampler = Sampler(Sampling(**settings, seed=seed), NUM_WORDS)
        wanted = plain_text(sampler, (1, 2, 3), 25)
        got, num_sweeps = tree_text(Sampler(Sampling(**settings, seed=seed), NUM_WORDS), (1, 2, 3), 25, SHAPES[name])
        assert got == wanted
        sweeps += num_sweeps
    assert sweeps == 100 if name == "none" else sweeps < 70, "several tokens a sweep, or nothing was put to the test"


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
    return sum(chance * (1 - outcomes(trials, target_V, list(tree.offers(0)))[1]) for chance, tree in trees)


def likeliest_tree(draft_V: Floats, num_children: int) -> TokenTree:
    """A star as a draft fills it for the rule `topk`."""
    sampler = Sampler(Sampling(temperature=1), len(draft_V), ChildSampling.TOP_K)
    logits_1V = torch.from_numpy(np.log(draft_V + 1e-30))[None]
    token_WK, _, probs_WV = draw_children(logits_1V, num_children, sampler, 0)
    assert probs_WV is None, "top-k children are point masses, which have no distribution"
    return TokenTree(k_ary(num_children, 1 + num_children), torch.cat([torch.zeros(1).long(), token_WK[0]]))


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


@pytest.mark.parametrize("num_children", [1, 3])
@pytest.mark.parametrize("draft", ["good", "bad", "disjoint"])
@pytest.mark.parametrize("name", KINDS)
def test_no_token_has_more_than_its_chance_over_the_lenience(name: str, draft: str, num_children: int) -> None:
    """No sampling error: all draws of the children with their chances."""
    draw, trials = KINDS[name]
    target_VV, draft_VV = (distributions(logits_VV, HOT) for logits_VV in pair(draft))
    trees = every_tree(draft_VV, k_ary(num_children, 1 + num_children), ROOT, draw)
    stars, options, rejected = [(chance, list(tree.offers(0))) for chance, tree in trees], (trials, target_VV[ROOT]), []
    for lenience in LENIENCES:
        probs_V = sum(chance * emitted_token(*options, offers, lenience) for chance, offers in stars)
        assert (probs_V <= target_VV[ROOT] / lenience + 1e-9).all()
        assert np.abs(probs_V - target_VV[ROOT]).sum() < 1e-6 or lenience < 1
        rejected.append(sum(chance * outcomes(*options, offers, lenience)[1] for chance, offers in stars))
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
    assert exact.is_exact and exact == find_rule(name), "a lenience of one is the rule itself"
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
    accepted = rule.verify(TREE, logits_NV, Sampler(Sampling(), VOCAB_SIZE, rule.drafting), 7)
    assert accepted.tokens == tokens and list(accepted.guesses) == guesses
