"""Copies from the text itself: what followed the last time that it said the same.

Summaries, edits, code and every chat repeat their context. The positions whose last tokens are those of the text's end
are found by comparing backwards, longest matches first; where a match runs into the end, its continuation repeats, as
loops do. Invariant: nothing is kept but the tokens, so that a text may be cut anywhere.

E positions behind matches, M tokens of a continuation.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.datastore.trie import heaviest
from offload.drafting.guesses import TrieTier
from offload.drafting.sources import Asked
from offload.tree.spec import MatchLength

_MOST_ENDS = 64  # matches of one length that are looked at: the latest


class Copied:
    """The tokens of one text in an array that grows."""

    def __init__(self) -> None:
        self._token_T: NDArray[np.int64] = np.zeros(1024, dtype=np.int64)
        self._length = 0

    def copy_from(self, other: "Copied", num_tokens: int) -> None:
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

    def new_state(self) -> Copied:
        """No text yet."""
        return Copied()

    def tiers(self, tokens: Sequence[int], asked: Asked, state: Copied) -> Iterator[TrieTier]:
        """By the length of the match: of the longest, and of half as many tokens again and again."""
        token_T = state.read(tokens)
        for length, end_E in _matches(token_T, self._match):
            token_EM = _continuations(token_T, end_E[-_MOST_ENDS:], asked.depth)
            yield TrieTier(self.name, length, heaviest(token_EM, asked.num_nodes))


def _matches(token_T: NDArray[np.int64], match: MatchLength) -> list[tuple[int, NDArray[np.int64]]]:
    """Positions behind matches, rising, by their length: the longest, then each of at most half as many tokens."""
    end_E, found = np.flatnonzero(token_T[:-1] == token_T[-1]) + 1, []
    for length in range(1, match.most + 1):
        if length >= match.least and end_E.size:
            found.append((length, end_E))
        end_E = end_E[end_E > length]
        end_E = end_E[token_T[end_E - length - 1] == token_T[-length - 1]] if len(token_T) > length else end_E[:0]
    tiers, bound = [], match.most
    for length, positions_E in reversed(found):
        if length <= bound:
            tiers.append((length, positions_E))
            bound = length // 2
    return tiers


def _continuations(token_T: NDArray[np.int64], end_E: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
    """(E, M) tokens from each position on; the end of the text continues as it did before."""
    period_E1 = len(token_T) - end_E[:, None]
    return token_T[end_E[:, None] + np.arange(depth) % period_E1]
