"""Accept what the target itself draws: exact for any tree, and the same tokens for the same seed."""

from torch import Tensor

from offload.rules.walk import Acceptance
from offload.sampling import Sampler
from offload.tree import TokenTree


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
