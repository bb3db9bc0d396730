"""Chains of changing length keep the target's distribution, as long as no length looks at a token of its own step.

And alpha, which the lengths go by: the walk's estimate is the mean overlap of p and q along the path.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from tables import LEAST_P, ROOT, VOCAB_SIZE, WRONG_P, TableSampler, distributions, grow, p_value, pair

from offload.drafting.join import graft
from offload.drafting.lookup import Guess, TrieCursor
from offload.planning.choice import chain_tokens
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.stats import RunningMean
from offload.trees.token_tree import Floats, Proposals, TokenTree
from offload.trees.topology import chain
from offload.trees.verification import Acceptance, Rule, find_rule

NUM_TOKENS, MOST = 2_500, 5
RATIO_RULES = ("sequoia", "specinfer", "spectr")
WARM = Sampling(temperature=0.8, seed=4)
Cut = Callable[[TokenTree], TokenTree]  # what a mistaken drafter does to a chain that it has drawn


@lru_cache
def decoded(rule: Rule, draft: str, cut: Cut | None = None) -> tuple[list[int], list[int], list[Acceptance]]:
    """A text of the target's table, written as a decoder writes it; the lengths of its chains, and what was accepted.

    A chain is as long as earlier steps suggest, here the last alone, so that lengths change.
    """
    (target_VV, draft_VV), sampler = pair(draft), TableSampler(WARM, rule)
    alpha = 0.5
    tokens, lengths, steps = [ROOT], list[int](), list[Acceptance]()
    while len(tokens) < NUM_TOKENS:
        lengths.append(max(range(MOST + 1), key=lambda num: chain_tokens(alpha, num) / (1 + 0.05 * num)))
        (tree,) = grow(draft_VV, chain(lengths[-1]), torch.tensor(tokens[-1:]), sampler, len(tokens))
        tree = tree if cut is None else cut(tree)
        steps.append(rule.verify(tree, target_VV[tree.token_N], sampler, len(tokens) - 1))
        tokens += steps[-1].tokens
        last = steps[-1].guesses
        alpha = (8.0 + 50 * float(np.mean(last))) / 66 if last else 0.5
    return tokens, lengths, steps


def p_of_text(tokens: list[int], target_VV: Floats) -> float:
    """Chi-square of what followed what."""
    count_VV = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for token, after in pairwise(tokens):
        count_VV[token, after] += 1
    return p_value(count_VV, count_VV.sum(1, keepdims=True) / count_VV.sum() * target_VV)


@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("name", RATIO_RULES)
def test_the_text_is_the_targets(name: str, draft: str) -> None:
    tokens, lengths, _ = decoded(find_rule(name), draft)
    assert sum(lengths.count(length) > 20 for length in set(lengths)) >= 2, "lengths hardly changed"
    assert p_of_text(tokens, distributions(pair(draft)[0], WARM)) > LEAST_P


def shortened(tree: TokenTree, length: int) -> TokenTree:
    assert tree.proposals is not None
    draw_N, row_N = tree.proposals.draw_N[: length + 1], np.append(np.arange(length), -1)
    proposals = Proposals(draw_N, row_N, tree.proposals.probs_EV[: max(length, 1)])
    return TokenTree(chain(length), tree.token_N[: length + 1], proposals)


def before_an_unlikely_guess(tree: TokenTree) -> TokenTree:
    """As drafters do that stop where they are not sure: of the token, not of its distribution."""
    for depth in range(1, tree.num_nodes):
        if tree.proposals.probs_EV[depth - 1, tree.tokens[depth]] < 0.3:  # type: ignore[union-attr]
            return shortened(tree, depth - 1)
    return tree


def at_even_tokens(tree: TokenTree) -> TokenTree:
    """A harmless look: the length depends on a drawn token, but only on ones that are kept in any case."""
    even = [depth for depth in range(1, tree.num_nodes) if tree.tokens[depth] % 2 == 0]
    return shortened(tree, even[0]) if even else tree


@pytest.mark.parametrize("name", RATIO_RULES)
def test_a_length_that_looks_at_the_tokens_of_its_step_is_caught(name: str) -> None:
    tokens, _, _ = decoded(find_rule(name), "bad", before_an_unlikely_guess)
    assert p_of_text(tokens, distributions(pair("bad")[0], WARM)) < WRONG_P


@pytest.mark.parametrize("name", ["specinfer", "match", "topk"])
def test_a_length_may_depend_on_tokens_that_stay_in_the_chain(name: str) -> None:
    """What a chain ends behind has had its turn; and rules that repeat the target's draws may look at anything."""
    cut = at_even_tokens if name == "specinfer" else None
    tokens, _, _ = decoded(find_rule(name), "bad", cut)
    assert p_of_text(tokens, distributions(pair("bad")[0], WARM)) > LEAST_P


@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("name", RATIO_RULES)
def test_alpha_is_the_overlap_along_the_path(name: str, draft: str) -> None:
    tokens, lengths, steps = decoded(find_rule(name), draft)
    p_VV, q_VV = (distributions(logits_VV, WARM) for logits_VV in pair(draft))
    overlap_V, at, accepted = np.minimum(p_VV, q_VV).sum(1), 0, list[bool]()
    for length, step in zip(lengths, steps, strict=True):
        verified = tokens[at : at + min(length, len(step.tokens))]
        assert list(step.guesses) == pytest.approx(overlap_V[verified].tolist(), abs=1e-6)
        accepted += [depth < len(step.nodes) - 1 for depth in range(len(verified))]
        at += len(step.tokens)
    mean = RunningMean()
    mean.add([guess for step in steps for guess in step.guesses])
    share, doubt = np.mean(accepted), np.std(accepted) / len(accepted) ** 0.5
    assert mean.mean is not None and mean.standard_error is not None
    assert abs(mean.mean - share) <= 4 * doubt + 1e-9, "guesses are accepted as often as alpha says"
    assert mean.standard_error <= doubt + 1e-9, "and alpha is known better than by counting"


def test_greedily_a_guess_is_right_or_wrong() -> None:
    """T = 0: whether the two argmax agree, by every rule; without a child there is no guess."""
    target_VV, draft_VV = pair("good")
    for name in (*RATIO_RULES, "match", "topk"):
        rule = find_rule(name)
        sampler = Sampler(Sampling(), VOCAB_SIZE, rule.drafting)
        for root in range(VOCAB_SIZE):
            (tree,) = grow(draft_VV, chain(3), torch.tensor([root]), sampler)
            accepted = rule.verify(tree, target_VV[tree.token_N], sampler, 0)
            path = [root, *accepted.tokens][: len(accepted.guesses)]
            assert list(accepted.guesses) == [float(target_VV[t].argmax() == draft_VV[t].argmax()) for t in path]
            assert len(accepted.guesses) == min(3, len(accepted.tokens))
        (tree,) = grow(draft_VV, chain(0), torch.tensor([ROOT]), sampler)
        assert list(rule.verify(tree, target_VV[tree.token_N], sampler, 0).guesses) == []


def test_a_point_mass_has_the_targets_chance_of_its_token() -> None:
    target_VV, _ = pair("bad")
    sampler = Sampler(WARM, VOCAB_SIZE, ChildSampling.WITHOUT_REPLACEMENT)
    tree = TokenTree(chain(1), torch.tensor([ROOT, 3]))
    accepted = find_rule("sequoia").verify(tree, target_VV[tree.token_N], sampler, 0)
    assert list(accepted.guesses) == pytest.approx([distributions(target_VV, WARM)[ROOT, 3]], rel=1e-5)


@pytest.mark.parametrize("name", RATIO_RULES)
def test_a_guess_beside_drawn_tokens_is_no_part_of_alpha(name: str) -> None:
    """The root's child was drawn, that child's own was grafted: of both only the first counts."""
    target_VV, draft_VV = pair("good")
    rule, sizes = find_rule(name), set[int]()
    sampler = Sampler(WARM, VOCAB_SIZE, rule.drafting)
    for root in range(VOCAB_SIZE):
        (drawn,) = grow(draft_VV, chain(1), torch.tensor([root]), sampler)
        for token in range(VOCAB_SIZE):
            path = enumerate([drawn.tokens[1], token])
            tree = graft(
                drawn, [Guess(at + 1, at, 0, at + 1, 0.9, (TrieCursor(at, ()), guess)) for at, guess in path], 3
            )
            accepted = rule.verify(tree, target_VV[tree.token_N], sampler, 0)
            sizes.add(len(accepted.nodes))
            assert len(accepted.guesses) == 1
    assert max(sizes) > 1, "some walks came to the guess"
