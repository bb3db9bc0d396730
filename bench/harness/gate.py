"""The gate of every bench: no speed is printed for tokens that were not proved right.

Where a rule makes each token the target's own draw (greedy, `match`, `topk`), every one must be the
draw of the reference in float32, up to bf16 rounding; and runs of a decoder that promises the same
bits for every tree must not differ at all. Rules that draw afresh promise a distribution: the
surprise -log p(token) of all tokens together must lie as far from its mean, the entropy, as chance
allows. A single odd token may slip through that; behind it are the tests of the rules.

A router in 16 bits may choose another of two experts that are nearly even, which moves scores by
more than rounding does. So a token of a mixture may miss its draw by as much as 16 bits move the
original's own scores on the same texts; such tokens are counted apart, with that distance.
Invariant: proofs come after all measuring, so that their memory and time are in no figure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.bench.harness.tables import WrongTokenError
from offload.checkpoint.open import open_headers
from offload.engine.build import resident_model
from offload.engine.generation import Generation
from offload.engine.load import load
from offload.errors import UserError
from offload.machine import available_ram_bytes
from offload.reports.proof import chain_logits, gaps_of, rounding
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import chain
from offload.trees.verification import find_rule

MOST_SIGMAS = 5.0
# prompt, new ids -> logits (T, V) that predicted each new id
Score = Callable[[Sequence[int], Sequence[int]], Tensor]


class Written(NamedTuple):
    prompt_ids: list[int]
    new_ids: list[int]
    sampling: Sampling = Sampling()
    rule: str = "match"
    is_invariant: bool = False  # written by a decoder that promises the same bits whatever the tree

    @classmethod
    def from_result(cls, prompt_ids: list[int], result: Generation) -> "Written":
        return cls(prompt_ids, result.token_ids, result.sampling, result.rule, result.is_invariant)

    @property
    def repeats_draws(self) -> bool:
        return self.sampling.is_greedy or find_rule(self.rule).repeats_draws


class Proof(NamedTuple):
    """What was found right; what is wrong raises."""

    num_exact: int  # tokens that are the reference's own draw
    num_near: int  # ... that miss it by no more than rounding
    num_by_law: int  # ... of rules that promise a distribution only
    # by how much the surprise of the last of these misses its mean; 0 where there are none
    sigmas: float
    # of those within rounding, tokens of a mixture that routers in 16 bits may choose
    num_routed: int = 0
    # by how much these move its scores at most; 0 where it was not asked for
    routed_by: float = 0.0

    @property
    def line(self) -> str:
        words = f"{self.num_exact} tokens are the reference's own draw in float32"
        words = f"gate: {words}, {self.num_near} within bf16 rounding"
        if self.num_routed:
            words = f"{words}, {self.num_routed} of these by what routers choose in 16 bits"
            words = f"{words}, which moves the original's own scores by up to {self.routed_by:.2f}"
        if not self.num_by_law:
            return words
        law = f"{self.num_by_law} follow its distribution, {self.sigmas:+.1f} standard errors off"
        return f"{words}; {law}"


def prove(
    written: Sequence[Written], score: Score, score_as_computed: Score | None = None
) -> Proof:
    """Prove every token. Raises `UserError`, or `WrongTokenError` for a single one.

    `score_as_computed` scores a mixture in the type of the runs; it is asked where float32 is
    missed.
    """
    first: dict[tuple[tuple[int, ...], Sampling], Written] = {}
    gaps = list[float]()
    drawn = list[tuple[Tensor, Sequence[int]]]()
    repeated = list[tuple[Written, list[float]]]()
    # runs that begin alike must go on alike
    for run in (run for run in written if run.is_invariant and run.repeats_draws):
        other = first.setdefault((tuple(run.prompt_ids), run.sampling), run)
        for at, (token, two) in enumerate(zip(other.new_ids, run.new_ids, strict=False)):
            if token != two:
                raise WrongTokenError(f"new token {at} differs between two trees")
    for run in written:
        logits_TV = score(run.prompt_ids, run.new_ids) if run.new_ids else torch.empty(0, 1)
        if run.repeats_draws:
            run_gaps = gaps_of(logits_TV, len(run.prompt_ids), run.new_ids, run.sampling)
            repeated.append((run, run_gaps))
            gaps += run_gaps
        else:
            sampler = Sampler(run.sampling, logits_TV.shape[1])
            drawn.append((sampler.distribution(logits_TV), run.new_ids))
    num_routed = sum(gap > rounding(run.sampling) for run, run_gaps in repeated for gap in run_gaps)
    routed_by = 0.0
    if num_routed and score_as_computed is not None:
        runs = (run for run, _ in repeated if run.new_ids)
        routed_by = max(largest_step(run, score, score_as_computed) for run in runs)
    for run, run_gaps in repeated:
        draws_hold(run_gaps, run.sampling, routed_by)
    sigmas = surprise_sigmas(drawn)
    if abs(sigmas) > MOST_SIGMAS:
        complaint = f"tokens miss the target's distribution by {sigmas:.1f} standard errors"
        raise UserError(f"{complaint}: no speed is worth printing")
    num_near = sum(gap > 0 for gap in gaps)
    num_by_law = sum(len(ids) for _, ids in drawn)
    return Proof(len(gaps) - num_near, num_near, num_by_law, sigmas, num_routed, routed_by)


def draws_hold(gaps: Sequence[float], sampling: Sampling, routed_by: float = 0.0) -> None:
    """Raise `WrongTokenError` for a token that misses its draw by more than rounding, or routers.

    These move the logits of a mixture by up to `routed_by`.
    """
    limit = max(rounding(sampling), routed_by / (sampling.temperature or 1.0))
    for at, gap in enumerate(gaps):
        if not gap <= limit < math.inf:
            raise WrongTokenError(f"new token {at} is wrong, it misses the draw by {gap:.3f}")


def largest_step(run: Written, score_of: Score, other: Score) -> float:
    """Return by how much any score of two references differs; 0 where one is not finite."""
    one_TV, other_TV = (score(run.prompt_ids, run.new_ids).float() for score in (score_of, other))
    step = float((one_TV - other_TV).abs().max())
    return step if math.isfinite(step) else 0.0


def surprise_sigmas(drawn: Sequence[tuple[Tensor, Sequence[int]]]) -> float:
    """Return by how many standard errors the surprise of tokens misses its mean; distributions
    are (T, V). Infinite where probabilities are not numbers.
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


@contextmanager
def reference(
    target: Path, draft: Path | None, ram: int | str | None, dtype: str = "float32"
) -> Iterator[Score]:
    """Return a `Score` of the original, or of the small model that an inflated target was made
    from: resident where that fits, else streamed.
    """
    checkpoint = open_headers(target)
    num_bytes = sum(path.stat().st_size for path in checkpoint.shards)
    # stored in 16 bits it doubles, and some is left
    if draft is not None and 3 * num_bytes >= available_ram_bytes():
        options: Any = {"device": "cpu", "dtype": dtype, "profile": "none"}
        with load(target, draft, ram, "chain:511", **options) as decoder:

            def streamed(prompt_ids: Sequence[int], new_ids: Sequence[int]) -> Tensor:
                ids = [*prompt_ids, *new_ids]
                rows = []
                cache = decoder.begin(ids, Sampling()).caches.target
                for lo in range(len(prompt_ids), len(ids), decoder.plan.num_nodes):
                    end = min(lo - 1 + decoder.plan.num_nodes, len(ids) - 1)
                    path_N = torch.tensor(ids[lo - 1 : end])
                    tree = TokenTree(chain(len(path_N) - 1), path_N)
                    part = decoder.target.part_of(ids[:lo], cache, tree)
                    rows.append(decoder.target.score([part])[0].whole())
                    decoder.target.commit(range(len(path_N)), lo, cache)
                return torch.cat(rows)

            yield streamed
        return
    with closing(resident_model(checkpoint, dtype)) as model:

        def scores(prompt_ids: Sequence[int], new_ids: Sequence[int]) -> Tensor:
            return chain_logits(model, [*prompt_ids, *new_ids])[-len(new_ids) - 1 : -1]

        yield scores
