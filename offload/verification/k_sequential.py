"""SpecTr's k-sequential selection (K-SEQ; 2310.15141, Alg. 3): k independent draws, one test for all of them.

Each of k draws x from Q is accepted with chance min(1, P[x] / (rho Q[x])), one after the other. With M = min(Q, P /
rho) and beta = sum of M over all tokens, the trials deliver c M, where c = (1 - (1 - beta)^k) / beta, and P - c M,
normalised, is drawn from when all of them fail. This is exact if nothing in P - c M is negative, for which c <= rho
suffices: c M <= rho P / rho = P.

The least such rho accepts most. beta falls as rho grows while rho beta = sum of min(rho Q, P) rises, so c <= rho, that
is 1 - (1 - beta)^k <= rho beta, once true stays true; it is true at rho = k, as c <= k. Bisection on [1, k] keeps its
upper end on the true side. Unlike the ratio test this needs k to be fixed before the first draw of the node.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from offload.sampling.logits import Rows
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Draw, Floats, Offer
from offload.tree.token_tree import TokenTree
from offload.verification.ratio import ratio_trials
from offload.verification.walk import Acceptance, Trial, walk

_NUM_HALVINGS = 24  # rho exceeds the least one by k * 2^-24 at most


def k_sequential(tree: TokenTree, logits_NV: Rows, sampler: Sampler, root_position: int) -> Acceptance:
    """Verify by k-sequential selection; the position does not enter, since the coins are fresh."""
    return walk(tree, logits_NV, sampler, k_sequential_trials)


def k_sequential_trials(target_V: Floats, offers: Iterable[Offer]) -> Iterator[Trial]:
    """Consecutive children drawn with replacement are tried as one group, others by the ratio test on what remains."""
    residual_V = target_V
    for is_group, members in groupby(offers, key=lambda offer: offer.draw is Draw.WITH_REPLACEMENT):
        for trial in _group_trials(residual_V, list(members)) if is_group else ratio_trials(residual_V, members):
            yield trial
            residual_V = trial.residual_V


def _group_trials(target_V: Floats, group: list[Offer]) -> Iterator[Trial]:
    """All trials of k draws from one distribution carry what remains after the last of them."""
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
    """rho: the least in [1, k] for which what remains after k failures is a distribution, see the top of this file."""
    is_common_V = (target_V > 0) & (probs_V > 0)
    p_C, q_C = target_V[is_common_V], probs_V[is_common_V]
    lo, hi = 1.0, float(num_draws)
    for _ in range(_NUM_HALVINGS if num_draws > 1 else 0):
        rho = (lo + hi) / 2
        is_valid = _num_deliveries(float(np.minimum(q_C, p_C / rho).sum()), num_draws) <= rho
        lo, hi = (lo, rho) if is_valid else (rho, hi)
    return hi


def _num_deliveries(beta: float, num_draws: int) -> float:
    """c = (1 - (1 - beta)^k) / beta, the sum of (1 - beta)^j for j < k, which is k where beta vanishes."""
    return sum((1 - beta) ** j for j in range(num_draws))
