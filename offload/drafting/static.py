"""Trees of a shape that is fixed beforehand: filled level by level, one draft pass each.

The rule of verification says how children are chosen. Only nodes that have children are ever run.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from offload.drafting.base import Drafted
from offload.drafting.children import draw_children
from offload.drafting.draft_model import Draft
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Proposals
from offload.tree.token_tree import TokenTree, ancestors
from offload.tree.topology import Topology


def fill(draft: Draft, topology: Topology, tokens: Sequence[int], sampler: Sampler) -> Drafted:
    """A tree of this shape below `tokens[-1]`; a node with more children than there are tokens repeats the last one."""
    root, schedule, proposals = len(tokens) - 1, _schedule(topology), None
    token_N = torch.full((topology.num_nodes,), tokens[-1], dtype=torch.long)
    for depth, level in enumerate(schedule.levels):
        logits_WV = level.run(draft, token_N, root) if depth else draft.catch_up(tokens)
        logits_WV = sampler.adjusted(logits_WV, token_N[level.path_WD].tolist())
        num_children = int(level.rank_C.max()) + 1
        token_WK, draw, probs_WV = draw_children(logits_WV, num_children, sampler, root + depth + 1)
        token_N[level.child_C] = token_WK[level.parent_row_C, level.rank_C.clamp(max=token_WK.shape[1] - 1)]
        if probs_WV is not None:
            proposals = proposals or Proposals.blank(topology, draft.vocab_size, draw, probs_WV.device)
            proposals.write(level.node_W.numpy(), probs_WV)
    return Drafted(TokenTree(topology, token_N, proposals), schedule.row_of_node, {})


class _Level:
    """What one draft step runs and where its guesses go."""

    def __init__(self, topology: Topology, depth: int, expanded: Tensor) -> None:
        lo, hi = topology.levels[depth].start, topology.levels[depth].stop
        self.node_W = expanded[(expanded >= lo) & (expanded < hi)]  # nodes to run: those with children
        uncommitted_U = expanded[(expanded > 0) & (expanded < hi)]  # rows in the cache by then; the root is committed
        self.ancestor_WU = ancestors(topology)[self.node_W][:, uncommitted_U]
        self.depth_U = torch.from_numpy(topology.depth_N.copy())[uncommitted_U]
        parent_N = torch.from_numpy(topology.parent_N.copy())
        path = [self.node_W]
        for _ in range(depth):
            path.insert(0, parent_N[path[0]])
        self.path_WD = torch.stack(path[1:], 1) if depth else self.node_W.new_empty(len(self.node_W), 0)
        self.child_C = torch.isin(parent_N, self.node_W).nonzero()[:, 0]
        self.parent_row_C = torch.searchsorted(self.node_W, parent_N[self.child_C])
        self.rank_C = torch.from_numpy(topology.rank_N.copy())[self.child_C]

    def run(self, draft: Draft, token_N: Tensor, root: int) -> Tensor:
        return draft.run(token_N[self.node_W], self.depth_U + root, self.ancestor_WU)


class _Schedule(NamedTuple):
    """The draft steps of one topology."""

    levels: list[_Level]
    row_of_node: dict[int, int]


@lru_cache(maxsize=8)
def _schedule(topology: Topology) -> _Schedule:
    expanded = torch.from_numpy(topology.num_children_N > 0).nonzero()[:, 0]
    levels = [_Level(topology, depth, expanded) for depth in range(topology.depth)]
    return _Schedule(levels, {int(node): row for row, node in enumerate(expanded[expanded > 0])})
