"""Rules of acceptance: which nodes of a scored tree may be emitted.

| rule | the draft's children | accepted |
|---|---|---|
| match | best by log q + G, the target's own noise | the target's own draw, if it is a child |
| topk | the k likeliest | the target's own draw, if it is a child |
| sequoia | drawn without replacement | ratio test, child by child (2402.12374, Alg. 1) |
| specinfer | drawn with replacement | the same test (2305.09781, Alg. 3 in 2402.12374) |
| spectr | drawn with replacement | k-sequential selection (2310.15141, Alg. 3) |

A rule says how children are chosen and how they are verified; no model is in sight. The rules that
repeat the target's draw come first here, then the walk that ratio tests share, the two ratio tests,
and lenience, which is not exact.

Invariant: for any tree whose growth was predictable, the emitted tokens have the target's
distribution; with `match` and `topk` they are, for one seed, the very same tokens for any tree. A
rule that was made lenient keeps neither promise, and says so (`is_exact`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import NamedTuple

import numpy as np
import torch

from offload.rules import RULES, ChildSampling, check_lenience, drafting_of
from offload.sampling.logits import Rows, chunk_with
from offload.sampling.sampler import Sampler, require_token
from offload.trees.token_tree import Draw, Floats, Offer, TokenTree, children_of


class Acceptance(NamedTuple):
    """The result of one weight pass."""

    nodes: list[int]  # the accepted path, root first: rows whose keys and values are kept
    # new tokens: those of the accepted nodes after the root, then one more drawn from the target
    tokens: list[int]
    # for nodes of the path with children: the chance that the first one is accepted
    guesses: Sequence[float] = ()

    def first(self, num: int) -> "Acceptance":
        """Return the part of it that emits this many tokens."""
        return Acceptance(self.nodes[:num], self.tokens[:num], self.guesses[:num])


class Trial(NamedTuple):
    """The test of one child."""

    child: int  # the child's node
    chance: float  # chance to be accepted, given that its elder siblings were not
    # the distribution of the next token if this was the last child and none was accepted
    residual_V: Floats


# takes the target's distribution and the children of one node
Trials = Callable[[Floats, Iterable[Offer]], Iterator[Trial]]


def walk(
    tree: TokenTree, logits_NV: Rows, sampler: Sampler, trials: Trials, *, lenience: float = 1.0
) -> Acceptance:
    """Descend into the first child that is accepted; if none is, draw from the residual.

    The trials say with which chance each child is accepted and what remains of the target's
    distribution when none is. The coins are float64 on the host, one fresh one per node and step;
    the root's is for the token that ends the walk. Only the rows that the walk visits are looked
    at.

    On its way the walk notes how alike p and q are: for the first child of a node, a draw from q,
    the chance of acceptance is sum of min(p, q), and Leviathan et al.'s alpha (2211.17192,
    Corollary 3.6) is the mean of that. Guesses that were grafted onto a draft's tree are left out.

    `lenience` below 1 is not exact, see `Rule`: every chance is divided by it.
    """
    coin_N = sampler.uniform(tree.num_nodes)
    nodes = [0]
    guesses = list[float]()
    while True:
        residual_V = sampler.host_distribution(logits_NV[nodes[-1]])
        offers = tree.offers(nodes[-1])
        first = list(islice(offers, 1))
        for offer in first:
            # beside drawn ones a point mass is a guess
            if tree.proposals is None or offer.probs_V is not None:
                guesses.append(_chance(residual_V, offer, lenience))
        for child, chance, remainder_V in trials(residual_V, chain(first, offers)):
            if coin_N[child] < chance / lenience:
                nodes.append(child)
                break
            residual_V = remainder_V
        else:
            last = pick(residual_V, coin_N[0])
            return Acceptance(nodes, [*(tree.tokens[node] for node in nodes[1:]), last], guesses)


def acceptance_rate(p_V: Floats, q_V: Floats, lenience: float = 1.0) -> float:
    """Return sum of min(p / l, q), a draw's chance; l = 1 is exact (Leviathan et al., A.5)."""
    # rounding may bring the sum above 1
    return min(1.0, float(np.minimum(p_V / lenience, q_V).sum()))


def _chance(target_V: Floats, offer: Offer, lenience: float) -> float:
    """Return the chance of a first child drawn so; a point mass always draws its own token."""
    if offer.probs_V is None:
        return min(1.0, float(target_V[offer.token]) / lenience)
    return acceptance_rate(target_V, offer.probs_V, lenience)


def pick(probs_V: Floats, coin: float) -> int:
    """Return the token where the cumulated distribution passes `coin`, never one without mass."""
    sum_V = np.cumsum(probs_V)
    last = int(np.searchsorted(sum_V, sum_V[-1]))
    return min(int(np.searchsorted(sum_V, coin * sum_V[-1], side="right")), last)


def match(tree: TokenTree, logits_NV: Rows, sampler: Sampler, root_position: int) -> Acceptance:
    """Accept what the target itself draws: exact for any tree, the same tokens for the same seed.

    The walk goes down from the root along the tokens that the target draws, and the first one that
    is not a child ends it. The draw at a position depends on the target and the noise alone, so the
    tokens are those that decoding without a tree emits (Gumbel coupling as in arXiv 2408.07978).
    Raises `UserError` where scores on the way are not finite.
    """
    nodes = [0]
    tokens = list[int]()
    guesses = list[float]()
    node = 0
    drawn: dict[int, int] = {}
    while True:
        if not sampler.draws_rows:
            token = sampler.draw(logits_NV[node], root_position + len(nodes))
        else:
            if node not in drawn:
                lo, logits_CV = chunk_with(logits_NV, node)
                depth_C = tree.topology.depth_N[lo : lo + len(logits_CV)]
                position_C = torch.from_numpy(depth_C.copy()).long() + (root_position + 1)
                # brought to the host at once
                token_C = sampler.draw_rows(logits_CV, position_C).tolist()
                drawn = dict(enumerate(map(int, token_C), lo))
            token = require_token(drawn[node])
        tokens.append(token)
        child = tree.child(node, token)
        guesses += [
            float(tree.tokens[first] == token) for first in children_of(tree.topology)[node][:1]
        ]
        if child is None:
            return Acceptance(nodes, tokens, guesses)
        nodes.append(child)
        node = child


def ratio_trials(target_V: Floats, offers: Iterable[Offer]) -> Iterator[Trial]:
    """Yield one trial per child, in the order of the draws: the ratio test.

    A child x that was drawn from D is accepted with chance min(1, R[x] / D[x]), where R is the
    target's distribution at first; after a rejection R becomes what D could not deliver, norm(max(R
    - D, 0)). A trial hands out min(R, D) and leaves the rest, so what is emitted has distribution R
    for any D. Drawn without replacement D makes it Sequoia (2402.12374, Alg. 1), with replacement
    SpecInfer (Alg. 3 there), and a point mass is the target's own sampling; any mix at one node is
    exact. A token that was rejected is never accepted later: R has no mass there any more.
    """
    residual_V = target_V
    for offer in offers:
        if offer.probs_V is None:
            left_V = residual_V.copy()
            left_V[offer.token] = 0
        else:
            left_V = np.maximum(residual_V - offer.probs_V, 0)
        mass = left_V.sum()
        # the child's distribution delivers all there is
        if not mass:
            yield Trial(offer.child, 1.0, left_V)
            return
        offered = 1.0 if offer.probs_V is None else offer.probs_V[offer.token]
        chance = min(1.0, float(residual_V[offer.token] / offered))
        residual_V = left_V / mass
        yield Trial(offer.child, chance, residual_V)


_NUM_HALVINGS = 24  # bisection steps: rho exceeds the least one by k * 2^-24 at most


def k_sequential_trials(target_V: Floats, offers: Iterable[Offer]) -> Iterator[Trial]:
    """Yield trials by SpecTr's k-sequential selection (K-SEQ; 2310.15141, Alg. 3): consecutive draws
    with replacement as one group, others by the ratio test.

    Each of k independent draws x from Q is accepted with chance min(1, P[x] / (rho Q[x])), one
    after the other. With M = min(Q, P / rho) and beta = sum of M over all tokens, the trials
    deliver c M, where c = (1 - (1 - beta)^k) / beta, and P - c M, normalised, is drawn from when
    all of them fail. This is exact if nothing in P - c M is negative, for which c <= rho suffices:
    c M <= rho P / rho = P.

    The least such rho accepts most. beta falls as rho grows while rho beta = sum of min(rho Q, P)
    rises, so c <= rho, that is 1 - (1 - beta)^k <= rho beta, once true stays true; it is true at
    rho = k, as c <= k. Bisection on [1, k] keeps its upper end on the true side. Unlike the ratio
    test this needs k to be fixed before the first draw of the node.
    """
    residual_V = target_V
    for is_group, members in groupby(offers, key=lambda offer: offer.draw is Draw.WITH_REPLACEMENT):
        for trial in (
            _group_trials(residual_V, list(members))
            if is_group
            else ratio_trials(residual_V, members)
        ):
            yield trial
            residual_V = trial.residual_V


def _group_trials(target_V: Floats, group: list[Offer]) -> Iterator[Trial]:
    """Yield the trials of k draws from one distribution; all carry what remains after the last."""
    probs_V = group[0].probs_V
    assert probs_V is not None, "a draw with replacement has a distribution"
    rho = division_factor(target_V, probs_V, len(group))
    common_V = np.minimum(probs_V, target_V / rho)
    left_V = np.maximum(target_V - common_V * _num_deliveries(float(common_V.sum()), len(group)), 0)
    mass = left_V.sum()
    for offer in group:
        if not mass:
            yield Trial(offer.child, 1.0, left_V)
            return
        chance = min(1.0, float(target_V[offer.token] / (rho * probs_V[offer.token])))
        yield Trial(offer.child, chance, left_V / mass)


def division_factor(target_V: Floats, probs_V: Floats, num_draws: int) -> float:
    """Return rho, the least in [1, k] that leaves a distribution, see `k_sequential_trials`."""
    is_common_V = (target_V > 0) & (probs_V > 0)
    p_C = target_V[is_common_V]
    q_C = probs_V[is_common_V]
    lo = 1.0
    hi = float(num_draws)
    for _ in range(_NUM_HALVINGS if num_draws > 1 else 0):
        rho = (lo + hi) / 2
        is_valid = _num_deliveries(float(np.minimum(q_C, p_C / rho).sum()), num_draws) <= rho
        lo, hi = (lo, rho) if is_valid else (rho, hi)
    return hi


def _num_deliveries(beta: float, num_draws: int) -> float:
    """Return (1 - (1 - beta)^k) / beta, k where beta vanishes, as sum of (1 - beta)^j for j < k."""
    return sum((1 - beta) ** j for j in range(num_draws))


def greedily_lenient(
    tree: TokenTree, logits_NV: Rows, sampler: Sampler, lenience: float
) -> Acceptance:
    """Descend while a child is nearly the likeliest token. Raises `UserError` for no numbers."""
    nodes = [0]
    guesses = list[float]()
    while True:
        logits_V = logits_NV[nodes[-1]]
        children = children_of(tree.topology)[nodes[-1]]
        best = sampler.draw(logits_V, 0)
        score = {child: float(logits_V[tree.tokens[child]]) for child in children}
        least = float(logits_V[best]) + math.log(lenience)
        accepted = [child for child in children if score[child] >= least]
        guesses += [float(first in accepted) for first in children[:1]]
        if not accepted:
            return Acceptance(nodes, [*(tree.tokens[node] for node in nodes[1:]), best], guesses)
        nodes.append(max(accepted, key=score.__getitem__))


# by the names that `RULES` has for the tests; None repeats the target's draws
_TRIALS: dict[str, Trials | None] = {
    "match": None,
    "ratio": ratio_trials,
    "k_sequential": k_sequential_trials,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """How children are chosen and how they are verified: the two must fit.

    A lenience l below 1 accepts more than is exact. Where tokens are drawn, q is multiplied by l
    before it is compared with p (Leviathan et al., 2211.17192, section A.5), so a trial's chance
    min(1, p / q) becomes min(1, p / (l q)); what is drawn after a rejection stays as it was. Then
    no token is emitted with more than p(x) / l: by induction from a node's last child to its first,
    if what remains emits no more than R / l of the remaining R, so does the trial before it, whose
    chance of failing has only become less. That holds for all ratio rules. There is no bound from
    below: tokens that the draft never proposes become rarer.

    At temperature 0 a child x is accepted if p(x) >= l max(p), p being the distribution at
    temperature 1, and of several such children the one that the target likes best; the token that
    ends a walk is the target's argmax as ever. Without a ratio test this is the only case.
    """

    name: str
    lenience: float = 1.0

    @property
    def drafting(self) -> ChildSampling:
        return RULES[self.name].drafting

    @property
    def is_exact(self) -> bool:
        return self.lenience == 1

    @property
    def repeats_draws(self) -> bool:
        """Whether each token is the target's own draw: one seed gives one text for any tree."""
        return self.is_exact and self._trials is None

    @property
    def _trials(self) -> Trials | None:
        return _TRIALS[RULES[self.name].test]

    def verify(
        self, tree: TokenTree, logits_NV: Rows, sampler: Sampler, root_position: int
    ) -> Acceptance:
        """Return the emitted part of a scored tree. Raises `UserError` for scores that are NaN."""
        if sampler.is_greedy and not self.is_exact:
            return greedily_lenient(tree, logits_NV, sampler, self.lenience)
        if self._trials is None:
            assert self.is_exact, "`check_lenience` refuses it where tokens are drawn"
            return match(tree, logits_NV, sampler, root_position)
        # fresh coins make the position irrelevant
        return walk(tree, logits_NV, sampler, self._trials, lenience=self.lenience)


def not_exact_lines(rule: Rule, kv_dtype: str) -> list[str]:
    """Return the warnings shown before all that is not the target's own text."""
    lines = []
    if not rule.is_exact:
        lines.append(
            f"NOT EXACT: `lenience` {rule.lenience:g} accepts guesses that the target alone would not have "
            "written; leave it out for the target's own text"
        )
    if kv_dtype != "auto":
        lines.append(
            f"NOT EXACT: `kv_dtype` {kv_dtype} rounds keys and values, so other tokens may be likelier; "
            "leave it out for the target's own text"
        )
    return lines


def find_rule(name: str, lenience: float = 1.0) -> Rule:
    """Return the rule of that name. Raises `UserError`."""
    drafting_of(name)
    return Rule(name, check_lenience(lenience, name))
