"""The gate of every bench: no speed is printed for tokens that were not proved right.

What a rule promises decides how it is proved. Where each token is the target's own draw (greedy,
`match`, `topk`), every one must be the draw of the reference in float32, up to bf16 rounding; and
runs of a decoder that promises the same bits for every tree must not differ at all. Rules that draw
afresh promise a distribution: the surprise -log p(token) of all tokens together must lie as far
from its mean, the entropy, as chance allows. That test sees tokens of another distribution or
temperature; a single odd token may slip through it, and behind it are the tests of the rules.

Invariant: proofs come after all measuring, so that the reference's memory and time are in no
figure.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offload.bench.harness.promises import WrongTokenError
from offload.bench.harness.reference import Score
from offload.engine.generation import Generation
from offload.errors import UserError
from offload.reports.proof import gaps_of, rounding
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.verification import find_rule

MOST_SIGMAS = 5.0


class Written(NamedTuple):
    """One run to be proved."""

    prompt_ids: list[int]
    new_ids: list[int]
    sampling: Sampling = Sampling()
    rule: str = "match"
    is_invariant: bool = False  # written by a decoder that promises the same bits whatever the tree

    @classmethod
    def of(cls, prompt_ids: list[int], result: Generation) -> "Written":
        """Return what a decoder has written behind the prompt."""
        return cls(prompt_ids, result.token_ids, result.sampling, result.rule, result.is_invariant)


class Proof(NamedTuple):
    """What was found right; what is wrong raises."""

    num_exact: int  # tokens that are the reference's own draw
    num_near: int  # ... that miss it by no more than rounding
    num_by_law: int  # ... of rules that promise a distribution only
    # by how much the surprise of the last of these misses its mean; 0 where there are none
    sigmas: float


def prove(written: Sequence[Written], score: Score) -> Proof:
    """Prove every token.

    Raises:
        UserError: a token is not the reference's, or tokens do not follow its distribution.
    """
    _require_same_texts([run for run in written if run.is_invariant and _repeats_draws(run)])
    gaps = [gap for run in written if _repeats_draws(run) for gap in _gaps(run, score)]
    drawn = [run for run in written if not _repeats_draws(run)]
    sigmas = surprise_sigmas([_distribution(run, score) for run in drawn])
    if abs(sigmas) > MOST_SIGMAS:
        raise UserError(
            f"tokens miss the target's distribution by {sigmas:.1f} standard errors: no speed is worth printing"
        )
    num_near = sum(gap > 0 for gap in gaps)
    return Proof(len(gaps) - num_near, num_near, sum(len(run.new_ids) for run in drawn), sigmas)


def draws_hold(gaps: Sequence[float], sampling: Sampling) -> None:
    """Refuse tokens that miss the reference's draw by more than rounding.

    Raises `WrongTokenError`.
    """
    limit = rounding(sampling)
    if gaps and max(gaps) > limit:
        at = next(index for index, gap in enumerate(gaps) if gap > limit)
        said = f"new token {at} is wrong, it misses the draw by {gaps[at]:.3f}"
        raise WrongTokenError(f"{said}: no speed is worth printing")


def surprise_sigmas(drawn: Sequence[tuple[Tensor, Sequence[int]]]) -> float:
    """Return by how many standard errors the surprise of tokens misses its mean.

    Infinite where probabilities are not numbers.

    Args:
        drawn: distributions (T, V) and the tokens that are said to be drawn from them.
    """
    excess = variance = 0.0
    for p_TV, tokens in drawn:
        log_TV = p_TV.double().clamp(min=1e-300).log()
        mean_T = -(p_TV * log_TV).sum(1)
        told_T = -log_TV[torch.arange(len(tokens)), torch.tensor(tokens)]
        excess += float((told_T - mean_T).sum())
        variance += float(((p_TV * log_TV**2).sum(1) - mean_T**2).sum())
    sigmas = excess / max(variance, 1e-12) ** 0.5
    return math.inf if math.isnan(sigmas) else sigmas


def _repeats_draws(run: Written) -> bool:
    return run.sampling.is_greedy or find_rule(run.rule).repeats_draws


def _require_same_texts(written: Sequence[Written]) -> None:
    """Require runs that begin alike to go on alike. Raises `WrongTokenError`."""
    first: dict[tuple[tuple[int, ...], Sampling], Written] = {}
    for run in written:
        other = first.setdefault((tuple(run.prompt_ids), run.sampling), run)
        pairs = enumerate(zip(other.new_ids, run.new_ids, strict=False))
        at = next((index for index, (one, two) in pairs if one != two), None)
        if at is not None:
            raise WrongTokenError(
                f"new token {at} differs between two trees: no speed is worth printing"
            )


def _gaps(run: Written, score: Score) -> list[float]:
    logits_TV = score(run.prompt_ids, run.new_ids) if run.new_ids else torch.empty(0, 1)
    gaps = gaps_of(logits_TV, len(run.prompt_ids), run.new_ids, run.sampling)
    draws_hold(gaps, run.sampling)
    return gaps


def _distribution(run: Written, score: Score) -> tuple[Tensor, list[int]]:
    logits_TV = score(run.prompt_ids, run.new_ids)
    return Sampler(run.sampling, logits_TV.shape[1]).distribution(logits_TV), run.new_ids
