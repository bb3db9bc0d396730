"""Accept what the target itself draws: exact for any tree, and the same tokens for the same seed."""

import torch
from torch import Tensor

from offload.sampling.logits import Rows, chunk_with
from offload.sampling.sampler import Sampler, require_token
from offload.tree.token_tree import TokenTree, children_of
from offload.verification.walk import Acceptance


def match(tree: TokenTree, logits_NV: Rows, sampler: Sampler, root_position: int) -> Acceptance:
    """Walk down from the root along the tokens that the target draws; the first one that is not a child ends the walk.

    The draw at a position depends on the target and the noise alone, so the tokens are those that decoding without a
    tree emits (Gumbel coupling as in arXiv 2408.07978). Raises `UserError` where scores on the way are not finite.
    """
    nodes, tokens, guesses, node = [0], list[int](), list[float](), 0
    drawn: dict[int, int] = {}
    while True:
        if not sampler.draws_rows:
            token = sampler.draw(logits_NV[node], root_position + len(nodes))
        else:
            if node not in drawn:
                drawn = _draw_chunk(tree, *chunk_with(logits_NV, node), sampler, root_position)
            token = require_token(drawn[node])
        tokens.append(token)
        child = tree.child(node, token)
        guesses += [float(tree.tokens[first] == token) for first in children_of(tree.topology)[node][:1]]
        if child is None:
            return Acceptance(nodes, tokens, guesses)
        nodes.append(child)
        node = child


def _draw_chunk(tree: TokenTree, lo: int, logits_CV: Tensor, sampler: Sampler, root_position: int) -> dict[int, int]:
    """The target's draw after every node of a chunk, brought to the host at once."""
    depth_C = tree.topology.depth_N[lo : lo + len(logits_CV)]
    position_C = torch.from_numpy(depth_C.copy()).long() + (root_position + 1)
    token_C = sampler.draw_rows(logits_CV, position_C)
    return dict(enumerate(map(int, token_C.tolist()), lo))
