"""From which chance on a guess is worth a row of a run, given the recent time of a token."""

from offload.distributed.orders import Least
from offload.rank_roles import FixedCutoff

_KEPT = 0.9  # weight of the mean so far, from one step to the next
# times the mean: anything longer is not a token's time, but that of a process that was stopped
_MOST_RISE = 10.0


class CutOff:
    """The least chance of guesses: by price, or by a rule.

    By price, f must reach (seconds of one more row at the slowest stage) / (seconds of a token). By
    PipeInfer's rule (2407.11798, section IV) guesses below unproved guesses must be surer:

    cut = start + recovery x (batches since a run was accepted) - decay x (failed attempts since)
    """

    def __init__(self, row_s: float, rule: FixedCutoff | None = None) -> None:
        self._row_s = row_s
        self._rule = rule
        self.reset()

    @property
    def _cut(self) -> float:
        rule = self._rule or FixedCutoff(0.0, 0.0, 0.0)
        return rule.start + self._num_batches * rule.recovery - self._num_fails * rule.decay

    def least(self, token_s: float) -> Least:
        """Return the least chances for now; a `token_s` of 0 is unknown."""
        if self._rule is not None:
            return Least(0.0, max(0.0, self._cut))
        return Least(min(1.0, self._row_s / token_s) if token_s > 0 else 0.0, 0.0)

    def speculated(self) -> None:
        """Note that guesses have come: the next batch needs higher chances."""
        self._num_batches += 1

    def reset(self) -> None:
        """Return to the start: a text begins, or a run was accepted, in part at least."""
        self._num_batches = 0
        self._num_fails = 0

    def failed(self) -> bool:
        """Note that no guess was likely enough; return True if that lowers the bound."""
        can_fall = self._rule is not None and self._rule.decay > 0 and self._cut > 0
        self._num_fails += can_fall
        return can_fall


class TokenTime:
    """Recent seconds of a token; `token_s` is 0 while unknown."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self._last_s: float | None = None

    def begin(self) -> None:
        """Begin a text; since its first tokens take as long as the prompt, the old mean holds."""
        self._last_s = None

    def emitted(self, num: int, now_s: float) -> None:
        """Note that `num` tokens have come at once."""
        if self._last_s is not None:
            token_s = (now_s - self._last_s) / num
            counted_s = min(token_s, _MOST_RISE * self.token_s)
            self.token_s = (
                _KEPT * self.token_s + (1 - _KEPT) * counted_s if self.token_s else token_s
            )
        self._last_s = now_s
