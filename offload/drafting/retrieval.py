"""Continuations from a datastore (REST, 2311.08252): what followed on the longest end of the text that it has.

Invariant: a store is read and never changed, so any number of texts and programs may share it.
"""

from collections.abc import Iterator, Sequence

from offload.datastore.suffix_index import SuffixIndex
from offload.datastore.trie import heaviest
from offload.drafting.guesses import TrieTier
from offload.drafting.none import NoState
from offload.drafting.sources import Asked
from offload.tree.spec import MatchLength

MOST_CONTINUATIONS = 256  # looked at, sampled where there are more
LONGEST = 16  # tokens of a continuation; REST takes 10


class Retrieval:
    """Continuations of matches in a corpus."""

    name = "datastore"

    def __init__(self, index: SuffixIndex, match: MatchLength) -> None:
        self._index, self._match = index, match

    def new_state(self) -> NoState:
        """Nothing is kept of a text."""
        return NoState()

    def tiers(self, tokens: Sequence[int], asked: Asked, state: NoState) -> Iterator[TrieTier]:
        """Of the longest match; where that leaves room, of half as many tokens again and again."""
        most, num_left = self._match.most, asked.num_nodes
        while most >= self._match.least and num_left > 0:
            matches = self._index.longest(tokens[-most:], most, self._match.least)
            if not matches.count:
                return
            depth = min(asked.depth, LONGEST)
            token_CM = self._index.continuations(matches, depth, MOST_CONTINUATIONS, seed=len(tokens))
            trie = heaviest(token_CM, num_left)
            yield TrieTier(self.name, matches.length, trie)
            num_left -= len(trie.token_R)
            most = matches.length // 2
