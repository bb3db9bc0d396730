"""Every rule keeps the target's distribution: exactly where outcomes can be listed, by chi-square elsewhere.

The classic mistakes are planted at the end and must fail the very same test.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
import torch
from matrix import matrix
from tables import (
    KINDS,
    LEAST_P,
    ROOT,
    SHAPES,
    VOCAB_SIZE,
    WRONG_P,
    Grow,
    TableSampler,
    Verify,
    count_pairs,
    distributions,
    emitted,
    emitted_token,
    every_tree,
    grow,
    one_draw,
    p_value,
    pair,
    pair_distribution,
)
from torch import Tensor

from offload.drafting.static import draw_children
from offload.kernels.keyed_gumbel import keyed_gumbel_reference as keyed_gumbel
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import Draw, Floats, Offer, Proposals, TokenTree
from offload.trees.topology import Topology, chain, k_ary
from offload.trees.verification import Rule, Trials, find_rule, k_sequential_trials, ratio_trials

NUM_RUNS = 5_000
TWO_CHILDREN = k_ary(2, 3)
COOL, WARM, HOT, NUCLEUS = (0.3, 1.0), (0.6, 1.0), (1.0, 1.0), (1.0, 0.9)  # temperature, top-p
CASES = [("sequoia", "chain", "good", COOL), ("sequoia", "binary", "bad", WARM), ("sequoia", "star", "disjoint", HOT),
         ("sequoia", "sequences", "disjoint", NUCLEUS), ("sequoia", "sequoia", "good", HOT),
         ("specinfer", "chain", "bad", HOT), ("specinfer", "binary", "good", NUCLEUS),
         ("specinfer", "star", "good", COOL), ("specinfer", "sequences", "bad", WARM),
         ("specinfer", "sequoia", "disjoint", HOT), ("spectr", "chain", "disjoint", WARM),
         ("spectr", "binary", "good", COOL), ("spectr", "star", "bad", NUCLEUS), ("spectr", "sequences", "good", HOT),
         ("spectr", "sequoia", "bad", WARM)]  # fmt: skip


def sampling_of(setting: tuple[float, float], seed: int = 1) -> Sampling:
    return Sampling(temperature=setting[0], top_p=setting[1], seed=seed)


def p_of_runs(
    rule: Rule,
    grow_trees: Grow,
    verify: Verify,
    target_VV: Tensor,
    setting: tuple[float, float],
    num_runs: int = NUM_RUNS,
) -> float:
    """The chi-square p-value of a rule's runs, or of a mistaken version of it."""
    sampling = sampling_of(setting)
    count_VV = count_pairs(grow_trees, verify, target_VV, TableSampler(sampling, rule), num_runs)
    return p_value(count_VV, pair_distribution(distributions(target_VV, sampling)))


@matrix("name, shape, draft, setting", CASES, ids=str, daily=3)
def test_distribution_of_two_tokens(name: str, shape: str, draft: str, setting: tuple[float, float]) -> None:
    (target_VV, draft_VV), rule = pair(draft), find_rule(name)
    grow_trees = partial(grow, draft_VV, SHAPES[shape])
    assert p_of_runs(rule, grow_trees, rule.verify, target_VV, setting) > LEAST_P


@pytest.mark.parametrize(("draft", "setting"), [("good", COOL), ("disjoint", (0.6, 0.9)), ("bad", HOT)], ids=str)
def test_shared_noise_gives_the_plain_draws_and_these_the_distribution(
    draft: str, setting: tuple[float, float]
) -> None:
    """`match` and `topk`: every shape emits what is drawn without a tree, and that has the distribution."""
    (target_VV, draft_VV), sampling = pair(draft), sampling_of(setting)
    samplers = {name: Sampler(sampling, VOCAB_SIZE, find_rule(name).drafting) for name in ("match", "topk")}
    log_probs_VV, count_VV = samplers["match"].distribution(target_VV).log(), np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for run in range(NUM_RUNS):
        position, plain = 2 * run, [ROOT]
        for step in (1, 2):
            noise_V = keyed_gumbel(sampling.seed, position + step, VOCAB_SIZE)
            plain.append(int((log_probs_VV[plain[-1]] + noise_V).argmax()))
        count_VV[plain[1], plain[2]] += 1
        if run % 40 < len(SHAPES):  # trees for every eighth run, each shape in turn
            shape, rule = list(SHAPES.values())[run % 40], find_rule(("match", "topk")[run // 40 % 2])
            (tree,) = grow(draft_VV, shape, torch.tensor([ROOT]), samplers[rule.name], position)
            got = rule.verify(tree, target_VV[tree.token_N], samplers[rule.name], position).tokens
            assert got[:2] == plain[1:][: len(got)]
    assert p_value(count_VV, pair_distribution(distributions(target_VV, sampling))) > LEAST_P


@pytest.mark.parametrize("setting", [COOL, WARM, NUCLEUS], ids=str)
@pytest.mark.parametrize("draft", ["good", "bad", "disjoint"])
@pytest.mark.parametrize("name", KINDS)
def test_distribution_is_exact_over_all_trees(name: str, draft: str, setting: tuple[float, float]) -> None:
    """No sampling error: all trees of two levels with their chances, all outcomes of the coins."""
    assert deviation(name, draft, setting, [-1, 0, 0, 1, 1, 2]) < 1e-9


@pytest.mark.parametrize("name", KINDS)
def test_distribution_is_exact_over_all_stars(name: str) -> None:
    """This is so of one level, which takes milliseconds: every rule is looked at in every run."""
    for draft, setting in product(("good", "bad", "disjoint"), (COOL, WARM, NUCLEUS)):
        assert deviation(name, draft, setting, [-1, 0, 0, 0]) < 1e-9, (draft, setting)


def deviation(name: str, draft: str, setting: tuple[float, float], parents: list[int]) -> float:
    """How far the law of two tokens lies from the target's, over all trees of that shape."""
    draw, trials = KINDS[name]
    target_VV, draft_VV = (distributions(logits_VV[1:5, 1:5], sampling_of(setting)) for logits_VV in pair(draft))
    trees = every_tree(draft_VV, Topology.from_parents(parents), 0, draw)
    probs_VV = sum(chance * emitted(tree, target_VV, trials) for chance, tree in trees)
    return total_variation(probs_VV, target_VV[0][:, None] * target_VV)


@pytest.mark.parametrize("trials", [ratio_trials, k_sequential_trials], ids=["ratio", "k_sequential"])
def test_distribution_is_exact_at_mixed_nodes(trials: Trials) -> None:
    """Copied, likeliest and drawn children under one node, in any order, whatever the rule."""
    kinds = [Draw.WITH_REPLACEMENT, Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT, Draw.POINT_MASS]
    target_VV, draft_VV = (distributions(logits_VV, sampling_of(HOT)) for logits_VV in pair("bad"))
    draft_VV = np.float32(draft_VV).astype(float)  # as a tree keeps it
    draft_VV /= draft_VV.sum(1, keepdims=True)
    worst = 0.0
    for order in set(permutations(kinds)):
        probs_V = sum(
            chance * emitted_token(trials, target_VV[ROOT], node_offers(draft_VV[ROOT], order, tokens))
            for chance, tokens in draws(draft_VV[ROOT], order)
        )
        worst = max(worst, total_variation(probs_V, target_VV[ROOT]))
    assert worst < 1e-9


def test_draws_without_replacement_have_their_distribution() -> None:
    """Three children where the draft's support has two tokens: the third is uniform over the others (Alg. 1)."""
    logits_VV = pair("good")[1].masked_fill(torch.arange(VOCAB_SIZE) >= 2, -torch.inf)
    sampler = Sampler(sampling_of(HOT), VOCAB_SIZE, ChildSampling.WITHOUT_REPLACEMENT)
    token_WK, _, probs_WV = draw_children(logits_VV[:1].repeat(NUM_RUNS, 1), 3, sampler, 0)
    assert probs_WV is not None
    probs_V, exact = probs_WV[0].double().numpy(), np.zeros((2, 2, VOCAB_SIZE))
    for chance, (a, b, c) in draws(probs_V, (Draw.WITHOUT_REPLACEMENT,) * 3):
        exact[a, b, c] = chance
    assert p_value(count(token_WK.numpy(), exact.shape), exact) > LEAST_P


@pytest.mark.parametrize("drafting", [ChildSampling.WITHOUT_REPLACEMENT, ChildSampling.WITH_REPLACEMENT])
def test_two_draws_have_their_distribution(drafting: ChildSampling) -> None:
    logits_V, sampling = pair("bad")[1][ROOT], sampling_of(NUCLEUS)
    sampler = Sampler(sampling, VOCAB_SIZE, drafting)
    token_WK, draw, probs_WV = draw_children(logits_V.repeat(NUM_RUNS, 1), 2, sampler, 0)
    assert probs_WV is not None and draw.name == drafting.name
    exact = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for chance, (a, b) in draws(sampler.host_distribution(logits_V), (draw, draw)):
        exact[a, b] += chance
    assert p_value(count(token_WK.numpy(), exact.shape), exact) > LEAST_P


def test_fresh_numbers_never_repeat_and_never_touch_the_ends() -> None:
    sampler = Sampler(sampling_of(HOT), VOCAB_SIZE)
    numbers = np.concatenate([sampler.uniform(100, 200).ravel(), sampler.uniform(1000)])
    assert numbers.dtype == np.float64 and numbers.min() > 0 and numbers.max() < 1
    assert len(np.unique(numbers)) == len(numbers)
    assert (Sampler(sampling_of(HOT), VOCAB_SIZE).uniform(100, 200).ravel() == numbers[:20_000]).all()
    assert not np.isin(Sampler(sampling_of(HOT, seed=2), VOCAB_SIZE).uniform(1000), numbers).any()


def best_two(tree: TokenTree) -> TokenTree:
    """The two of a star's children that the draft likes best, in the order of their draws."""
    assert tree.proposals is not None
    distribution_1V = tree.proposals.probs_EV
    chances = distribution_1V[0].tolist()
    kept = sorted(sorted(range(1, tree.num_nodes), key=lambda node: -chances[tree.tokens[node]])[:2])
    return with_distributions(TokenTree(TWO_CHILDREN, tree.token_N[[0, *kept]]), distribution_1V)


def with_distributions(star: TokenTree, probs_WV: Tensor) -> TokenTree:
    """Claim that the children of the root were drawn without replacement."""
    proposals = Proposals.blank(star.topology, VOCAB_SIZE, Draw.WITHOUT_REPLACEMENT)
    proposals.write([0], probs_WV)
    return TokenTree(star.topology, star.token_N, proposals)


def best_of_four(draft_VV: Tensor, root_R: Tensor, sampler: Sampler) -> list[TokenTree]:
    """Draw four children, keep the two that the draft likes best: growth is no longer predictable."""
    return [best_two(tree) for tree in grow(draft_VV, k_ary(4, 5), root_R, sampler)]


def likeliest(draft_VV: Tensor, root_R: Tensor, _: Sampler) -> list[TokenTree]:
    """Top-k children verified as if they had been drawn from q."""
    probs_VV = Sampler(sampling_of(HOT), VOCAB_SIZE).distribution(draft_VV)
    trees = grow(draft_VV, TWO_CHILDREN, root_R, Sampler(sampling_of(HOT), VOCAB_SIZE, ChildSampling.TOP_K))
    return [with_distributions(tree, probs_VV[tree.token_N[:1]]) for tree in trees]


@pytest.mark.parametrize("mistake", [best_of_four, likeliest])
def test_children_that_were_not_drawn_so_are_caught(
    mistake: Callable[[Tensor, Tensor, Sampler], list[TokenTree]],
) -> None:
    (target_VV, draft_VV), rule = pair("bad"), find_rule("sequoia")
    assert p_of_runs(rule, partial(mistake, draft_VV), rule.verify, target_VV, HOT) < WRONG_P


@pytest.mark.parametrize("starts_again", [False, True])
def test_numbers_reused_in_every_step_are_caught(starts_again: bool) -> None:
    """A generator that starts again at each step: the second token's draws and coins are those of the first."""
    (target_VV, draft_VV), rule, sampling = pair("bad"), find_rule("sequoia"), sampling_of(HOT)
    sampler, steps = TableSampler(sampling, rule), [torch.full((NUM_RUNS,), ROOT)]
    for _ in range(2):
        trees = grow(draft_VV, chain(1), steps[-1], sampler)
        tokens = [rule.verify(tree, target_VV[tree.token_N], sampler, 0).tokens[0] for tree in trees]
        steps.append(torch.tensor(tokens))
        sampler = TableSampler(sampling, rule) if starts_again else sampler
    count_VV = count(torch.stack(steps[1:], 1).numpy(), (VOCAB_SIZE, VOCAB_SIZE))
    p = p_value(count_VV, pair_distribution(distributions(target_VV, sampling)))
    assert p < WRONG_P if starts_again else p > LEAST_P


def draws(probs_V: Floats, order: Sequence[Draw]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All children that one node can get, with their chances; a copied one is a function of its elders."""

    def extend(elders: list[int]) -> Iterator[tuple[float, tuple[int, ...]]]:
        if len(elders) == len(order):
            yield 1.0, tuple(elders)
            return
        copied_V = np.eye(len(probs_V))[(1 + sum(elders)) % len(probs_V)]
        kind = order[len(elders)]
        for token, chance in enumerate(copied_V if kind is Draw.POINT_MASS else one_draw(probs_V, kind, elders)):
            if chance > 0:
                yield from ((chance * rest, tokens) for rest, tokens in extend([*elders, token]))

    return extend([])


def node_offers(probs_V: Floats, order: Sequence[Draw], tokens: Sequence[int]) -> list[Offer]:
    """A root with these children, as `Proposals` tells a rule about it."""
    draw_N, row_N = np.array([0, *order]), np.array([0] + [-1] * len(order))
    proposals = Proposals(draw_N, row_N, torch.from_numpy(probs_V[None]).float())
    return list(proposals.offers(0, range(1, 1 + len(order)), tokens))


def count(token_WK: Floats, shape: tuple[int, ...]) -> Floats:
    """How often each combination of children came."""
    count_C = np.zeros(shape)
    np.add.at(count_C, tuple(token_WK.T), 1)
    return count_C


def total_variation(probs_C: Floats, other_C: Floats) -> float:
    return float(np.abs(probs_C - other_C).sum() / 2)
