"""How far a source of guesses is to be trusted: learned from what the target really emitted where it had a guess.

A guess from a match of so many tokens is right with a chance that the text itself teaches. A mixture emits x with
chance w s(x) + (1 - w) r(x), where s is the source's share of x and r what all others say; for each emitted token every
w of a grid pays its log-loss, old losses fade, and the one that has paid least is used next. Where nothing else says
anything this is how often the source was right. It shapes later trees, never what is emitted.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np

from offload.config import Sampling
from offload.sampling.sampler import Sampler

_GRID = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.93, 0.97, 0.99])
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)  # matches between two of these learn together
_DOUBT = 4.0  # sightings that the first opinion is worth
_KEPT = 0.99  # of all losses, from one sighting to the next: a text may turn from prose to code
UNSAID = 1e-3  # chance of a token of which nobody says anything


class Trust:
    """Of every source by the length of the match, for one kind of sampling."""

    def __init__(self) -> None:
        self._loss: defaultdict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros(_GRID.size))

    def of(self, source: str, length: int) -> float:
        """The weight of guesses behind a match of so many tokens, in (0, 1)."""
        step = _step(length)
        first = _LENGTHS[step] / (_LENGTHS[step] + 3)  # as good a first opinion as any: long matches are right
        opinion = -_DOUBT * (first * np.log(_GRID) + (1 - first) * np.log1p(-_GRID))
        return float(_GRID[np.argmin(self._loss[source, step] + opinion)])

    def learn(self, source: str, length: int, share: float, rest: float) -> None:
        """A token was emitted that the source gave this share, and all others together this chance."""
        key = source, _step(length)
        self._loss[key] = _KEPT * self._loss[key] - np.log(_GRID * share + (1 - _GRID) * max(rest, UNSAID))


class Trusts:
    """One for every kind of sampling: what is certain at temperature 0 is not at 1."""

    def __init__(self) -> None:
        self._known: defaultdict[Sampling, Trust] = defaultdict(Trust)

    def of(self, sampler: Sampler) -> Trust:
        """Of texts that are drawn like this."""
        return self._known[replace(sampler.sampling, seed=0)]


def _step(length: int) -> int:
    return max(step for step, least in enumerate(_LENGTHS) if least <= length)
