"""Chains as Leviathan et al. (2211.17192) count them: what gamma guesses yield and cost, and how
many it should be.

A guess x, drawn from the draft's q, is accepted with chance alpha = E[sum of min(p, q)] (Corollary
3.6). If all guesses were alike and independent, gamma of them would yield a capped geometric number
of tokens, and everything below follows. The paper's step costs gamma c + 1 runs of the target.
Where weights are streamed, a draft step may hide behind the link and a longer chain may compute
longer, so a `ChainPolicy` goes by the seconds that `step_time` predicts for every length; the
paper's c is the special case in which these rise in a straight line.

No torch, no clock. Invariant: a length is a function of what was settled before the step that it is
for: never of a token drawn in that step, since a ratio test is biased under such a choice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.planning.cost_model import Costs, Prediction, StepTime, Traffic, step_time
from offload.stats import RunningMean
from offload.trees.topology import chain

Floats = NDArray[np.float64]
# c where nothing was measured: "always less than 0.05" in the paper's experiments (section 3.3)
ASSUMED_COST = 0.05
# verified guesses of the run that count as much as all that was known before it
_PRIOR_GUESSES = 16


def tokens_per_run(alpha: float, gamma: int) -> float:
    """Tokens that one run of the target yields behind `gamma` guesses, its own included (Eq. 1)."""
    assert 0 <= alpha <= 1 and gamma >= 0, (
        f"alpha {alpha} is a chance and gamma {gamma} a number of guesses"
    )
    # (1 - alpha^(gamma+1)) / (1 - alpha), 1 included
    return math.fsum(alpha**length for length in range(gamma + 1))


def wall_clock_gain(alpha: float, gamma: int, cost: float) -> float:
    """How many times faster than without (Theorem 3.8); `cost` is c: a draft step over a run of the
    target.
    """
    return tokens_per_run(alpha, gamma) / (gamma * cost + 1)


def operations_growth(alpha: float, gamma: int, cost: float) -> float:
    """How many times more arithmetic (Theorem 3.11); `cost` is c': a draft's operations per token
    over the target's.
    """
    return (gamma * cost + gamma + 1) / tokens_per_run(alpha, gamma)


def best_length(alpha: float, max_length: int, relative_time: Callable[[int], float]) -> int:
    """The integer gamma in 0..`max_length` with the largest gain (section 3.5); the shortest where
    several have it.

    `relative_time` is what a step with so many guesses takes, in any unit; `gamma * c + 1` is the
    paper's.
    """
    return max(
        range(max_length + 1), key=lambda gamma: tokens_per_run(alpha, gamma) / relative_time(gamma)
    )


@dataclass(frozen=True, slots=True)
class ChainPolicy:
    """How long the next chain is, by what was known of a pair before and by what a run has seen of
    it since.
    """

    alpha: float  # before anything was seen
    steps: tuple[StepTime, ...]  # of chains of 0, 1, ... guesses

    @classmethod
    def of(cls, alpha: float, costs: Costs, traffic: Traffic, max_length: int) -> "ChainPolicy":
        """For chains of at most `max_length` guesses, for which memory is planned."""
        return cls(
            alpha, tuple(step_time(costs, traffic, chain(gamma)) for gamma in range(max_length + 1))
        )

    @classmethod
    def assumed(cls, alpha: float, max_length: int) -> "ChainPolicy":
        """Where nothing was measured: the paper's costs, in units of a run of the target."""
        steps = (StepTime(gamma * ASSUMED_COST, 1.0, 0.0, 0.0) for gamma in range(max_length + 1))
        return cls(alpha, tuple(steps))

    @property
    def max_length(self) -> int:
        """The longest chain there is a time for."""
        return len(self.steps) - 1

    def length(self, seen: RunningMean | None = None) -> int:
        """Guesses of the next chain. A run that has come to 0 sees nothing more, and stays there."""
        return best_length(
            self.belief(seen), self.max_length, lambda gamma: self.steps[gamma].total_s
        )

    def belief(self, seen: RunningMean | None = None) -> float:
        """Alpha by all that is known: a mean in which what was known before counts as a few
        guesses.
        """
        if seen is None:
            return self.alpha
        return (_PRIOR_GUESSES * self.alpha + seen.total) / (_PRIOR_GUESSES + seen.count)

    def predicted(self, gamma: int) -> Prediction:
        """What decoding with chains of this length is expected to cost, before anything was seen."""
        tokens = tokens_per_run(self.alpha, gamma)
        return Prediction(f"chain:{gamma}", chain(gamma), self.steps[gamma], (tokens, tokens))

    def as_dict(self) -> dict[str, object]:
        """What `--json` says of it."""
        return {"alpha": self.alpha, "max_length": self.max_length}
