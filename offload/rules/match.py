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
    best_N = greedy_draws(logits_NV) if sampler.is_greedy and logits_NV.device.type != "cpu" else None
    nodes, tokens, node = [0], list[int](), 0
    while True:
        token = best_N[node] if best_N else sampler.draw(logits_NV[node], root_position + len(nodes))
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return Acceptance(nodes, tokens)
        nodes.append(child)
        node = child


def greedy_draws(logits_NV: Tensor) -> list[int]:
    """What the target draws after every node without noise: on a device one transfer, where a walk needs one per node.

    With noise the walk goes row by row there too: top-p would sort every row, which takes longer than the transfers.
    """
    return [int(token) for token in logits_NV.argmax(-1).tolist()]
