"""How often a rule accepts the child of each rank, from logged scores of both models.

Children are drawn, but coins are not tossed: a rule tells the chance of each child, so only the draws add noise.
Invariant: chances come from the very functions that decoding calls.
"""

from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.bench.studies.pair_text import Rows
from offload.config import Sampling
from offload.drafting.children import draw_children
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Floats, Proposals
from offload.tree.token_tree import TokenTree
from offload.tree.topology import k_ary
from offload.verification.k_sequential import k_sequential_trials
from offload.verification.ratio import ratio_trials
from offload.verification.rules import find_rule

_TRIALS = {"sequoia": ratio_trials, "specinfer": ratio_trials, "spectr": k_sequential_trials}


class Measured(NamedTuple):
    """A mean over positions with its standard error, in which prompts are what is independent."""

    mean: Floats
    error: Floats


def over_prompts(value_RK: Floats, num_prompts: int) -> Measured:
    """Mean and standard error of columns; rows lie prompt after prompt, equally many of each."""
    mean_BK = value_RK.reshape(num_prompts, -1, value_RK.shape[1]).mean(1)
    spread_K = mean_BK.std(0, ddof=1) if num_prompts > 1 else np.zeros(mean_BK.shape[1])
    return Measured(mean_BK.mean(0), spread_K / np.sqrt(num_prompts))


def acceptance_vector(rule: str, rows: Rows, sampling: Sampling, num_ranks: int) -> Measured:
    """p of Sequoia's section 3: the chance that the child of each rank is accepted."""
    return over_prompts(chances(rule, rows, sampling, num_ranks), rows.num_prompts)


def chances(rule: str, rows: Rows, sampling: Sampling, num_children: int) -> Floats:
    """Chance (R, K) that the child of each rank is the accepted one, for nodes of `num_children` children."""
    sampler = Sampler(sampling, rows.target_RV.shape[1], find_rule(rule).drafting)
    if rule in _TRIALS:
        return _by_trials(rule, rows, sampler, num_children)
    if rule == "topk":
        token_RK, _, _ = draw_children(rows.draft_RV, num_children, sampler, 0)
        return sampler.distribution(rows.target_RV).gather(1, token_RK).double().numpy()
    scores = enumerate(zip(rows.target_RV, rows.draft_RV, strict=True))
    return np.stack([_match(target_V, draft_V, sampler, num_children, row) for row, (target_V, draft_V) in scores])


def total_variation(rows: Rows, sampling: Sampling) -> Measured:
    """Mean of |P - Q| / 2: no rule whatever rejects a single child less often."""
    sampler = Sampler(sampling, rows.target_RV.shape[1])
    apart_R1 = (sampler.distribution(rows.target_RV) - sampler.distribution(rows.draft_RV)).abs().sum(
        1, keepdim=True
    ) / 2
    return over_prompts(apart_R1.double().numpy(), rows.num_prompts)


def _match(target_V: Tensor, draft_V: Tensor, sampler: Sampler, num_children: int, position: int) -> Floats:
    """One where the target's draw is the child of that rank; every row has a position, hence noise, of its own."""
    token_1K, _, _ = draw_children(draft_V[None], num_children, sampler, position)
    return (token_1K[0] == sampler.draw(target_V, position)).double().numpy()


def _by_trials(rule: str, rows: Rows, sampler: Sampler, num_children: int) -> Floats:
    """Unconditional chances: a child's own, times that all its elder siblings were rejected."""
    chance_RK, topology = np.zeros((len(rows.target_RV), num_children)), k_ary(num_children, num_children + 1)
    token_RK, draw, p_RV = draw_children(rows.draft_RV, num_children, sampler, 0)
    for row, token_K in enumerate(token_RK):
        token_N = torch.cat([torch.zeros(1, dtype=torch.long), token_K])
        proposals = None
        if p_RV is not None:
            proposals = Proposals.blank(topology, p_RV.shape[1], draw)
            proposals.write([0], p_RV[row : row + 1])
        left, p_V = 1.0, sampler.host_distribution(rows.target_RV[row])
        trials = _TRIALS[rule](p_V, TokenTree(topology, token_N, proposals).offers(0))
        for rank, trial in enumerate(islice(trials, num_children)):
            chance_RK[row, rank] = left * trial.chance
            left *= 1 - trial.chance
            if left <= 0:
                break
    return chance_RK
