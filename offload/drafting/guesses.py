"""What sources that are no models say about the next tokens: several opinions, mixed into one chance for every path.

A source tells for a context what followed on it elsewhere: in the text itself, in a datastore, in counts of pairs. Each
such opinion (a `Tier`) knows how many tokens it rests on; the one that rests on most is asked first, and what it does
not claim is left to the next, for other tokens. That is prediction by partial matching with exclusion (Cleary and
Witten, 1984), with a learned trust (`Trust`) in place of its escapes.

Invariant: the chances of a node's children sum to one at most, so no path is likelier than what it goes on from. All of
it is settled by the context, before anything is drawn: its nodes are point masses, exact with every rule.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from offload.datastore.trie import Trie
from offload.drafting.trust import NO_DRAFT, Trust

_NOTHING: Mapping[int, float] = {}


class Tier(Protocol):
    """One opinion on what follows on the context, and then on every path from there."""

    source: str
    length: int  # tokens of the context that it rests on

    def start(self) -> Any:
        """Where paths begin."""

    def shares(self, place: Any) -> Mapping[int, float]:
        """How often each token followed there, as a share of all."""

    def follow(self, place: Any, token: int) -> Any:
        """The place behind that token; None where nothing is known of it."""


class TrieTier:
    """Continuations that were seen, in a trie; a place is one of its nodes."""

    def __init__(self, source: str, length: int, trie: Trie) -> None:
        self.source, self.length = source, length
        counts = [trie.num_continuations, *trie.count_R.tolist()]
        self._child: list[dict[int, int]] = [{} for _ in counts]
        self._shares: list[dict[int, float]] = [{} for _ in counts]
        for node, (parent, token) in enumerate(zip(trie.parent_R.tolist(), trie.token_R.tolist(), strict=True), 1):
            self._child[parent + 1][token] = node
            self._shares[parent + 1][token] = counts[node] / counts[parent + 1]

    def start(self) -> int:
        """The node above all continuations."""
        return 0

    def shares(self, place: int) -> Mapping[int, float]:
        """Of the children of a node."""
        return self._shares[place]

    def follow(self, place: int, token: int) -> int | None:
        """A child."""
        return self._child[place].get(token)


class Place(NamedTuple):
    """Where a path has led to."""

    depth: int
    at: tuple[Any, ...]  # of every tier; None where the path has left it


class Guess(NamedTuple):
    """A node below the root."""

    parent: int  # index among the guesses, -1 below the root
    token: int
    depth: int
    chance: float  # of the whole path
    place: Place


class Judged(NamedTuple):
    """What a draft said of a token that was emitted."""

    chance: float
    sureness: int  # of the likeliest token there


_UNJUDGED = Judged(0.0, NO_DRAFT)


class Guesses:
    """All opinions on one context."""

    def __init__(self, tiers: Iterable[Tier], trust: Trust) -> None:
        self._tiers, self._trust = sorted(tiers, key=lambda tier: -tier.length), trust
        self.root = Place(0, tuple(tier.start() for tier in self._tiers))

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def children(self, place: Place, sureness: int = NO_DRAFT) -> tuple[dict[int, float], float]:
        """The chance of every token that is guessed there, and what is left for others: for a draft so sure of it."""
        chances: dict[int, float] = {}
        rest = 1.0
        for tier, shares in self._told(place):
            weight = rest * self._trust.of(tier.source, tier.length + place.depth, sureness)
            for token, share in shares.items():
                chances[token] = chances.get(token, 0.0) + weight * share
            rest -= weight
        return chances, rest

    def follow(self, place: Place, token: int) -> Place:
        """The place behind a token."""
        pairs = zip(self._tiers, place.at, strict=True)
        return Place(place.depth + 1, tuple(None if at is None else tier.follow(at, token) for tier, at in pairs))

    def best(self, count: int, depth: int, least: float = 0.0) -> list[Guess]:
        """The likeliest paths, at most so many nodes and so deep, each likelier than `least`; parents come first."""
        found: list[Guess] = []
        heap: list[tuple[float, int, int, int, int, Place]] = []  # no two agree in the number that they were found by
        num_seen, above = 0, Guess(-1, -1, 0, 1.0, self.root)
        while len(found) < count:
            for token, chance in self.children(above.place)[0].items() if above.depth < depth else ():
                if chance * above.chance > least:
                    num_seen += 1
                    key = (-chance * above.chance, above.depth + 1, num_seen, len(found) - 1, token, above.place)
                    heapq.heappush(heap, key)
            if not heap:
                break
            negative, at_depth, _, parent, token, place = heapq.heappop(heap)
            above = Guess(parent, token, at_depth, -negative, self.follow(place, token))
            found.append(above)
        return found

    def learn(self, tokens: Sequence[int], drafted: Sequence[Judged | None]) -> None:
        """These were emitted one after the other; `drafted` is what a draft said of them, as far as there was one."""
        place = self.root
        for token, judged in zip(tokens, drafted, strict=True):
            told = list(self._told(place))
            if not told:
                return
            self._learn_one(told, place.depth, token, _UNJUDGED)
            if judged is not None:
                self._learn_one(told, place.depth, token, judged)
            place = self.follow(place, token)

    def _learn_one(
        self, told: Sequence[tuple[Tier, Mapping[int, float]]], depth: int, token: int, judged: Judged
    ) -> None:
        rest, sureness = judged
        for tier, shares in reversed(told):
            length, share = tier.length + depth, shares.get(token, 0.0)
            self._trust.learn(tier.source, length, share, rest, sureness)
            weight = self._trust.of(tier.source, length, sureness)
            rest = weight * share + (1 - weight) * rest

    def _told(self, place: Place) -> Iterable[tuple[Tier, Mapping[int, float]]]:
        """What each tier says beyond those before it: a shorter match that agrees with a longer one adds nothing."""
        said: set[int] = set()
        for tier, at in zip(self._tiers, place.at, strict=True):
            shares = _NOTHING if at is None else tier.shares(at)
            if said and not said.isdisjoint(shares):
                shares = {token: share for token, share in shares.items() if token not in said}
                total = sum(shares.values())
                shares = {token: share / total for token, share in shares.items()}
            if shares:
                said |= shares.keys()
                yield tier, shares


NO_GUESSES = Guesses((), Trust())
