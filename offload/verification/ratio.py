"""The ratio test, child by child: Sequoia's verification and SpecInfer's, and any mix of proposals at one node.

A child x that was drawn from D is accepted with chance min(1, R[x] / D[x]), where R is the target's distribution at
first; after a rejection R becomes what D could not deliver, norm(max(R - D, 0)). A trial hands out min(R, D) and leaves
the rest, so what is emitted has distribution R whatever D is. Drawn without replacement D makes it Sequoia (2402.12374,
Alg. 1), with replacement SpecInfer (Alg. 3 there), and a point mass is the target's own sampling. A token that was
rejected is never accepted later: R has no mass there any more.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from offload.sampling.logits import Rows
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Floats, Offer
from offload.tree.token_tree import TokenTree
from offload.verification.walk import Acceptance, Trial, walk


def ratio(tree: TokenTree, logits_NV: Rows, sampler: Sampler, root_position: int) -> Acceptance:
    """Verify by the ratio test; the position does not enter, since the coins are fresh."""
    return walk(tree, logits_NV, sampler, ratio_trials)


def ratio_trials(target_V: Floats, offers: Iterable[Offer]) -> Iterator[Trial]:
    """One trial per child, in the order of the draws."""
    residual_V = target_V
    for offer in offers:
        left_V = _undelivered(residual_V, offer)
        mass = left_V.sum()
        if not mass:  # the child's distribution delivers all there is
            yield Trial(offer.child, 1.0, left_V)
            return
        offered = 1.0 if offer.probs_V is None else offer.probs_V[offer.token]
        chance = min(1.0, float(residual_V[offer.token] / offered))
        residual_V = left_V / mass
        yield Trial(offer.child, chance, residual_V)


def _undelivered(residual_V: Floats, offer: Offer) -> Floats:
    if offer.probs_V is not None:
        return np.maximum(residual_V - offer.probs_V, 0)
    left_V = residual_V.copy()
    left_V[offer.token] = 0
    return left_V
