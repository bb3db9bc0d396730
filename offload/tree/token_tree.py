"""A token tree: what a drafter proposes and one sweep scores. No model in sight.

Node 0 is the root, the last committed token, whose own logits say what comes first. Invariant: nodes stand in level
order, so a parent precedes its children and the children of one node are consecutive, in the order of their draws.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from offload.tree.proposals import Draw, Offer, Proposals
from offload.tree.topology import Topology


@dataclass(frozen=True)
class TokenTree:
    """Tokens on a topology."""

    topology: Topology
    token_N: Tensor  # int64, the proposed ids; `token_N[0]` is committed already
    proposals: Proposals | None = None  # what the tokens were drawn from; without it every child is a point mass

    def __post_init__(self) -> None:
        assert self.token_N.shape == (self.topology.num_nodes,), "one token per node"

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @cached_property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.token_N.tolist()]

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node, which has the last; none for the root."""
        tokens = list[int]()
        while node:
            tokens.append(self.tokens[node])
            node = int(self.topology.parent_N[node])
        return tokens[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`."""
        return next((c for c in children_of(self.topology)[node] if self.tokens[c] == token), None)

    def offers(self, node: int) -> Iterator[Offer]:
        """The children of `node` in the order of their draws, each with the distribution it came from."""
        children = children_of(self.topology)[node]
        tokens = [self.tokens[child] for child in children]
        if self.proposals is not None:
            return self.proposals.offers(node, children, tokens)
        return (Offer(*pair, Draw.POINT_MASS, None) for pair in zip(children, tokens, strict=True))


@lru_cache(maxsize=8)
def children_of(topology: Topology) -> list[list[int]]:
    """The children of every node."""
    children: list[list[int]] = [[] for _ in range(topology.num_nodes)]
    for node, parent in enumerate(topology.parent_N.tolist()):
        if parent >= 0:
            children[parent].append(node)
    return children


@lru_cache(maxsize=2)  # of N x N; the one tree of a run comes again and again, dynamic ones never do
def ancestors(topology: Topology) -> Tensor:
    """Bool (N, N): entry (i, j) tells whether node j lies on the path from the root to node i, i included."""
    ancestor_NN = torch.eye(topology.num_nodes, dtype=torch.bool)
    parent_N = torch.from_numpy(topology.parent_N.copy())
    for level in topology.levels[1:]:
        ancestor_NN[level] |= ancestor_NN[parent_N[level]]
    return ancestor_NN
