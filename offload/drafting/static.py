"""Trees of a fixed shape, filled level by level with one draft pass each.

The rule of verification decides how children are chosen from the draft's logits: drawn with or
without replacement, or ranked. One vectorised draw serves all nodes of a level. Only nodes that
have children are run.

Invariant: the number of children is settled before anything is drawn, and a node takes its first
draws in order; no draw is looked at and dropped.

Shape letters, in this file only: W rows of a pass (nodes of one level), R rows of a block.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offload.drafting.draft_model import Draft
from offload.kernels.draw_without_replacement import largest_keys
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.trees.token_tree import Draw, Proposals, TokenTree, ancestors
from offload.trees.topology import Topology

# float64 numbers drawn at once: 4 MiB, which the memory plan counts on
_MAX_KEYS = 1 << 19


def draw_children(
    logits_WV: Tensor, num_children: int, sampler: Sampler, position: int
) -> tuple[Tensor, Draw, Tensor | None]:
    """Choose children for rows that predict the token at `position`; any where scores are NaN.

    Returns int64 (W, K) on the host, in the order of the draws; K is smaller if the vocabulary is.
    Also returns the way they were drawn, and the distribution, float32 (W, V), None for point
    masses.
    """
    drafting = sampler.drafting
    # Draws without replacement approach a ranking as the temperature falls to zero.
    if not drafting.keeps_distributions or (
        drafting is ChildSampling.WITHOUT_REPLACEMENT and sampler.is_greedy
    ):
        score_WV = point_mass_scores(logits_WV, sampler, position)
        token_WK = score_WV.topk(min(num_children, score_WV.shape[1])).indices
        return token_WK.cpu(), Draw.POINT_MASS, None
    probs_WV = sampler.distribution(logits_WV)
    if drafting is ChildSampling.WITHOUT_REPLACEMENT:
        token_WK = _without_replacement(probs_WV, num_children, sampler)
        return token_WK.cpu(), Draw.WITHOUT_REPLACEMENT, probs_WV
    token_WK = _with_replacement(probs_WV, num_children, sampler)
    return token_WK.cpu(), Draw.WITH_REPLACEMENT, probs_WV


def point_mass_scores(logits_WV: Tensor, sampler: Sampler, position: int | Sequence[int]) -> Tensor:
    """Return the scores that rank children: logits, with the target's noise where coupled."""
    return (
        sampler.perturbed(logits_WV, position)
        if sampler.drafting is ChildSampling.COUPLED
        else logits_WV
    )


def _without_replacement(probs_WV: Tensor, num_children: int, sampler: Sampler) -> Tensor:
    """Return int64 (W, K), drawn by exponential sort; on the host the sampler's generator draws."""
    if probs_WV.is_cuda:
        draw = sampler.kernels.draw_without_replacement
        return draw(probs_WV, num_children, sampler.sampling.seed, sampler.take_rows(len(probs_WV)))
    drawn = (
        (torch.from_numpy(sampler.uniform(*probs_RV.shape)), probs_RV)
        for probs_RV in _blocks(probs_WV)
    )
    return torch.cat(
        [largest_keys(uniform_RV, probs_RV, num_children) for uniform_RV, probs_RV in drawn]
    )


def _with_replacement(probs_WV: Tensor, num_children: int, sampler: Sampler) -> Tensor:
    """Return int64 (W, K), drawn independently by inversion; no token without mass."""
    chosen = []
    for probs_RV in _blocks(probs_WV):
        sum_RV = probs_RV.double().cumsum(1)
        coin_RK = sampler.send(
            torch.from_numpy(sampler.uniform(len(probs_RV), num_children)), probs_RV
        )
        total_R1 = sum_RV[:, -1:].clone()
        token_RK = torch.searchsorted(sum_RV, coin_RK * total_R1, right=True)
        last_R1 = torch.searchsorted(sum_RV, total_R1).clamp_(max=probs_RV.shape[1] - 1)
        chosen.append(token_RK.minimum(last_R1))
    return torch.cat(chosen)


def _blocks(probs_WV: Tensor) -> tuple[Tensor, ...]:
    """Yield groups of rows with at most `_MAX_KEYS` numbers, at least one row each."""
    return probs_WV.split(max(1, _MAX_KEYS // probs_WV.shape[1]))


def fill(draft: Draft, topology: Topology, tokens: Sequence[int], sampler: Sampler) -> TokenTree:
    """Return a tree of this shape below the last token; missing tokens repeat the last child."""
    root = len(tokens) - 1
    levels, row_of_node = _schedule(topology)
    proposals = None
    token_N = torch.full((topology.num_nodes,), tokens[-1], dtype=torch.long)
    for depth, level in enumerate(levels):
        logits_WV = level.run(draft, token_N, root) if depth else draft.catch_up(tokens)
        logits_WV = sampler.adjusted(logits_WV, token_N[level.path_WD].tolist())
        num_children = int(level.rank_C.max()) + 1
        token_WK, draw, probs_WV = draw_children(logits_WV, num_children, sampler, root + depth + 1)
        token_N[level.child_C] = token_WK[
            level.parent_row_C, level.rank_C.clamp(max=token_WK.shape[1] - 1)
        ]
        if probs_WV is not None:
            proposals = proposals or Proposals.blank(
                topology, draft.vocab_size, draw, probs_WV.device
            )
            proposals.write(level.node_W.numpy(), probs_WV)
    return TokenTree(topology, token_N, proposals, row_of_node)


class _Level:
    """The rows that one draft pass runs, and the nodes that receive its guesses."""

    def __init__(self, topology: Topology, depth: int, expanded: Tensor) -> None:
        lo = topology.levels[depth].start
        hi = topology.levels[depth].stop
        # nodes with children, which are run
        self.node_W = expanded[(expanded >= lo) & (expanded < hi)]
        # rows in the cache before this pass; the root is committed
        uncommitted_U = expanded[(expanded > 0) & (expanded < hi)]
        self.ancestor_WU = ancestors(topology)[self.node_W][:, uncommitted_U]
        self.depth_U = torch.from_numpy(topology.depth_N.copy())[uncommitted_U]
        parent_N = torch.from_numpy(topology.parent_N.copy())
        path = [self.node_W]
        for _ in range(depth):
            path.insert(0, parent_N[path[0]])
        self.path_WD = (
            torch.stack(path[1:], 1) if depth else self.node_W.new_empty(len(self.node_W), 0)
        )
        self.child_C = torch.isin(parent_N, self.node_W).nonzero()[:, 0]
        self.parent_row_C = torch.searchsorted(self.node_W, parent_N[self.child_C])
        self.rank_C = torch.from_numpy(topology.rank_N.copy())[self.child_C]

    def run(self, draft: Draft, token_N: Tensor, root: int) -> Tensor:
        return draft.run(token_N[self.node_W], self.depth_U + root, self.ancestor_WU)


@lru_cache(maxsize=8)
def _schedule(topology: Topology) -> tuple[list[_Level], dict[int, int]]:
    """Return the draft passes of a shape, and the cache row of every node that is run."""
    expanded = torch.from_numpy(topology.num_children_N > 0).nonzero()[:, 0]
    levels = [_Level(topology, depth, expanded) for depth in range(topology.depth)]
    return levels, {int(node): row for row, node in enumerate(expanded[expanded > 0])}
