"""From which chance on a guess is worth a row of a run: the paper's rule, and a price.

f is the chance that the target walks through a node, so a row is worth f tokens; it costs the slowest stage some time.
f falls along a path by itself, which is what the paper's recovery factor is for. Neither rule changes what is emitted.
"""

from typing import NamedTuple, Protocol

from offload.planning.pipeline import PaperCut


class Least(NamedTuple):
    """Bounds of guesses that are asked for."""

    f: float  # of the whole path below the root
    p: float  # of the token alone, among its siblings


class CutOff(Protocol):
    """A rule, which is told what has come of earlier guesses."""

    def least(self, token_s: float) -> Least:
        """What a guess needs now, where a token takes so many seconds; 0 is not known yet."""

    def speculated(self) -> None:
        """Guesses have come."""

    def accepted(self) -> None:
        """A run was accepted, in part at least."""

    def failed(self) -> bool:
        """Nothing was likely enough: whether the rule asks for less now, so that another attempt makes sense."""


class Price:
    """A row has to be worth its time: f >= (seconds of one more row at the slowest stage) / (seconds of a token)."""

    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    def least(self, token_s: float) -> Least:
        """0 while nothing is known."""
        return Least(min(1.0, self._row_s / token_s) if token_s > 0 else 0.0, 0.0)

    def speculated(self) -> None:
        """Nothing to note."""

    def accepted(self) -> None:
        """Nothing to note."""

    def failed(self) -> bool:
        """The price stays."""
        return False


class RisingCut:
    """PipeInfer's (2407.11798, section IV): what is guessed on top of unproved guesses has to be surer.

    cut = start + recovery x (batches since a run was accepted) - decay x (attempts that found nothing since then)
    """

    def __init__(self, rule: PaperCut) -> None:
        self._rule, self._num_batches, self._num_fails = rule, 0, 0

    @property
    def _cut(self) -> float:
        return self._rule.start + self._num_batches * self._rule.recovery - self._num_fails * self._rule.decay

    def least(self, token_s: float) -> Least:
        """By the token's own chance; time does not matter."""
        return Least(0.0, max(0.0, self._cut))

    def speculated(self) -> None:
        """The next batch has to be surer."""
        self._num_batches += 1

    def accepted(self) -> None:
        """Back to the start."""
        self._num_batches = self._num_fails = 0

    def failed(self) -> bool:
        """The next attempt may be less sure, down to anything at all."""
        can_fall = self._rule.decay > 0 and self._cut > 0
        self._num_fails += can_fall
        return can_fall
