"""A token tree, which a drafter proposes and one weight pass scores. No model in sight.

Node 0 is the root, the last committed token, whose own logits say what comes first. A rule that
compares p(x) with q(x) is exact only if q is the very distribution that x was drawn from, given
everything drawn before it. So `Proposals` keeps a distribution per node, after temperature, top-k
and top-p, and the kind of draw per child; from these the distribution of every single child
follows. A child about which nothing is known but its token (likeliest, copied, retrieved) is a
point mass.

Invariant: nodes stand in level order, so a parent precedes its children and the children of one
node are consecutive, in the order of their draws. How many children a node gets never depends on
the tokens that were drawn for it (predictable growth).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.sampling.sampler import require_number
from offload.trees.topology import Ints, Topology, in_level_order

Floats = NDArray[np.float64]


class Draw(IntEnum):
    """How a child was chosen."""

    POINT_MASS = 0  # without any chance that a rule could use
    WITHOUT_REPLACEMENT = 1  # from the node's distribution without the tokens of its elder siblings
    WITH_REPLACEMENT = 2  # from the node's distribution as it is


class Offer(NamedTuple):
    """One child as a rule sees it."""

    child: int  # index of its node
    token: int
    draw: Draw
    # the distribution of its token, given its elder siblings; None is a point mass
    probs_V: Floats | None


@dataclass(frozen=True)
class Proposals:
    """What a tree's children were drawn from, over V; zero where the draft has no token."""

    draw_N: Ints  # how each node was drawn as a child (a `Draw`); the root's entry means nothing
    # which row of `probs_EV` a node's children were drawn from; -1 where all are point masses
    row_N: Ints
    probs_EV: Tensor  # float32, one distribution for each of the E nodes whose children were drawn

    @classmethod
    def blank(
        cls, topology: Topology, vocab_size: int, draw: Draw, device: torch.device | str = "cpu"
    ) -> "Proposals":
        """Return distributions to be written, on `device`, for children all drawn alike."""
        has_children_N = topology.num_children_N > 0
        row_N = np.where(has_children_N, np.cumsum(has_children_N) - 1, -1)
        probs_EV = torch.zeros(int(has_children_N.sum()), vocab_size, device=device)
        return cls(np.full(topology.num_nodes, int(draw)), row_N, probs_EV)

    def reordered(self, order: Sequence[int]) -> "Proposals":
        """Return the distributions of nodes in this order; the nodes beyond are point masses."""
        beyond = np.zeros(len(order) - len(self.draw_N), dtype=np.int64)
        draw_N = np.concatenate([self.draw_N, beyond + int(Draw.POINT_MASS)])[order]
        return Proposals(draw_N, np.concatenate([self.row_N, beyond - 1])[order], self.probs_EV)

    def write(self, node_W: Sequence[int] | Ints, probs_WV: Tensor) -> None:
        """Write the distributions of the children of these consecutive nodes."""
        rows = self.row_N[node_W]
        assert (np.diff(rows) == 1).all(), "nodes of a level, in their order"
        self.probs_EV[rows[0] : rows[0] + len(rows)] = probs_WV

    def offers(
        self, parent: int, children: Sequence[int], tokens: Sequence[int]
    ) -> Iterator[Offer]:
        """Yield children in draw order while tokens are left. Raises `UserError` for NaN."""
        row = int(self.row_N[parent])
        full_V = None if row < 0 else _normalised(self.probs_EV[row].double().cpu().numpy())
        for rank, (child, token) in enumerate(zip(children, tokens, strict=True)):
            draw = Draw(int(self.draw_N[child]))
            probs_V = None if draw is Draw.POINT_MASS else full_V
            if draw is Draw.WITHOUT_REPLACEMENT:
                assert full_V is not None, (
                    f"node {parent} has no distribution, and its child {child} was drawn from one"
                )
                probs_V = _without(full_V, list(tokens[:rank]))
                if not probs_V.any():
                    return
            assert probs_V is None or probs_V[token] > 0, (
                f"child {child} cannot have been drawn from the distribution it came with"
            )
            yield Offer(child, token, draw, probs_V)


def _without(probs_V: Floats, tokens: list[int]) -> Floats:
    """Return `probs_V` restricted to other tokens; uniform where none is left (Sequoia, Alg. 1)."""
    left_V = probs_V.copy()
    left_V[tokens] = 0
    if not left_V.any():
        left_V[:] = 1
        left_V[tokens] = 0
    return _normalised(left_V)


def _normalised(probs_V: Floats) -> Floats:
    """Return `probs_V` divided by its sum; zeros stay zeros. Raises `UserError` for NaN."""
    return probs_V / (require_number(probs_V.sum()) or 1.0)


@dataclass(frozen=True)
class TokenTree:
    """Tokens on a topology: what a drafter grows, a pass scores and a rule verifies."""

    topology: Topology
    token_N: Tensor  # int64, the proposed ids; `token_N[0]` is committed already
    # the distributions of the tokens; without them every child is a point mass
    proposals: Proposals | None = None
    # For the drafter, when a path is accepted: the cache row, counted from the committed length, of
    # every node that was run,
    row_of_node: dict[int, int] = field(default_factory=dict)
    # and of a dynamic tree the scores u_V after every such node, the root included.
    score_of_node: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.token_N.shape == (self.topology.num_nodes,), "one token per node"

    @classmethod
    def listed(
        cls,
        parents: Sequence[int],
        tokens: Sequence[int],
        proposals: Proposals | None = None,
        row_of: Mapping[int, int] = MappingProxyType({}),
        score_of: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> "TokenTree":
        """Return the tree of nodes listed with parents before children and siblings by rank.

        What is said of nodes by their places in the list moves with them into level order.
        """
        topology, order = in_level_order(parents)
        node_of = dict(zip(order, range(len(order)), strict=True))
        return cls(
            topology,
            torch.tensor([tokens[node] for node in order]),
            proposals and proposals.reordered(order),
            {node_of[node]: row for node, row in row_of.items()},
            {node_of[node]: score_V for node, score_V in score_of.items()},
        )

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @cached_property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.token_N.tolist()]

    def path(self, node: int) -> list[int]:
        """Return the tokens from below the root down to `node`, its own last; none for the root."""
        tokens = list[int]()
        while node:
            tokens.append(self.tokens[node])
            node = int(self.topology.parent_N[node])
        return tokens[::-1]

    def child(self, node: int, token: int) -> int | None:
        """Return the first child of `node` with this token; None if there is none."""
        return next((c for c in children_of(self.topology)[node] if self.tokens[c] == token), None)

    def offers(self, node: int) -> Iterator[Offer]:
        """Return the children of `node` in draw order, each with the distribution it came from."""
        children = children_of(self.topology)[node]
        tokens = [self.tokens[child] for child in children]
        if self.proposals is not None:
            return self.proposals.offers(node, children, tokens)
        return (Offer(*pair, Draw.POINT_MASS, None) for pair in zip(children, tokens, strict=True))


@lru_cache(maxsize=8)
def children_of(topology: Topology) -> list[list[int]]:
    """Return the children of every node."""
    children: list[list[int]] = [[] for _ in range(topology.num_nodes)]
    for node, parent in enumerate(topology.parent_N.tolist()):
        if parent >= 0:
            children[parent].append(node)
    return children


# Only a few are kept, since they are N x N: a fixed tree recurs in every step, a dynamic one never.
@lru_cache(maxsize=2)
def ancestors(topology: Topology) -> Tensor:
    """Return bool (N, N): whether node j lies on the path from the root to node i, i included."""
    ancestor_NN = torch.eye(topology.num_nodes, dtype=torch.bool)
    parent_N = torch.from_numpy(topology.parent_N.copy())
    for level in topology.levels[1:]:
        ancestor_NN[level] |= ancestor_NN[parent_N[level]]
    return ancestor_NN
