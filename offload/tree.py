"""A token tree: what a drafter proposes and one sweep scores. No model in sight.

Node 0 is the root, the last committed token, whose own logits say what comes first. Invariant: nodes stand in level
order, so a parent precedes its children and the children of one node are consecutive.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from offload.topology import Topology


@dataclass(frozen=True)
class TokenTree:
    """Tokens on a topology.

    Attributes:
        topology: who is whose child.
        token_N: int64, the proposed ids; `token_N[0]` is committed already.
    """

    topology: Topology
    token_N: Tensor

    def __post_init__(self) -> None:
        assert self.token_N.shape == (self.topology.num_nodes,), "one token per node"

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.topology.num_nodes

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`."""
        return next((c for c in self._children[node] if self._tokens[c] == token), None)

    @cached_property
    def _tokens(self) -> list[int]:
        return [int(token) for token in self.token_N.tolist()]

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.topology.parent_N.tolist()):
            if parent >= 0:
                children[parent].append(node)
        return children


@lru_cache(maxsize=8)
def ancestors(topology: Topology) -> Tensor:
    """Bool (N, N): entry (i, j) tells whether node j lies on the path from the root to node i, i included."""
    ancestor_NN = torch.eye(topology.num_nodes, dtype=torch.bool)
    for node, parent in enumerate(topology.parent_N.tolist()):
        if parent >= 0:
            ancestor_NN[node] |= ancestor_NN[parent]
    return ancestor_NN
