"""The yield, cost and best length of draft chains, as Leviathan et al. (2211.17192) count them.

A guess x, drawn from the draft's q, is accepted with chance alpha = E[sum of min(p, q)] (Corollary
3.6). If all guesses were alike and independent, gamma of them would yield a capped geometric number
of tokens, and everything below follows. The paper's step costs gamma c + 1 passes of the target.
Where weights are streamed, a draft step may hide behind the link and a longer chain may compute
longer, so a `ChainPolicy` uses the seconds that `step_time` predicts for every length; the paper's
c is the special case in which these rise in a straight line.

No torch, no clock. Invariant: a length depends only on what was settled before the step that it is
for, never on a token drawn in that step, since a ratio test is biased under such a choice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from offload.planning.cost_model import Costs, Prediction, StepTime, Traffic, step_time
from offload.stats import RunningMean
from offload.trees.topology import chain

# c where nothing was measured: "always less than 0.05" in the paper's experiments (section 3.3)
ASSUMED_COST = 0.05
_PRIOR_GUESSES = 16  # observed guesses that count as much as the prior alpha


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """Return the tokens of a pass of the target after `gamma` guesses, its own included (Eq. 1)."""
    assert 0 <= alpha <= 1 and gamma >= 0, (
        f"alpha {alpha} is a chance and gamma {gamma} a number of guesses"
    )
    # (1 - alpha^(gamma+1)) / (1 - alpha), 1 included
    return math.fsum(alpha**length for length in range(gamma + 1))


def best_length(alpha: float, max_length: int, relative_time: Callable[[int], float]) -> int:
    """Return the gamma in 0..`max_length` with the largest gain (section 3.5), the least of equals.

    `relative_time` is in any unit; `gamma * c + 1` is the paper's.
    """
    return max(
        range(max_length + 1),
        key=lambda gamma: tokens_per_pass(alpha, gamma) / relative_time(gamma),
    )


@dataclass(frozen=True, slots=True)
class ChainPolicy:
    """The length of the next chain, from what was known of a pair and what a run has observed."""

    alpha: float  # the prior
    steps: tuple[StepTime, ...]  # for chains of 0, 1, ... guesses

    @classmethod
    def from_costs(
        cls, alpha: float, costs: Costs, traffic: Traffic, max_length: int
    ) -> "ChainPolicy":
        """Return the policy for chains of up to `max_length` guesses, as memory is planned."""
        return cls(
            alpha, tuple(step_time(costs, traffic, chain(gamma)) for gamma in range(max_length + 1))
        )

    @classmethod
    def assumed(cls, alpha: float, max_length: int) -> "ChainPolicy":
        """Return the policy with the paper's costs, in units of a pass of the target."""
        steps = (StepTime(gamma * ASSUMED_COST, 1.0, 0.0, 0.0) for gamma in range(max_length + 1))
        return cls(alpha, tuple(steps))

    @property
    def max_length(self) -> int:
        return len(self.steps) - 1

    def length(self, seen: RunningMean | None = None) -> int:
        """Return the guesses of the next chain; a run that has come to 0 observes no more."""
        return best_length(
            self.belief(seen), self.max_length, lambda gamma: self.steps[gamma].total_s
        )

    def belief(self, seen: RunningMean | None = None) -> float:
        """Return alpha: observed guesses, with the prior counted as a few more."""
        if seen is None:
            return self.alpha
        return (_PRIOR_GUESSES * self.alpha + seen.total) / (_PRIOR_GUESSES + seen.count)

    def predicted(self, gamma: int) -> Prediction:
        """Return the expected cost of decoding with chains of this length at first."""
        tokens = tokens_per_pass(self.alpha, gamma)
        return Prediction(f"chain:{gamma}", chain(gamma), self.steps[gamma], (tokens, tokens))

    def as_dict(self) -> dict[str, object]:
        """Return the figures for `--json`."""
        return {"alpha": self.alpha, "max_length": self.max_length}
