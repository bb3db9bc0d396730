"""What sources that are no models say about the next tokens: several opinions, mixed into one
chance for every path.

A source tells for a context what followed on it elsewhere: in the text itself, in a datastore, in
counts of pairs. Each such opinion (a `GuessModel`) knows how many tokens it rests on; the one that
rests on most is asked first, and what it does not claim is left to the next, for other tokens. That
is prediction by partial matching with exclusion (Cleary and Witten, 1984), with a learned trust
(`SourceWeights`) in place of its escapes.

Invariant: the chances of a node's children sum to one at most, so no path is likelier than what it
goes on from. All of
it is settled by the context, before anything is drawn: its nodes are point masses, exact with every
rule.

How far a source of guesses is to be trusted: learned from what the target really emitted where it
had a guess.

A guess from a match of so many tokens is right with a chance that the text itself teaches. A
mixture emits x with chance w s(x) + (1 - w) r(x), where s is the source's share of x and r what all
others say; for each emitted token every w of a grid pays its log-loss, old losses fade, and the one
that has paid least is used next. Where nothing else says anything this is how often the source was
right. Beside a draft it depends on how sure that is, too: who is certain need not ask. It shapes
later trees, never what is emitted.

Sources of guesses that are no models: what all of them are asked, and all of them together.

Trees without a draft model: what sources guess, as much of it as pays.

A guess costs nothing beside a sweep, but each of its rows is computed. The tree of a step is cut
where one more node
would cost more than it is expected to bring: the n that maximises (1 + sum of the n best chances) /
seconds of a sweep over n rows, Sequoia's optimiser (2402.12374, Eq. 1) with the chances of this
very step. Where nothing is found that is the root alone. Any shape is exact with any rule: the
nodes are point masses that the context settles.

Copies from the text itself: what followed the last time that it said the same.

Summaries, edits, code and every chat repeat their context. The positions whose last tokens are
those of the text's end are found by comparing backwards, longest matches first; where a match runs
into the end, its continuation repeats, as loops do. Invariant: nothing is kept but the tokens, so
that a text may be cut anywhere.

E positions behind matches, M tokens of a continuation.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from offload.datastore.index import Trie, heaviest
from offload.drafting.base import ByKind, Drafted, DraftState, DraftText
from offload.sampling.sampler import Sampler
from offload.trees.spec import MatchLength
from offload.trees.token_tree import TokenTree, children_of
from offload.trees.topology import DynamicShape, Shape, Topology, in_level_order, level_order
from offload.units import Sampling

_GRID = np.array(
    [0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.93, 0.97, 0.99]
)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)  # matches between two of these learn together
_SURE = (0.0, 0.5, 0.8, 0.95)  # likeliest tokens of a draft between two of these learn together
_FIRST = {"lookup": 1.0}
_UNSURE = (0.6, 0.35, 0.12, 0.03)  # how often a draft that is so sure is taken to be wrong at first
NO_DRAFT = -1
_DOUBT = 4.0  # sightings that the first opinion is worth
_KEPT = 0.99  # of all losses, from one sighting to the next: a text may turn from prose to code
UNSAID = 1e-3  # chance of a token of which nobody says anything


class SourceWeights:
    """Of every source by the length of the match, for one kind of sampling."""

    def __init__(self) -> None:
        self._loss: dict[tuple[str, int, int], np.ndarray] = {}
        self._weight: dict[tuple[str, int, int], float] = {}

    def __repr__(self) -> str:
        return f"Trust({ {key: round(self.of(*key), 3) for key in sorted(self._loss)} })"

    def of(self, source: str, length: int, sureness: int = NO_DRAFT) -> float:
        """The weight of guesses behind a match of so many tokens, in (0, 1), beside a draft of that
        `sureness`.
        """
        key = source, _step(length), sureness
        if key not in self._weight:
            self._weight[key] = float(
                _GRID[np.argmin(self._loss.get(key, 0) + _first_opinion(*key))]
            )
        return self._weight[key]

    def learn(
        self, source: str, length: int, share: float, rest: float, sureness: int = NO_DRAFT
    ) -> None:
        """A token was emitted that the source gave this share, and all others together this chance."""
        key = source, _step(length), sureness
        loss = -np.log(_GRID * share + (1 - _GRID) * max(rest, UNSAID))
        self._loss[key] = _KEPT * self._loss.get(key, 0) + loss
        self._weight.pop(key, None)


class SourceWeightsByKind:
    """One for every kind of sampling: what is certain at temperature 0 is not at 1."""

    def __init__(self) -> None:
        self._known = ByKind[Sampling, SourceWeights](SourceWeights)

    def of(self, sampler: Sampler) -> SourceWeights:
        """Of texts that are drawn like this."""
        return self._known[replace(sampler.sampling, seed=0)]


def sureness(chance: float) -> int:
    """Of a draft that gives its likeliest token this chance."""
    return bisect_right(_SURE, chance) - 1


def _first_opinion(source: str, step: int, sureness: int) -> np.ndarray:
    """What every weight would have paid for sightings that nobody had: long matches are right, the
    text's own most.
    """
    first = _LENGTHS[step] / (_LENGTHS[step] + 3) * _FIRST.get(source, 0.5)
    first *= 1.0 if sureness == NO_DRAFT else _UNSURE[sureness]
    return -_DOUBT * (first * np.log(_GRID) + (1 - first) * np.log1p(-_GRID))


def _step(length: int) -> int:
    return bisect_right(_LENGTHS, length) - 1


_NOTHING: Mapping[int, float] = {}


class GuessModel(Protocol):
    """One opinion on what follows on the context, and then on every path from there."""

    source: str
    length: int  # tokens of the context that it rests on

    def length_at(self, depth: int) -> int:
        """Tokens that it rests on where a path is so deep."""

    def start(self) -> Any:
        """Where paths begin."""

    def shares(self, place: Any) -> Mapping[int, float]:
        """How often each token followed there, as a share of all."""

    def follow(self, place: Any, token: int) -> Any:
        """The place behind that token; None where nothing is known of it."""


class TrieGuesses:
    """Continuations that were seen, in a trie; a place is one of its nodes."""

    def __init__(self, source: str, length: int, trie: Trie) -> None:
        self.source = source
        self.length = length
        counts = [trie.num_continuations, *trie.count_R.tolist()]
        self._child: list[dict[int, int]] = [{} for _ in counts]
        self._shares: list[dict[int, float]] = [{} for _ in counts]
        for node, (parent, token) in enumerate(
            zip(trie.parent_R.tolist(), trie.token_R.tolist(), strict=True), 1
        ):
            self._child[parent + 1][token] = node
            self._shares[parent + 1][token] = counts[node] / counts[parent + 1]

    def length_at(self, depth: int) -> int:
        """A match grows along its continuation."""
        return self.length + depth

    def start(self) -> int:
        """The node above all continuations."""
        return 0

    def shares(self, place: int) -> Mapping[int, float]:
        """Of the children of a node."""
        return self._shares[place]

    def follow(self, place: int, token: int) -> int | None:
        """A child."""
        return self._child[place].get(token)


class TrieCursor(NamedTuple):
    """Where a path has led to."""

    depth: int
    at: tuple[Any, ...]  # of every tier; None where the path has left it


class Guess(NamedTuple):
    """A node below the root."""

    parent: int  # index among the guesses, -1 below the root
    token: int
    depth: int
    chance: float  # of the whole path
    place: TrieCursor


class Judged(NamedTuple):
    """What a draft said of a token that was emitted."""

    chance: float
    sureness: int  # of the likeliest token there


_UNJUDGED = Judged(0.0, NO_DRAFT)


class Guesses:
    """All opinions on one context."""

    def __init__(self, tiers: Iterable[GuessModel], trust: SourceWeights) -> None:
        self._tiers = sorted(tiers, key=lambda tier: -tier.length)
        self._trust = trust
        self.root = TrieCursor(0, tuple(tier.start() for tier in self._tiers))

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def children(
        self, place: TrieCursor, sureness: int = NO_DRAFT
    ) -> tuple[dict[int, float], float]:
        """The chance of every token that is guessed there, and what is left for others: for a draft
        so sure of it.
        """
        chances: dict[int, float] = {}
        rest = 1.0
        for tier, shares in self._told(place):
            weight = rest * self._trust.of(tier.source, tier.length_at(place.depth), sureness)
            for token, share in shares.items():
                chances[token] = chances.get(token, 0.0) + weight * share
            rest -= weight
        return chances, rest

    def follow(self, place: TrieCursor, token: int) -> TrieCursor:
        """The place behind a token."""
        pairs = zip(self._tiers, place.at, strict=True)
        return TrieCursor(
            place.depth + 1,
            tuple(None if at is None else tier.follow(at, token) for tier, at in pairs),
        )

    def best(self, count: int, depth: int, least: float = 0.0) -> list[Guess]:
        """The likeliest paths, at most so many nodes and so deep, each likelier than `least`;
        parents come first.
        """
        found: list[Guess] = []
        # no two agree in the number that they were found by
        heap: list[tuple[float, int, int, int, int, TrieCursor]] = []
        num_seen = 0
        above = Guess(-1, -1, 0, 1.0, self.root)
        while len(found) < count:
            for token, chance in (
                self.children(above.place)[0].items() if above.depth < depth else ()
            ):
                if chance * above.chance > least:
                    num_seen += 1
                    key = (
                        -chance * above.chance,
                        above.depth + 1,
                        num_seen,
                        len(found) - 1,
                        token,
                        above.place,
                    )
                    heapq.heappush(heap, key)
            if not heap:
                break
            negative, at_depth, _, parent, token, place = heapq.heappop(heap)
            above = Guess(parent, token, at_depth, -negative, self.follow(place, token))
            found.append(above)
        return found

    def learn(self, tokens: Sequence[int], drafted: Sequence[Judged | None]) -> None:
        """These were emitted one after the other; `drafted` is what a draft said of them, as far as
        there was one.
        """
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
        self,
        told: Sequence[tuple[GuessModel, Mapping[int, float]]],
        depth: int,
        token: int,
        judged: Judged,
    ) -> None:
        rest, sureness = judged
        for tier, shares in reversed(told):
            length = tier.length_at(depth)
            share = shares.get(token, 0.0)
            self._trust.learn(tier.source, length, share, rest, sureness)
            weight = self._trust.of(tier.source, length, sureness)
            rest = weight * share + (1 - weight) * rest

    def _told(self, place: TrieCursor) -> Iterable[tuple[GuessModel, Mapping[int, float]]]:
        """What each tier says beyond those before it: a shorter match that agrees with a longer one
        adds nothing.
        """
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


NO_GUESSES = Guesses((), SourceWeights())


class GuessRequest(NamedTuple):
    """How much is wanted."""

    num_nodes: int  # at most, the root left out
    depth: int  # tokens of a continuation


class Source(Protocol):
    """Where guesses come from; what it keeps of one text is a state."""

    name: str

    def new_state(self) -> DraftState:
        """Of a text of which nothing is known yet."""

    def tiers(self, tokens: Sequence[int], asked: GuessRequest, state: Any) -> Iterable[GuessModel]:
        """What it says of the tokens behind these."""


class SourcesState:
    """What every source keeps of one text, and what they said last."""

    def __init__(self, states: Sequence[DraftState]) -> None:
        self.states = states
        self.said = NO_GUESSES

    def copy_from(self, other: "SourcesState", num_tokens: int) -> None:
        """Texts are read anew where they are asked about."""
        self.clear()

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text but for its first tokens, and what was guessed behind them: every step
        begins so.
        """
        self.said = NO_GUESSES
        for state in self.states:
            state.clear(num_kept)


class GuessSources:
    """Several sources, asked together."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def __bool__(self) -> bool:
        return bool(self._sources)

    def __str__(self) -> str:
        return ", ".join(source.name for source in self._sources)

    def new_state(self) -> SourcesState:
        """That of a new text."""
        return SourcesState([source.new_state() for source in self._sources])

    def ask(
        self, tokens: Sequence[int], asked: GuessRequest, trust: SourceWeights, state: SourcesState
    ) -> Guesses:
        """All that they say of what follows `tokens`; kept in the state, to be learned from."""
        pairs = zip(self._sources, state.states, strict=True)
        tiers = [tier for source, own in pairs for tier in source.tiers(tokens, asked, own)]
        state.said = Guesses(tiers, trust)
        return state.said


NO_SOURCES = GuessSources(())


PassSeconds = Callable[[int], float]  # of a sweep over so many rows


class LookupDrafter:
    """Grows trees of guesses alone."""

    def __init__(self, sources: GuessSources, pass_s: PassSeconds) -> None:
        self._sources, self._pass_s, self._trusts = sources, pass_s, SourceWeightsByKind()

    def new_state(self) -> SourcesState:
        """That of the sources."""
        return self._sources.new_state()

    def share_states(self, states: Sequence[SourcesState]) -> None:
        """They have nothing in common."""

    def grow_all(self, texts: Sequence[DraftText]) -> list[Drafted]:
        """Each by itself."""
        return [self.grow(*text) for text in texts]

    def grow(
        self, shape: Shape, tokens: Sequence[int], sampler: Sampler, state: SourcesState
    ) -> Drafted:
        """A tree below `tokens[-1]`: within bounds as large as pays, or as much of a shape as
        guesses fill.
        """
        asked = GuessRequest(shape.num_nodes - 1, shape.depth)
        if not asked.num_nodes:
            return Drafted(as_tree([], tokens[-1]), {}, {})
        guesses = self._sources.ask(tokens, asked, self._trusts.of(sampler), state)
        if isinstance(shape, DynamicShape):
            return Drafted(as_tree(self._worth(guesses.best(*asked)), tokens[-1]), {}, {})
        return Drafted(as_tree(fill_with(guesses, shape), tokens[-1]), {}, {})

    def commit(
        self,
        drafted: Drafted,
        nodes: Sequence[int],
        tokens: Sequence[int],
        sampler: Sampler,
        state: SourcesState,
    ) -> None:
        """Learn how good the guesses were."""
        state.said.learn(tokens, [None] * len(tokens))

    def _worth(self, found: Sequence[Guess]) -> Sequence[Guess]:
        yields = 1 + np.cumsum([0.0, *(guess.chance for guess in found)])
        rates = yields / [self._pass_s(num_rows) for num_rows in range(1, len(found) + 2)]
        return found[: int(np.argmax(rates))]


def fill_with(guesses: Guesses, topology: Topology) -> list[Guess]:
    """The nodes of a shape for which there are guesses: the child of rank k is the k-th likeliest."""
    found: list[Guess] = []
    waiting = [(0, -1, Guess(-1, -1, 0, 1.0, guesses.root))]
    for node, index, above in waiting:  # grows while it is read: level by level
        chances = guesses.children(above.place)[0]
        ranked = sorted(chances.items(), key=lambda one: -one[1])
        for child, (token, chance) in zip(children_of(topology)[node], ranked, strict=False):
            guess = Guess(
                index,
                token,
                above.depth + 1,
                above.chance * chance,
                guesses.follow(above.place, token),
            )
            waiting.append((child, len(found), guess))
            found.append(guess)
    return found


def as_tree(found: Sequence[Guess], root_token: int) -> TokenTree:
    """The tree of guesses, of which parents come first, as point masses."""
    parents = [-1, *(guess.parent + 1 for guess in found)]
    tokens = [root_token, *(guess.token for guess in found)]
    return TokenTree(
        in_level_order(parents), torch.tensor([tokens[one] for one in level_order(parents)])
    )


_MOST_ENDS = 64  # matches of one length that are looked at: the latest


class GrowingText:
    """The tokens of one text in an array that grows."""

    def __init__(self) -> None:
        self._token_T: NDArray[np.int64] = np.zeros(1024, dtype=np.int64)
        self._length = 0

    def copy_from(self, other: "GrowingText", num_tokens: int) -> None:
        """The text is read anew when it is asked about."""
        self.clear()

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text but for its first tokens."""
        self._length = min(self._length, num_kept)

    def read(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """All of them; those that are new are added."""
        if len(tokens) > self._token_T.size:
            self._token_T = np.concatenate([self._token_T, np.zeros(len(tokens), dtype=np.int64)])
        self._token_T[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        return self._token_T[: self._length]


class Copying:
    """Continuations of what the text has said before."""

    name = "lookup"

    def __init__(self, match: MatchLength) -> None:
        self._match = match

    def new_state(self) -> GrowingText:
        """No text yet."""
        return GrowingText()

    def tiers(
        self, tokens: Sequence[int], asked: GuessRequest, state: GrowingText
    ) -> Iterator[TrieGuesses]:
        """By the length of the match: of the longest, and of half as many tokens again and again."""
        token_T = state.read(tokens)
        for length, end_E in _matches(token_T, self._match):
            token_EM = _continuations(token_T, end_E[-_MOST_ENDS:], asked.depth)
            yield TrieGuesses(self.name, length, heaviest(token_EM, asked.num_nodes))


def _matches(token_T: NDArray[np.int64], match: MatchLength) -> list[tuple[int, NDArray[np.int64]]]:
    """Positions behind matches, rising, by their length: the longest, then each of at most half as
    many tokens.
    """
    end_E = np.flatnonzero(token_T[:-1] == token_T[-1]) + 1
    found = []
    for length in range(1, match.most + 1):
        if length >= match.least and end_E.size:
            found.append((length, end_E))
        end_E = end_E[end_E > length]
        end_E = (
            end_E[token_T[end_E - length - 1] == token_T[-length - 1]]
            if len(token_T) > length
            else end_E[:0]
        )
    tiers = []
    bound = match.most
    for length, positions_E in reversed(found):
        if length <= bound:
            tiers.append((length, positions_E))
            bound = length // 2
    return tiers


def _continuations(
    token_T: NDArray[np.int64], end_E: NDArray[np.int64], depth: int
) -> NDArray[np.int64]:
    """(E, M) tokens from each position on; the end of the text continues as it did before."""
    period_E1 = len(token_T) - end_E[:, None]
    return token_T[end_E[:, None] + np.arange(depth) % period_E1]
