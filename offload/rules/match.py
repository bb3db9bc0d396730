"""Accept what the target itself draws: exact for any tree, and the same tokens for the same seed."""

import torch
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
    drawn = _draw_all(tree, logits_NV, sampler, root_position) if _is_far(logits_NV) else None
    while True:
        token = sampler.draw(logits_NV[node], root_position + len(nodes)) if drawn is None else drawn[node]
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return Acceptance(nodes, tokens)
        nodes.append(child)
        node = child


def _is_far(logits_NV: Tensor) -> bool:
    """Whether every single draw would make the host wait for a device."""
    return logits_NV.is_cuda


def _draw_all(tree: TokenTree, logits_NV: Tensor, sampler: Sampler, root_position: int) -> list[int]:
    """The target's draw after every node, brought to the host at once."""
    position_N = torch.from_numpy(tree.topology.depth_N.copy()).long() + (root_position + 1)
    return [int(token) for token in sampler.draw_rows(logits_NV, position_N.to(logits_NV.device)).tolist()]
