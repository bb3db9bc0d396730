"""How the children of a level's nodes are chosen from the draft's logits: one vectorised draw for all of them.

Which way belongs to the rule of verification. Invariant: the number of children is settled before anything is drawn,
and a node takes its first so-many draws in their order; nothing drawn is looked at and dropped. W rows (nodes of one
level).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offload.config import Drafting
from offload.kernels.draw_without_replacement import largest_keys
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Draw

_MAX_KEYS = 1 << 19  # float64 numbers drawn at once: 4 MiB; the plan counts on it


class Children(NamedTuple):
    """The choice for W nodes."""

    token_WK: Tensor  # int64 on the host, in the order of the draws; K is smaller where the vocabulary is
    draw: Draw
    probs_WV: Tensor | None  # float32, what was drawn from; None for point masses


def draw_children(logits_WV: Tensor, num_children: int, sampler: Sampler, position: int) -> Children:
    """Choose `num_children` for every row, which all predict the token at `position`; any where scores are NaN."""
    drafting = sampler.drafting
    # Draws without replacement become a ranking as the temperature falls to zero.
    if not drafting.keeps_distributions or (drafting is Drafting.WITHOUT_REPLACEMENT and sampler.is_greedy):
        return _best(point_mass_scores(logits_WV, sampler, position), num_children)
    probs_WV = sampler.distribution(logits_WV)
    if drafting is Drafting.WITHOUT_REPLACEMENT:
        return Children(_without_replacement(probs_WV, num_children, sampler).cpu(), Draw.WITHOUT_REPLACEMENT, probs_WV)
    return Children(_with_replacement(probs_WV, num_children, sampler).cpu(), Draw.WITH_REPLACEMENT, probs_WV)


def point_mass_scores(logits_WV: Tensor, sampler: Sampler, position: int | Sequence[int]) -> Tensor:
    """What a row's children are ranked by at its position: the likelihood, with the target's noise where coupled."""
    return sampler.perturbed(logits_WV, position) if sampler.drafting is Drafting.COUPLED else logits_WV


def _best(score_WV: Tensor, num_children: int) -> Children:
    token_WK = score_WV.topk(min(num_children, score_WV.shape[1])).indices.cpu()
    return Children(token_WK, Draw.POINT_MASS, None)


def _without_replacement(probs_WV: Tensor, num_children: int, sampler: Sampler) -> Tensor:
    """Exponential sort, as in `draw_without_replacement_reference`, with numbers of the sampler's generator."""
    if probs_WV.is_cuda:
        draw = sampler.kernels.draw_without_replacement
        return draw(probs_WV, num_children, sampler.sampling.seed, sampler.take_rows(len(probs_WV)))
    drawn = ((torch.from_numpy(sampler.uniform(*probs_RV.shape)), probs_RV) for probs_RV in _blocks(probs_WV))
    return torch.cat([largest_keys(uniform_RV, probs_RV, num_children) for uniform_RV, probs_RV in drawn])


def _with_replacement(probs_WV: Tensor, num_children: int, sampler: Sampler) -> Tensor:
    """Independent draws by inverting the cumulated distribution; never a token without mass, or beyond the last."""
    chosen = []
    for probs_RV in _blocks(probs_WV):
        sum_RV = probs_RV.double().cumsum(1)
        coin_RK = sampler.send(torch.from_numpy(sampler.uniform(len(probs_RV), num_children)), probs_RV)
        total_R1 = sum_RV[:, -1:].clone()
        token_RK = torch.searchsorted(sum_RV, coin_RK * total_R1, right=True)
        last_R1 = torch.searchsorted(sum_RV, total_R1).clamp_(max=probs_RV.shape[1] - 1)
        chosen.append(token_RK.minimum(last_R1))
    return torch.cat(chosen)


def _blocks(probs_WV: Tensor) -> tuple[Tensor, ...]:
    """Rows in groups of at most `_MAX_KEYS` numbers, one row at least."""
    return probs_WV.split(max(1, _MAX_KEYS // probs_WV.shape[1]))
