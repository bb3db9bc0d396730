"""How far a source of guesses is to be trusted: learned from what the target really emitted where it had a guess.

A guess from a match of so many tokens is right with a chance that the text itself teaches. A mixture emits x with
chance w s(x) + (1 - w) r(x), where s is the source's share of x and r what all others say; for each emitted token every
w of a grid pays its log-loss, old losses fade, and the one that has paid least is used next. Where nothing else says
anything this is how often the source was right. Beside a draft it depends on how sure that is, too: who is certain
need not ask. It shapes later trees, never what is emitted.
"""

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from offload.config import Sampling
from offload.drafting.by_kind import ByKind
from offload.sampling.sampler import Sampler

_GRID = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.93, 0.97, 0.99])
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)  # matches between two of these learn together
_SURE = (0.0, 0.5, 0.8, 0.95)  # likeliest tokens of a draft between two of these learn together
_FIRST = {"lookup": 1.0}
_UNSURE = (0.6, 0.35, 0.12, 0.03)  # how often a draft that is so sure is taken to be wrong at first
NO_DRAFT = -1
_DOUBT = 4.0  # sightings that the first opinion is worth
_KEPT = 0.99  # of all losses, from one sighting to the next: a text may turn from prose to code
UNSAID = 1e-3  # chance of a token of which nobody says anything


class Trust:
    """Of every source by the length of the match, for one kind of sampling."""

    def __init__(self) -> None:
        self._loss: dict[tuple[str, int, int], np.ndarray] = {}
        self._weight: dict[tuple[str, int, int], float] = {}

    def __repr__(self) -> str:
        return f"Trust({ {key: round(self.of(*key), 3) for key in sorted(self._loss)} })"

    def of(self, source: str, length: int, sureness: int = NO_DRAFT) -> float:
        """The weight of guesses behind a match of so many tokens, in (0, 1), beside a draft of that `sureness`."""
        key = source, _step(length), sureness
        if key not in self._weight:
            self._weight[key] = float(_GRID[np.argmin(self._loss.get(key, 0) + _first_opinion(*key))])
        return self._weight[key]

    def learn(self, source: str, length: int, share: float, rest: float, sureness: int = NO_DRAFT) -> None:
        """A token was emitted that the source gave this share, and all others together this chance."""
        key = source, _step(length), sureness
        loss = -np.log(_GRID * share + (1 - _GRID) * max(rest, UNSAID))
        self._loss[key] = _KEPT * self._loss.get(key, 0) + loss
        self._weight.pop(key, None)


class Trusts:
    """One for every kind of sampling: what is certain at temperature 0 is not at 1."""

    def __init__(self) -> None:
        self._known = ByKind[Sampling, Trust](Trust)

    def of(self, sampler: Sampler) -> Trust:
        """Of texts that are drawn like this."""
        return self._known[replace(sampler.sampling, seed=0)]


def sureness(chance: float) -> int:
    """Of a draft that gives its likeliest token this chance."""
    return bisect_right(_SURE, chance) - 1


def _first_opinion(source: str, step: int, sureness: int) -> np.ndarray:
    """What every weight would have paid for sightings that nobody had: long matches are right, the text's own most."""
    first = _LENGTHS[step] / (_LENGTHS[step] + 3) * _FIRST.get(source, 0.5)
    first *= 1.0 if sureness == NO_DRAFT else _UNSURE[sureness]
    return -_DOUBT * (first * np.log(_GRID) + (1 - first) * np.log1p(-_GRID))


def _step(length: int) -> int:
    return bisect_right(_LENGTHS, length) - 1
