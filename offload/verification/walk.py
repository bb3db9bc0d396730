"""The walk that all ratio rules share: down the tree by chance, one node's children at a time.

A rule says for one node with which chance each child is accepted and what remains of the target's distribution when
none is. The walk tosses the coins, in float64 on the host, on the few rows that it visits. Invariant: one fresh coin
per node and step, the root's for the token that ends the walk.

On its way it notes how alike p and q are: for the first child of a node, a draw from q, the chance of acceptance is
sum of min(p, q), and Leviathan et al.'s alpha (2211.17192, Corollary 3.6) is the mean of that. Guesses that no draft
made, but were grafted onto its tree, are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from offload.planning.chains import acceptance
from offload.sampling.logits import Rows
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Floats, Offer
from offload.tree.token_tree import TokenTree


class Acceptance(NamedTuple):
    """The outcome of one sweep."""

    nodes: list[int]  # the accepted path, root first: rows whose keys and values are kept
    tokens: list[int]  # new tokens: those of the accepted nodes after the root, then one more drawn from the target
    guesses: Sequence[float] = ()  # for nodes of the path with children: the chance that the first one is accepted


class Trial(NamedTuple):
    """One child's turn."""

    child: int  # its node
    chance: float  # to be accepted, given that its elder siblings were not
    residual_V: Floats  # the distribution of the next token if this was the last child and nobody was accepted


Trials = Callable[[Floats, Iterable[Offer]], Iterator[Trial]]  # the target's distribution and the children of one node


def walk(tree: TokenTree, logits_NV: Rows, sampler: Sampler, trials: Trials, *, lenience: float = 1.0) -> Acceptance:
    """Descend into the first child that wins its toss, until none does; then draw from the remaining distribution.

    `lenience` below 1 is not exact, see `verification/lenience.py`: every chance is divided by it.
    """
    coin_N, nodes, guesses = sampler.uniform(tree.num_nodes), [0], list[float]()
    while True:
        residual_V = sampler.host_distribution(logits_NV[nodes[-1]])
        offers = tree.offers(nodes[-1])
        first = list(islice(offers, 1))
        guesses += (_chance(residual_V, offer, lenience) for offer in first if _is_of_draft(tree, offer))
        for child, chance, remainder_V in trials(residual_V, chain(first, offers)):
            if coin_N[child] < chance / lenience:
                nodes.append(child)
                break
            residual_V = remainder_V
        else:
            last = pick(residual_V, coin_N[0])
            return Acceptance(nodes, [*(tree.tokens[node] for node in nodes[1:]), last], guesses)


def _is_of_draft(tree: TokenTree, offer: Offer) -> bool:
    """Beside tokens that a draft has drawn, a point mass is a guess of others."""
    return tree.proposals is None or offer.probs_V is not None


def _chance(target_V: Floats, offer: Offer, lenience: float) -> float:
    """That a draw like this one is accepted, if it is a node's first; a point mass draws its own token."""
    if offer.probs_V is None:
        return min(1.0, float(target_V[offer.token]) / lenience)
    return acceptance(target_V, offer.probs_V, lenience)


def pick(probs_V: Floats, coin: float) -> int:
    """The token at which the cumulated distribution passes `coin`; never one without mass, not even by rounding."""
    sum_V = np.cumsum(probs_V)
    last = int(np.searchsorted(sum_V, sum_V[-1]))
    return min(int(np.searchsorted(sum_V, coin * sum_V[-1], side="right")), last)
