"""Which nodes of a scored tree are what the target itself would have written. No model in sight."""

from typing import NamedTuple

from torch import Tensor

from offload.sampling import Sampler
from offload.tree import TokenTree


class Acceptance(NamedTuple):
    """The outcome of one sweep."""

    nodes: list[int]  # the accepted path, root first: rows whose keys and values are kept
    tokens: list[int]  # new tokens: those of the accepted nodes after the root, then one more drawn from the target


def match(tree: TokenTree, logits_NV: Tensor, sampler: Sampler, root_position: int) -> Acceptance:
    """Walk down from the root along the tokens that the target draws; the first one that is not a child ends the walk.

    The draw at a position depends on the target and the noise alone, so the emitted tokens are the ones that decoding
    without a tree emits (Gumbel coupling as in arXiv 2408.07978; greedy is the case without noise).

    Args:
        logits_NV: the target's scores after each node.
        root_position: absolute position of the root token.
    """
    nodes, tokens, node = [0], [], 0
    while True:
        token = sampler.draw(logits_NV[node], root_position + len(nodes))
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return Acceptance(nodes, tokens)
        nodes.append(child)
        node = child
