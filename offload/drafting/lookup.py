"""Trees without a draft model: guesses of what follows, from the text itself or from other sources.

A source says for a context what followed on it elsewhere: in the text itself, in a datastore, in
n-gram counts. Each such opinion (a `SourceOpinion`) knows how many tokens of context it rests on. The
one that rests on most is asked first; what it does not claim is left to the next, for other tokens.
That is prediction by partial matching with exclusion (Cleary and Witten, 1984), with learned
weights (`SourceWeights`) in place of its escapes.

A guess costs nothing beside a weight pass, but each of its rows is computed. So the tree of a step
ends where one more node would cost more than it is expected to bring: at the n that maximises (1 +
sum of the n best chances) / seconds of a pass over n rows, Sequoia's optimiser (2402.12374, Eq. 1)
with the chances of this very step. Where nothing is found that is the root alone.

Invariant: the chances of a node's children sum to one at most, so no path is likelier than its own
beginning. The context settles all of it before anything is drawn: its nodes are point masses, so
that any shape is exact with any rule.

Shape letters, in this file only: E positions behind matches, M tokens of a continuation.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offload.datastore.index import Trie, heaviest
from offload.drafting.base import DraftText, PerKindLRU, WithoutModel, root_alone
from offload.model.kv_cache import KVCache
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.spec import MatchLength
from offload.trees.token_tree import TokenTree, children_of
from offload.trees.topology import DynamicShape, GrownNode, Topology, grow_best_first
from offload.trees.verification import Acceptance

_GRID = np.array(
    [0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.93, 0.97, 0.99]
)
# matches whose lengths lie between two of these learn together
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
# a draft's chances of its likeliest token between two of these learn together
_SURE = (0.0, 0.5, 0.8, 0.95)
# how often a draft that is so sure is assumed to be wrong at first
_UNSURE = (0.6, 0.35, 0.12, 0.03)
# how far a source is trusted at first; others by half
_PRIOR_TRUST = {"lookup": 1.0}
NO_DRAFT = -1
_PRIOR_COUNT = 4.0  # observations that the prior is worth
# share of losses kept from one observation to the next: a text may turn from prose to code
_KEPT = 0.99
FLOOR_PROB = 1e-3  # chance of a token that no source has


class SourceWeights:
    """How far each source of guesses is trusted, by the length of its match.

    A mixture emits x with chance w s(x) + (1 - w) r(x), where s is the source's share of x and r
    what all others say. For each emitted token every w of a grid pays its log-loss, old losses
    fade, and the one that has paid least is used next. Where nothing else says anything, this is
    how often the source was right. Beside a draft the weight depends on how sure the draft is: a
    certain draft needs no second opinion.
    """

    def __init__(self) -> None:
        self._loss: dict[tuple[str, int, int], np.ndarray] = {}
        self._weight: dict[tuple[str, int, int], float] = {}

    def __repr__(self) -> str:
        return (
            f"SourceWeights({ {key: round(self.weight(*key), 3) for key in sorted(self._loss)} })"
        )

    def weight(self, source: str, length: int, confidence: int = NO_DRAFT) -> float:
        """Return the weight, in (0, 1), of guesses behind a match, beside a draft so sure."""
        key = source, _length_class(length), confidence
        if key not in self._weight:
            self._weight[key] = float(_GRID[np.argmin(self._loss.get(key, 0) + _prior_loss(*key))])
        return self._weight[key]

    def learn(
        self, source: str, length: int, share: float, rest: float, confidence: int = NO_DRAFT
    ) -> None:
        """Note a token that was emitted: the source gave it `share`, all others together `rest`."""
        key = source, _length_class(length), confidence
        loss = -np.log(_GRID * share + (1 - _GRID) * max(rest, FLOOR_PROB))
        self._loss[key] = _KEPT * self._loss.get(key, 0) + loss
        self._weight.pop(key, None)


def confidence(chance: float) -> int:
    """Return the class of a draft that gives its likeliest token this chance."""
    return bisect_right(_SURE, chance) - 1


def _prior_loss(source: str, length_class: int, confidence: int) -> np.ndarray:
    """Return losses by assumed observations: long matches are right, the text's own most."""
    first = _LENGTHS[length_class] / (_LENGTHS[length_class] + 3) * _PRIOR_TRUST.get(source, 0.5)
    first *= 1.0 if confidence == NO_DRAFT else _UNSURE[confidence]
    return -_PRIOR_COUNT * (first * np.log(_GRID) + (1 - first) * np.log1p(-_GRID))


def _length_class(length: int) -> int:
    return bisect_right(_LENGTHS, length) - 1


_NOTHING: Mapping[int, float] = {}


class SourceOpinion(Protocol):
    """One opinion on what follows on the context, and on every path from there."""

    source: str
    length: int  # tokens of the context that it rests on

    def length_at(self, depth: int) -> int:
        """Return the number of tokens that it rests on, at the end of a path of this depth."""

    def start(self) -> Any:
        """Return the state in which paths begin."""

    def shares(self, state: Any) -> Mapping[int, float]:
        """Return the share of each token among those that followed there."""

    def follow(self, state: Any, token: int) -> Any:
        """Return the state after that token, None if the source has none."""


class TrieGuesses:
    """Observed continuations, in a trie; a state is one of its nodes."""

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
        """Return the match's length at this depth: it grows along its continuation."""
        return self.length + depth

    def start(self) -> int:
        """Return the node above all continuations."""
        return 0

    def shares(self, state: int) -> Mapping[int, float]:
        """Return the shares of a node's children."""
        return self._shares[state]

    def follow(self, state: int, token: int) -> int | None:
        """Return the child with this token."""
        return self._child[state].get(token)


class TrieCursor(NamedTuple):
    """The position of a path in every opinion."""

    depth: int
    at: tuple[Any, ...]  # the state in every opinion, None where the path has left it


# for a guess: its parent's cursor, and its own token
GuessStep: TypeAlias = tuple[TrieCursor, int]
Guess: TypeAlias = GrownNode[GuessStep]  # A node whose score is the chance of its path.
_NO_TOKEN = -1  # a score in place of the root's, which is known
_SCORE = itemgetter(0)


class DraftVerdict(NamedTuple):
    """A draft's scores at a token that was emitted."""

    chance: float
    confidence: int  # the draft's class of confidence there, see `confidence`


_UNJUDGED = DraftVerdict(0.0, NO_DRAFT)


class Guesses:
    """All opinions on one context, mixed into one chance for every path."""

    def __init__(self, opinions: Iterable[SourceOpinion], weights: SourceWeights) -> None:
        self._opinions = sorted(opinions, key=lambda opinion: -opinion.length)
        self._weights = weights
        self.root = TrieCursor(0, tuple(opinion.start() for opinion in self._opinions))

    def __bool__(self) -> bool:
        return bool(self._opinions)

    def children(
        self, cursor: TrieCursor, confidence: int = NO_DRAFT
    ) -> tuple[dict[int, float], float]:
        """Return the chance of every token guessed there, and what is left for others."""
        chances: dict[int, float] = {}
        rest = 1.0
        for opinion, shares in self._claims(cursor):
            weight = rest * self._weights.weight(
                opinion.source, opinion.length_at(cursor.depth), confidence
            )
            for token, share in shares.items():
                chances[token] = chances.get(token, 0.0) + weight * share
            rest -= weight
        return chances, rest

    def follow(self, cursor: TrieCursor, token: int) -> TrieCursor:
        """Return the cursor after a token."""
        pairs = zip(self._opinions, cursor.at, strict=True)
        return TrieCursor(
            cursor.depth + 1,
            tuple(None if at is None else opinion.follow(at, token) for opinion, at in pairs),
        )

    def best(self, count: int, depth: int, least: float = 0.0) -> list[Guess]:
        """Return the root and at most `count` of the likeliest nodes within `depth`, above `least`."""
        grown = self._grown(lambda node: sys.maxsize if node.depth < depth else 0, least)
        return list(islice(grown, count + 1))

    def within(self, topology: Topology) -> list[Guess]:
        """Return the nodes of a shape that guesses fill; a child of rank k is the k-th likeliest."""
        children = children_of(topology)
        nodes = list[int]()  # index in the shape by the number of the guess

        def most(node: Guess) -> int:
            nodes.append(children[nodes[node.parent]][node.rank] if nodes else 0)
            return len(children[nodes[-1]])

        return list(self._grown(most))

    def _grown(self, most: Callable[[Guess], int], least: float = 0.0) -> Iterator[Guess]:
        """Yield the root, then the likeliest node above `least`; `most` bounds a node's children."""
        # children of every node by its number, the likeliest first
        children = list[list[tuple[float, GuessStep]]]()

        def child(node: Guess, rank: int) -> tuple[float, GuessStep] | None:
            if rank == 0:
                num_children = most(node)
                cursor = self.follow(*node.item) if node.number else self.root
                chances = self.children(cursor)[0] if num_children else {}
                steps = [
                    (node.score * chance, (cursor, token)) for token, chance in chances.items()
                ]
                children.append(sorted(steps, key=_SCORE, reverse=True)[:num_children])
            siblings = children[node.number]
            return siblings[rank] if rank < len(siblings) and siblings[rank][0] > least else None

        return grow_best_first((self.root, _NO_TOKEN), child)

    def learn(self, tokens: Sequence[int], drafted: Sequence[DraftVerdict | None]) -> None:
        """Learn from tokens emitted in turn; `drafted` has a draft's verdict on each, or None."""
        cursor = self.root
        for token, judged in zip(tokens, drafted, strict=True):
            claims = list(self._claims(cursor))
            if not claims:
                return
            self._learn_one(claims, cursor.depth, token, _UNJUDGED)
            if judged is not None:
                self._learn_one(claims, cursor.depth, token, judged)
            cursor = self.follow(cursor, token)

    def _learn_one(
        self,
        claims: Sequence[tuple[SourceOpinion, Mapping[int, float]]],
        depth: int,
        token: int,
        judged: DraftVerdict,
    ) -> None:
        """Update each opinion's weight by one emitted token, from the last opinion to the first."""
        rest, confidence = judged
        for opinion, shares in reversed(claims):
            length = opinion.length_at(depth)
            share = shares.get(token, 0.0)
            self._weights.learn(opinion.source, length, share, rest, confidence)
            weight = self._weights.weight(opinion.source, length, confidence)
            rest = weight * share + (1 - weight) * rest

    def _claims(self, cursor: TrieCursor) -> Iterable[tuple[SourceOpinion, Mapping[int, float]]]:
        """Yield opinions with the shares of tokens that no earlier one named, adding up to 1."""
        claimed: set[int] = set()
        for opinion, at in zip(self._opinions, cursor.at, strict=True):
            shares = _NOTHING if at is None else opinion.shares(at)
            if claimed and not claimed.isdisjoint(shares):
                shares = {token: share for token, share in shares.items() if token not in claimed}
                total = sum(shares.values())
                shares = {token: share / total for token, share in shares.items()}
            if shares:
                claimed |= shares.keys()
                yield opinion, shares


NO_GUESSES = Guesses((), SourceWeights())


Tokens = NDArray[np.int64]


class Source(Protocol):
    """A source of guesses, which keeps nothing of a text."""

    name: str

    def opinions(self, token_T: Tokens, num_nodes: int, depth: int) -> Iterable[SourceOpinion]:
        """Return opinions on the next `depth` tokens of a text, each of at most this many nodes."""


class GuessState:
    """The tokens of one text in an array that grows, and the guesses of the last step."""

    def __init__(self) -> None:
        self.guesses = NO_GUESSES
        self._token_T: Tokens = np.zeros(1024, dtype=np.int64)
        self._length = 0

    saved = None

    def can_follow(self, num_positions: int) -> int:
        """Return all: it reads tokens alone."""
        return num_positions

    def copy_from(self, other: "GuessState", num_tokens: int) -> None:
        """Start empty: the text is read again when guesses are needed."""
        self.clear()

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text beyond its first `num_kept` tokens, and the guesses behind them."""
        self.guesses = NO_GUESSES
        self._length = min(self._length, num_kept)

    def read(self, tokens: Sequence[int]) -> Tokens:
        """Return all tokens, after adding the new ones."""
        if len(tokens) > self._token_T.size:
            self._token_T = np.concatenate([self._token_T, np.zeros(len(tokens), dtype=np.int64)])
        self._token_T[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        return self._token_T[: self._length]


class GuessSources:
    """Several sources, asked together, and their weights for each kind of sampling."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._weights = PerKindLRU[Sampling, SourceWeights](SourceWeights)

    def __bool__(self) -> bool:
        return bool(self._sources)

    def __str__(self) -> str:
        return ", ".join(source.name for source in self._sources)

    def ask(self, text: DraftText, state: GuessState) -> Guesses:
        """Return the guesses of all sources after a text; the state keeps them to learn from."""
        state.guesses = NO_GUESSES
        if self._sources and text.shape.depth:
            token_T = state.read(text.tokens)
            bounds = (text.shape.num_nodes - 1, text.shape.depth)
            opinions = [
                opinion for source in self._sources for opinion in source.opinions(token_T, *bounds)
            ]
            state.guesses = Guesses(opinions, self._weights[text.sampler.sampling.kind])
        return state.guesses


NO_SOURCES = GuessSources(())

# seconds of a weight pass over this many rows
PassSeconds = Callable[[int], float]


class LookupDrafter(WithoutModel):
    """Grows trees of guesses alone; without sources, the root alone: each pass yields one token."""

    def __init__(self, sources: GuessSources, pass_s: PassSeconds) -> None:
        self._sources = sources
        self._pass_s = pass_s

    def new_state(self, target: KVCache | None = None) -> GuessState:
        """Return the state of a text that was not read yet."""
        return GuessState()

    def propose(self, batch: Sequence[DraftText]) -> list[TokenTree]:
        """Return trees of point masses: within bounds those that pay, else those that fit."""
        return [self._grow(text) for text in batch]

    def _grow(self, text: DraftText) -> TokenTree:
        """Return the tree of one text: the nodes that pay, or those that fill a fixed shape."""
        guesses = self._sources.ask(text, text.state)
        if not guesses:
            return root_alone(text.tokens)
        if isinstance(text.shape, DynamicShape):
            # as many of the first as bring the most expected tokens per second
            nodes = guesses.best(text.shape.num_nodes - 1, text.shape.depth)
            yields = np.cumsum([guess.score for guess in nodes])
            rates = yields / [self._pass_s(num_rows) for num_rows in range(1, len(nodes) + 1)]
            nodes = nodes[: 1 + int(np.argmax(rates))]
        else:
            nodes = guesses.within(text.shape)
        _, *tokens = (guess.item[1] for guess in nodes)
        return TokenTree.listed([guess.parent for guess in nodes], [text.tokens[-1], *tokens])

    def accepted(
        self, tree: TokenTree, path: Acceptance, sampler: Sampler, state: GuessState
    ) -> None:
        """Learn how good the guesses were."""
        state.guesses.learn(path.tokens, [None] * len(path.tokens))


_MOST_ENDS = 64  # matches of one length that are considered: the latest


class Copying:
    """Continuations of earlier passages in the text itself.

    Summaries, edits, code and every chat repeat their context. Positions whose last tokens are
    those at the text's end are found by comparing backwards, longest matches first. A match that
    runs into the end repeats its continuation, as loops do. Nothing is kept except the tokens, so a
    text may be cut anywhere.
    """

    name = "lookup"

    def __init__(self, match: MatchLength) -> None:
        self._match = match

    def opinions(self, token_T: Tokens, num_nodes: int, depth: int) -> Iterator[TrieGuesses]:
        """Yield the continuations of the longest match, then of half as many tokens, and so on."""
        for length, end_E in _matches(token_T, self._match):
            token_EM = _continuations(token_T, end_E[-_MOST_ENDS:], depth)
            yield TrieGuesses(self.name, length, heaviest(token_EM, num_nodes))


def _matches(token_T: Tokens, match: MatchLength) -> list[tuple[int, Tokens]]:
    """Return positions after matches, rising, by length; lengths at least halve."""
    end_E = np.flatnonzero(token_T[:-1] == token_T[-1]) + 1
    matches = []
    for length in range(1, match.most + 1):
        if length >= match.least and end_E.size:
            matches.append((length, end_E))
        end_E = end_E[end_E > length]
        end_E = (
            end_E[token_T[end_E - length - 1] == token_T[-length - 1]]
            if len(token_T) > length
            else end_E[:0]
        )
    chosen = []
    bound = match.most
    for length, positions_E in reversed(matches):
        if length <= bound:
            chosen.append((length, positions_E))
            bound = length // 2
    return chosen


def _continuations(token_T: Tokens, end_E: Tokens, depth: int) -> Tokens:
    """Return (E, M) tokens from each position on; the text's end continues as it did before."""
    period_E1 = len(token_T) - end_E[:, None]
    return token_T[end_E[:, None] + np.arange(depth) % period_E1]
