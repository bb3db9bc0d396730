"""Where in a corpus that stands which a text ends with, and what follows there.

Shapes: M matches, C tokens of a continuation.

Invariant: nothing outside of a chunk is read, whatever positions and tokens its files hold.
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.datastore.chunk import Chunk, Width


class Range(NamedTuple):
    """Matches in one chunk: a slice of its sorted positions."""

    chunk: int
    lo: int
    hi: int


class Matches(NamedTuple):
    """All places where the same tokens stand."""

    length: int  # tokens of the context's end that were found; 0: none of them
    ranges: tuple[Range, ...]  # none of them empty

    @property
    def count(self) -> int:  # type: ignore[override]
        """In all chunks."""
        return sum(one.hi - one.lo for one in self.ranges)


_NOWHERE = Matches(0, ())


class SuffixIndex:
    """A corpus in one or several chunks, in memory or mapped from files."""

    def __init__(self, chunks: Sequence[Chunk], vocab_size: int, most_ids: int = sys.maxsize) -> None:
        self.vocab_size, self._width, self._chunks = min(vocab_size, most_ids), Width.of(vocab_size), tuple(chunks)
        # Items of a memoryview are numbers of Python, three times as quick to get and to slice with as those of numpy.
        self._views = [chunk.position_M.data for chunk in chunks]
        self.num_tokens = sum(map(len, self._views))

    @classmethod
    def in_memory(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> "SuffixIndex":
        """Of token ids, document by document. Raises `UserError` for ids outside of the vocabulary."""
        chunk = Chunk.of(documents, vocab_size)
        return cls([chunk] if len(chunk.position_M) else [], vocab_size)

    def longest(self, context: Sequence[int], most: int = 16, least: int = 2) -> Matches:
        """The places with the longest end of `context`, of at most `most` tokens; none where fewer than `least` match.

        Every match has a token that follows it. With `least` 0 and no match, all places of the corpus are found.
        Raises `ReadError` where a file was cut.
        """
        for chunk in self._chunks:
            chunk.require_whole()
        wanted = self._reversed(context, most)
        if len(wanted) < least * self._width.num_bytes:
            return _NOWHERE
        places = [self._place(index, wanted) for index in range(len(self._chunks))]
        length = max((length for length, _ in places), default=0)
        if length < least:
            return _NOWHERE
        wanted = wanted[: length * self._width.num_bytes]
        ranges = [self._range(index, wanted, at) for index, (own, at) in enumerate(places) if own == length]
        return Matches(length, tuple(one for one in ranges if one.lo < one.hi))

    def continuations(self, matches: Matches, length: int = 10, most: int = 256, seed: int = 0) -> NDArray[np.int64]:
        """What follows the matches, (M, length), -1 behind a document's end.

        Where there are more matches than `most`, so many are drawn, each set of them as likely as any other, and the
        same ones for the same seed.
        """
        drawn_M = _drawn(matches, most, seed)
        bounds = np.cumsum([0, *(one.hi - one.lo for one in matches.ranges)])
        cuts = np.searchsorted(drawn_M, bounds)
        parts = [
            self._following(one.chunk, drawn_M[cuts[i] : cuts[i + 1]] - bounds[i] + one.lo, length)
            for i, one in enumerate(matches.ranges)
        ]
        return np.concatenate(parts) if parts else np.empty((0, length), np.int64)

    def _reversed(self, context: Sequence[int], most: int) -> bytes:
        """The context's end as it stands in the text, no further than tokens that no corpus can have."""
        ids = [int(token) for token in reversed(context[max(0, len(context) - most) :])]
        known = next((i for i, token in enumerate(ids) if not 0 <= token < self.vocab_size), len(ids))
        return b"".join(token.to_bytes(self._width.num_bytes, "big") for token in ids[:known])

    def _place(self, index: int, wanted: bytes) -> tuple[int, int]:
        """How many tokens a chunk has of what is wanted, and where in its order they would stand."""
        text, view, size, width = self._chunks[index].text, self._views[index], len(wanted), self._width.num_bytes
        at = bisect_left(view, wanted, key=lambda position: text[width * position : width * position + size])
        beside = (width * view[one] for one in (at - 1, at) if 0 <= one < len(view))
        return max((_common_bytes(wanted, text[lo : lo + size]) for lo in beside), default=0) // width, at

    def _range(self, index: int, wanted: bytes, at: int) -> Range:
        """All places of a chunk where `wanted` stands; `at` is one of them, or next to one."""
        text, view, size, width = self._chunks[index].text, self._views[index], len(wanted), self._width.num_bytes

        def found(position: int) -> bytes:
            return text[width * position : width * position + size]

        return Range(index, bisect_left(view, wanted, 0, at, key=found), bisect_right(view, wanted, at, key=found))

    def _following(self, index: int, order_M: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        chunk = self._chunks[index]
        at_MC = chunk.position_M[order_M].astype(np.int64)[:, None] - np.arange(1, length + 1)
        tokens_MC = chunk.tokens_B.take(at_MC, mode="clip").astype(np.int64)  # within the text, wherever that may be
        is_over_MC = np.logical_or.accumulate(tokens_MC >= self.vocab_size, axis=1)  # separators, and what is no token
        tokens_MC[is_over_MC] = -1
        return tokens_MC


def _common_bytes(wanted: bytes, found: bytes) -> int:
    """How many bytes both begin with."""
    size = len(wanted)
    difference = int.from_bytes(wanted, "big") ^ int.from_bytes(found.ljust(size, b"\0"), "big")
    return min(size - (difference.bit_length() + 7) // 8, len(found))


def _drawn(matches: Matches, most: int, seed: int) -> NDArray[np.int64]:
    """Which of the matches are looked at, counted through all ranges, in rising order."""
    if matches.count <= most:
        return np.arange(matches.count)
    key = [seed, matches.length, *(number for one in matches.ranges for number in one)]
    drawn = np.random.default_rng(key).choice(matches.count, most, replace=False, shuffle=False)
    return np.sort(drawn)
