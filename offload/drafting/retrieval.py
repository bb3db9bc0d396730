"""Continuations from a datastore (REST, 2311.08252): what followed on the longest end of the text
that it has.

Invariant: a store is read and never changed, so any number of texts and programs may share it.

Bigrams and unigrams: which token follows on which, and which is frequent, wherever a path has led
to.

The draft that costs nothing (Leviathan et al., 2211.17192, section 4.1 and Table 3). The counts are
those of an index of suffixes, so a datastore is a bigram model as it stands; what was counted once
is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from offload.datastore.index import SuffixIndex, heaviest
from offload.drafting.base import NoState
from offload.drafting.lookup import GuessRequest, TrieGuesses
from offload.trees.spec import MatchLength

MOST_CONTINUATIONS = 128  # looked at, sampled where there are more
LONGEST = 16  # tokens of a continuation; REST takes 10
SHORT = 3  # tokens of the second match


class Retrieval:
    """Continuations of matches in a corpus."""

    name = "datastore"

    def __init__(self, index: SuffixIndex, match: MatchLength) -> None:
        self._index = index
        self._match = match

    def new_state(self) -> NoState:
        """Nothing is kept of a text."""
        return NoState()

    def tiers(
        self, tokens: Sequence[int], asked: GuessRequest, state: NoState
    ) -> Iterator[TrieGuesses]:
        """Of the longest match, which may be chance, and of a short one, whose continuations are
        many.
        """
        least, bound = self._match
        while bound >= least:
            matches = self._index.longest(tokens[-bound:], bound, least)
            if not matches.count:
                return
            token_CM = self._index.continuations(
                matches, min(asked.depth, LONGEST), MOST_CONTINUATIONS, len(tokens)
            )
            yield TrieGuesses(self.name, matches.length, heaviest(token_CM, asked.num_nodes))
            bound = SHORT if matches.length > SHORT else 0


_MOST_COUNTED = 4096  # occurrences of a token, sampled where there are more
_NUM_CHILDREN = 8
_NUM_KEPT = 1 << 12  # tokens whose followers are kept, some 4 MiB


class NgramGuesses:
    """Counts of what follows on the last token, or on none; a place is that token."""

    def __init__(self, followers: "Followers", length: int, token: int) -> None:
        self.source = "ngram"
        self.length = length
        self._followers = followers
        self._token = token

    def length_at(self, depth: int) -> int:
        """The same everywhere."""
        return self.length

    def start(self) -> int:
        """The end of the text."""
        return self._token

    def shares(self, place: int) -> Mapping[int, float]:
        """How often each token came next."""
        return self._followers.of((place,) if self.length else ())

    def follow(self, place: int, token: int) -> int:
        """Only the last token counts."""
        return token


class Followers:
    """The tokens that follow on a few others, most frequent first, with their shares."""

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self.of = lru_cache(maxsize=_NUM_KEPT)(self._count)

    def _count(self, tokens: tuple[int, ...]) -> Mapping[int, float]:
        matches = self._index.longest(tokens, len(tokens), len(tokens))
        trie = heaviest(self._index.continuations(matches, 1, _MOST_COUNTED), _NUM_CHILDREN)
        counts = zip(trie.token_R.tolist(), trie.count_R.tolist(), strict=True)
        return {token: count / trie.num_continuations for token, count in counts}


class Ngrams:
    """Bigrams first, then unigrams."""

    name = "ngram"

    def __init__(self, index: SuffixIndex) -> None:
        self._followers = Followers(index)

    def new_state(self) -> NoState:
        """Nothing is kept of a text."""
        return NoState()

    def tiers(
        self, tokens: Sequence[int], asked: GuessRequest, state: NoState
    ) -> Iterator[NgramGuesses]:
        """Two opinions on every path."""
        for length in (1, 0):
            yield NgramGuesses(self._followers, length, tokens[-1])
