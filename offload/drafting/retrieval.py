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

MOST_CONTINUATIONS = 128  # looked at, sampled where there are more
LONGEST = 16  # tokens of a continuation; REST takes 10
SHORT = 3  # tokens of the second match


class Retrieval:
    """Continuations of matches in a corpus."""

    name = "datastore"

    def __init__(self, index: SuffixIndex, match: MatchLength) -> None:
        self._index, self._match = index, match

    def new_state(self) -> NoState:
        """Nothing is kept of a text."""
        return NoState()

    def tiers(self, tokens: Sequence[int], asked: Asked, state: NoState) -> Iterator[TrieTier]:
        """Of the longest match, which may be chance, and of a short one, whose continuations are many."""
        least, bound = self._match
        while bound >= least:
            matches = self._index.longest(tokens[-bound:], bound, least)
            if not matches.count:
                return
            token_CM = self._index.continuations(matches, min(asked.depth, LONGEST), MOST_CONTINUATIONS, len(tokens))
            yield TrieTier(self.name, matches.length, heaviest(token_CM, asked.num_nodes))
            bound = SHORT if matches.length > SHORT else 0
