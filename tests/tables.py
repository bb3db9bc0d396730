"""Bigram tables as models, small enough for exact distributions and quick enough for tens of thousands of runs.

A table's row holds the logits after one token, so a model is one gather and the distribution of two tokens is one
product. What
is under test is real: the draws, the trees with their distributions, the rules, the sampler. Only the models are not.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from offload.drafting.static import draw_children
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import Draw, Floats, Offer, Proposals, TokenTree, children_of
from offload.trees.topology import Topology, best_first, chain, k_ary, sequences
from offload.trees.verification import Acceptance, Rule, Trials, k_sequential_trials, ratio_trials

VOCAB_SIZE = 6
ROOT = 2  # the token that all runs start from
SHAPES: dict[str, Topology] = {
    "chain": chain(3),
    "binary": k_ary(2, 7),
    "sequences": sequences(3, 2),
    "sequoia": best_first((0.6, 0.2, 0.1, 0.05), 9, 3),
    "star": k_ary(4, 5),
}
KINDS: dict[str, tuple[Draw, Trials]] = {
    "sequoia": (Draw.WITHOUT_REPLACEMENT, ratio_trials),
    "specinfer": (Draw.WITH_REPLACEMENT, ratio_trials),
    "spectr": (Draw.WITH_REPLACEMENT, k_sequential_trials),
}
LEAST_P = 1e-3  # seeds are fixed: what passes once passes always
WRONG_P = 1e-6
Verify = Callable[[TokenTree, Tensor, Sampler, int], Acceptance]


def pair(draft: str) -> tuple[Tensor, Tensor]:
    """Logits of a target and of a draft, (V, V) each: row t is what follows token t."""
    generator = torch.Generator().manual_seed(11)
    target_VV, noise_VV, other_VV = torch.randn(3, VOCAB_SIZE, VOCAB_SIZE, generator=generator)
    if draft == "good":
        return target_VV, target_VV + 0.5 * noise_VV
    if draft == "bad":
        return target_VV, other_VV
    is_low_V = torch.arange(VOCAB_SIZE) < VOCAB_SIZE // 2
    return target_VV.masked_fill(~is_low_V, -torch.inf), other_VV.masked_fill(is_low_V, -torch.inf)


class TableSampler(Sampler):
    """The real sampler, which remembers the few distributions that a table has."""

    def __init__(self, sampling: Sampling, rule: Rule) -> None:
        super().__init__(sampling, VOCAB_SIZE, rule.drafting)
        self._distributions: dict[tuple[float, ...], Floats] = {}

    def host_distribution(self, logits_V: Tensor) -> Floats:
        key = tuple(logits_V.tolist())
        if key not in self._distributions:
            self._distributions[key] = super().host_distribution(logits_V)
        return self._distributions[key]


def distributions(logits_VV: Tensor, sampling: Sampling) -> Floats:
    """What the rows are to be drawn from, by the definitions of temperature and top-p and none of our code."""
    probs_VV = torch.softmax(logits_VV.double() / sampling.temperature, -1).numpy()
    order_VV = np.argsort(-probs_VV, axis=1)
    sorted_VV = np.take_along_axis(probs_VV, order_VV, axis=1)
    before_VV = np.cumsum(sorted_VV, axis=1) - sorted_VV  # mass of the likelier tokens
    np.put_along_axis(probs_VV, order_VV, np.where(before_VV < sampling.top_p, sorted_VV, 0), axis=1)
    return probs_VV / probs_VV.sum(1, keepdims=True)


def pair_distribution(probs_VV: Floats) -> Floats:
    """The distribution (V, V) of the two tokens after `ROOT`."""
    return probs_VV[ROOT][:, None] * probs_VV


def grow(draft_VV: Tensor, topology: Topology, root_R: Tensor, sampler: Sampler, position: int = 0) -> list[TokenTree]:
    """One tree per entry of `root_R`, all drawn at once: the real draws, level by level, on as many rows."""
    token_RN = root_R[:, None].repeat(1, topology.num_nodes)
    blank, level_distributions = None, []
    for depth, level in enumerate(topology.levels[:-1]):
        parents = [node for node in range(level.start, level.stop) if children_of(topology)[node]]
        num_children = max(len(children_of(topology)[node]) for node in parents)
        logits_WV = draft_VV[token_RN[:, parents]].reshape(-1, VOCAB_SIZE)
        if sampler.is_adjusted:
            trees = [TokenTree(topology, token_N) for token_N in token_RN]
            logits_WV = sampler.adjusted(logits_WV, [tree.path(node) for tree in trees for node in parents])
        token_WK, draw, probs_WV = draw_children(logits_WV, num_children, sampler, position + depth + 1)
        token_RPK = token_WK.reshape(len(root_R), len(parents), -1)
        for index, parent in enumerate(parents):
            children = children_of(topology)[parent]
            token_RN[:, children] = token_RPK[:, index, : len(children)]
        if probs_WV is not None:
            blank = blank or Proposals.blank(topology, VOCAB_SIZE, draw)
            level_distributions.append(probs_WV.reshape(len(root_R), len(parents), VOCAB_SIZE))
    if blank is None:
        return [TokenTree(topology, token_N) for token_N in token_RN]
    probs_REV = torch.cat(level_distributions, 1)
    trees = zip(token_RN, probs_REV, strict=True)
    return [TokenTree(topology, t_N, Proposals(blank.draw_N, blank.row_N, probs_EV)) for t_N, probs_EV in trees]


Grow = Callable[[Tensor, Sampler], list[TokenTree]]  # roots (R,) -> a tree for each


def count_pairs(grow_trees: Grow, verify: Verify, target_VV: Tensor, sampler: Sampler, num_runs: int) -> Floats:
    """How often (V, V) each two tokens came first in `num_runs` runs; a second step where the first gave but one."""
    count_VV, unfinished = np.zeros((VOCAB_SIZE, VOCAB_SIZE)), []
    for tree in grow_trees(torch.full((num_runs,), ROOT), sampler):
        tokens = verify(tree, target_VV[tree.token_N], sampler, 0).tokens
        if len(tokens) > 1:
            count_VV[tokens[0], tokens[1]] += 1
        else:
            unfinished.append(tokens[0])
    for tree in grow_trees(torch.tensor(unfinished), sampler) if unfinished else ():
        tokens = verify(tree, target_VV[tree.token_N], sampler, 1).tokens
        count_VV[tree.tokens[0], tokens[0]] += 1
    return count_VV


def p_value(count_C: Floats, probs_C: Floats) -> float:
    """Chi-square of counts against exact chances; zero where something impossible happened. Rare cells are merged."""
    count_C, expected_C = count_C.ravel(), probs_C.ravel() * count_C.sum()
    if count_C[expected_C == 0].any():
        return 0.0
    groups_C = np.where(expected_C < 5, 0, np.arange(1, expected_C.size + 1))[expected_C > 0]
    names, group_C = np.unique(groups_C, return_inverse=True)
    assert len(names) > 1, "a law of one outcome needs no statistics"
    observed = np.bincount(group_C, count_C[expected_C > 0])
    expected = np.bincount(group_C, expected_C[expected_C > 0])
    return float(chisquare(observed, expected).pvalue)


def one_draw(probs_V: Floats, draw: Draw, elders: list[int]) -> Floats:
    """The distribution of one child given its elder siblings, written down independently of `Proposals`."""
    if draw is Draw.WITH_REPLACEMENT:
        return probs_V
    left_V = np.array([0.0 if token in elders else probs_V[token] for token in range(len(probs_V))])
    if left_V.sum() == 0:
        left_V = np.array([0.0 if token in elders else 1.0 for token in range(len(probs_V))])
    return left_V / left_V.sum()


def every_tree(probs_VV: Floats, topology: Topology, root: int, draw: Draw) -> Iterator[tuple[float, TokenTree]]:
    """All trees that can be drawn from a draft with these distributions, each with its chance."""
    probs_VV = np.asarray(probs_VV, dtype=np.float32).astype(float)
    probs_VV = probs_VV / probs_VV.sum(1, keepdims=True)
    blank = Proposals.blank(topology, probs_VV.shape[1], draw)
    expanded = np.flatnonzero(blank.row_N >= 0)

    def extend(tokens: list[int]) -> Iterator[tuple[float, list[int]]]:
        if len(tokens) == topology.num_nodes:
            yield 1.0, tokens
            return
        parent = int(topology.parent_N[len(tokens)])
        elders = [tokens[c] for c in children_of(topology)[parent] if c < len(tokens)]
        for token, chance in enumerate(one_draw(probs_VV[tokens[parent]], draw, elders)):
            if chance > 0:
                yield from ((chance * rest, done) for rest, done in extend([*tokens, token]))

    for chance, tokens in extend([root]):
        probs_EV = torch.from_numpy(probs_VV[[tokens[node] for node in expanded]]).float()
        yield chance, TokenTree(topology, torch.tensor(tokens), Proposals(blank.draw_N, blank.row_N, probs_EV))


def outcomes(
    trials: Trials, target_V: Floats, offers: list[Offer], lenience: float = 1.0
) -> tuple[list[tuple[Offer, float]], float, Floats]:
    """The exact chance of each child to be accepted, that of none, and what the token is drawn from then."""
    accepted, left, residual_V, offer_of = [], 1.0, target_V, {offer.child: offer for offer in offers}
    for child, chance, remainder_V in trials(target_V, offers):
        lenient = min(1.0, chance / lenience)
        accepted.append((offer_of[child], left * lenient))
        left, residual_V = left * (1 - lenient), remainder_V
    return accepted, left, residual_V


def emitted_token(trials: Trials, target_V: Floats, offers: list[Offer], lenience: float = 1.0) -> Floats:
    """The exact distribution (V,) of the token that a node yields."""
    accepted, left, residual_V = outcomes(trials, target_V, offers, lenience)
    probs_V = left * residual_V
    for offer, chance in accepted:
        probs_V[offer.token] += chance
    return probs_V


def emitted(tree: TokenTree, target_VV: Floats, trials: Trials) -> Floats:
    """The exact distribution (V, V) of two tokens: where a walk ends with the first, another tree gives the second."""
    accepted, left, residual_V = outcomes(trials, target_VV[tree.tokens[0]], list(tree.offers(0)))
    probs_VV = left * residual_V[:, None] * target_VV
    for offer, chance in accepted:
        second_V = emitted_token(trials, target_VV[offer.token], list(tree.offers(offer.child)))
        probs_VV[offer.token] += chance * second_V
    return probs_VV
