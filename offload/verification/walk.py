"""The walk that all ratio rules share: down the tree by chance, one node's children at a time.

A rule says for one node with which chance each child is accepted and what remains of the target's distribution when
none is. The walk tosses the coins, in float64 on the host, on the few rows that it visits. Invariant: one fresh coin
per node and step, the root's for the token that ends the walk.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from offload.sampling.logits import Rows
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Floats, Offer
from offload.tree.token_tree import TokenTree


class Acceptance(NamedTuple):
    """The outcome of one sweep."""

    nodes: list[int]  # the accepted path, root first: rows whose keys and values are kept
    tokens: list[int]  # new tokens: those of the accepted nodes after the root, then one more drawn from the target


class Trial(NamedTuple):
    """One child's turn."""

    child: int  # its node
    chance: float  # to be accepted, given that its elder siblings were not
    residual_V: Floats  # the distribution of the next token if this was the last child and nobody was accepted


Trials = Callable[[Floats, Iterable[Offer]], Iterator[Trial]]  # the target's distribution and the children of one node


def walk(tree: TokenTree, logits_NV: Rows, sampler: Sampler, trials: Trials) -> Acceptance:
    """Descend into the first child that wins its toss, until none does; then draw from the remaining distribution."""
    coin_N, nodes = sampler.uniform(tree.num_nodes), [0]
    while True:
        residual_V = sampler.host_distribution(logits_NV[nodes[-1]])
        for child, chance, remainder_V in trials(residual_V, tree.offers(nodes[-1])):
            if coin_N[child] < chance:
                nodes.append(child)
                break
            residual_V = remainder_V
        else:
            last = pick(residual_V, coin_N[0])
            return Acceptance(nodes, [*(tree.tokens[node] for node in nodes[1:]), last])


def pick(probs_V: Floats, coin: float) -> int:
    """The token at which the cumulated distribution passes `coin`; never one without mass, not even by rounding."""
    sum_V = np.cumsum(probs_V)
    last = int(np.searchsorted(sum_V, sum_V[-1]))
    return min(int(np.searchsorted(sum_V, coin * sum_V[-1], side="right")), last)
