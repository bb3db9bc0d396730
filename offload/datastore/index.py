"""Suffix search in a corpus: where the end of a context occurs, and what follows there.

A chunk holds the tokens of its documents in reversed order, and the sorted suffixes of that text.
Reversed, the end of a context is the beginning of a suffix, so one search finds the longest match.
Tokens are big-endian, so bytes compare as tokens do and a comparison is one call into C. `heaviest`
selects the prefixes that most continuations share: REST's choice of guesses (2311.08252, Alg. 2).

Shapes: M matches or continuations, C tokens of a continuation, R nodes.

Invariant: a separator, which is no token, stands before, between and after the documents. Positions
are sorted by the text that begins there. There is exactly one for every token of the corpus: the
position after it in the reversed text, hence before it in the document. So every match has a
continuation, and neither crosses documents. Nothing outside a chunk is read, whatever its files
hold.
"""

import mmap
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.errors import ReadError, UserError, require

MAX_TEXT_BYTES = 2**31 - 1  # positions are int32, including those within tokens while sorting
_BLOCK = 1 << 16  # positions that are filtered together
Ints = NDArray[np.int64]


class TokenWidth(NamedTuple):
    """How one token is stored."""

    num_bytes: int
    dtype: np.dtype[np.unsignedinteger]
    separator: int  # the highest value

    @classmethod
    def from_vocab_size(cls, vocab_size: int) -> "TokenWidth":
        """Return two bytes where they hold every token and the separator, else four.

        Raises `UserError` for an impossible `vocab_size`.
        """
        requirement = "`vocab_size` must lie in [1, 2^32)"
        require(0 < vocab_size < 2**32, requirement, vocab_size, "take that of the tokenizer")
        num_bytes = 2 if vocab_size < 2**16 else 4
        return cls(num_bytes, np.dtype(f">u{num_bytes}"), 256**num_bytes - 1)


class CorpusChunk(NamedTuple):
    """One chunk of a corpus, in memory or mapped from files."""

    text: bytes | mmap.mmap  # sliced and compared by searches
    tokens_B: NDArray[np.unsignedinteger]  # the same bytes as numbers
    position_M: NDArray[np.int32]  # one for every token of the documents
    files: tuple[mmap.mmap, ...] = ()  # the files' maps

    def require_whole(self) -> None:
        """Raise `ReadError` if a file was truncated: touching the lost part would kill the process."""
        if any(file.size() < len(file) for file in self.files):
            raise ReadError("a file of the datastore was cut short while in use: build it again")

    @classmethod
    def from_documents(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> "CorpusChunk":
        """Return a chunk of these documents.

        Raises `UserError` for tokens outside the vocabulary, or more than a chunk can hold.
        """
        given = [np.asarray(document, np.int64) for document in documents]
        text = ReversedText(vocab_size, sum(len(document) + 1 for document in given))
        for document in given:
            text.add(document)
        raw = text.tokens_B.tobytes()
        return cls(raw, np.frombuffer(raw, text.width.dtype), sorted_positions(text.tokens_B))


class ReversedText:
    """Documents in reversed order, each written before the last, in memory allocated once.

    Args:
        room: number of tokens, with a separator for every document.
    """

    def __init__(self, vocab_size: int, room: int) -> None:
        self.width = TokenWidth.from_vocab_size(vocab_size)
        self._vocab_size = vocab_size
        num_bytes = (room + 1) * self.width.num_bytes
        requirement = f"a chunk must have at most {MAX_TEXT_BYTES} bytes"
        require(num_bytes <= MAX_TEXT_BYTES, requirement, num_bytes, "take fewer tokens")
        self._buffer = np.empty(room + 1, self.width.dtype)
        self._buffer[room] = self.width.separator
        self.room = room  # tokens left
        self.num_tokens = 0
        self.num_documents = 0

    def add(self, document: Sequence[int] | NDArray[np.int64]) -> None:
        """Add a document, unless it is empty. Raises `UserError` for unknown tokens."""
        tokens = np.asarray(document, np.int64)
        if not len(tokens):
            return
        assert len(tokens) < self.room
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if len(wrong):
            requirement = f"tokens must lie in [0, {self._vocab_size})"
            raise UserError(f"{requirement}, got {wrong[0]}: take the tokenizer of this vocabulary")
        end = self.room
        self.room -= len(tokens) + 1
        self._buffer[self.room] = self.width.separator
        self._buffer[self.room + 1 : end] = tokens[::-1]
        self.num_tokens += len(tokens)
        self.num_documents += 1

    @property
    def tokens_B(self) -> NDArray[np.unsignedinteger]:
        return self._buffer[self.room :]


def sorted_positions(tokens_B: NDArray[np.unsignedinteger]) -> NDArray[np.int32]:
    """Return the positions of a reversed text by order of suffix, none behind a separator.

    A library sorts the bytes, leaving out suffixes that begin within a token: memory is 4 bytes for
    each byte.
    """
    import pydivsufsort

    separator = 256**tokens_B.itemsize - 1
    width = tokens_B.itemsize
    order = pydivsufsort.divsufsort(tokens_B.view(np.uint8))
    num_kept = 0
    for lo in range(0, len(order), _BLOCK):
        at = order[lo : lo + _BLOCK]
        at = at[at % width == 0] // width
        # index -1, for the first position, is the last separator
        at = at[tokens_B[at - 1] != separator]
        order[num_kept : num_kept + len(at)] = at
        num_kept += len(at)
    # ctypes' own type says the same, but memoryviews do not know it
    return order[:num_kept].view(np.int32)


class MatchRange(NamedTuple):
    """Matches in one chunk: a slice of its sorted positions."""

    chunk: int
    lo: int
    hi: int


class Matches(NamedTuple):
    """All places with the same tokens."""

    length: int  # number of the context's last tokens that were found; 0: none
    ranges: tuple[MatchRange, ...]  # ranges, none of them empty

    @property
    def count(self) -> int:  # type: ignore[override]
        return sum(match.hi - match.lo for match in self.ranges)


_NOWHERE = Matches(0, ())


class SuffixIndex:
    """A corpus in one or several chunks, in memory or mapped from files."""

    def __init__(
        self, chunks: Sequence[CorpusChunk], vocab_size: int, most_ids: int = sys.maxsize
    ) -> None:
        self.vocab_size = min(vocab_size, most_ids)
        self._width = TokenWidth.from_vocab_size(vocab_size)
        self._chunks = tuple(chunks)
        # Items of a memoryview are Python's numbers, three times as quick to get and to slice with
        # as numpy's.
        self._views = [chunk.position_M.data for chunk in chunks]
        self.num_tokens = sum(map(len, self._views))

    @classmethod
    def in_memory(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> "SuffixIndex":
        """Return the index of these documents. Raises `UserError` for unknown token ids."""
        chunk = CorpusChunk.from_documents(documents, vocab_size)
        return cls([chunk] if len(chunk.position_M) else [], vocab_size)

    def longest(self, context: Sequence[int], most: int = 16, least: int = 2) -> Matches:
        """Return the places of the longest end of `context`, `least` to `most` tokens.

        Every match has a token that follows it. With `least` 0 and no match, all places of the
        corpus are returned. Raises `ReadError` if a file was truncated.
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
        longest = ((index, at) for index, (common, at) in enumerate(places) if common == length)
        ranges = (self._range(index, wanted, at) for index, at in longest)
        return Matches(length, tuple(match for match in ranges if match.lo < match.hi))

    def continuations(
        self, matches: Matches, length: int = 10, most: int = 256, seed: int = 0
    ) -> NDArray[np.int64]:
        """Return the tokens after up to `most` drawn matches, (M, length); -1 past a document."""
        drawn_M = _drawn_indices(matches, most, seed)
        bounds = np.cumsum([0, *(match.hi - match.lo for match in matches.ranges)])
        cuts = np.searchsorted(drawn_M, bounds)
        parts = [
            self._following(
                match.chunk, drawn_M[cuts[i] : cuts[i + 1]] - bounds[i] + match.lo, length
            )
            for i, match in enumerate(matches.ranges)
        ]
        return np.concatenate(parts) if parts else np.empty((0, length), np.int64)

    def _reversed(self, context: Sequence[int], most: int) -> bytes:
        """Return the end of the context reversed, cut at a token that no corpus has."""
        ids = map(int, reversed(context[max(0, len(context) - most) :]))
        known = takewhile(lambda token: 0 <= token < self.vocab_size, ids)
        return b"".join(token.to_bytes(self._width.num_bytes, "big") for token in known)

    def _place(self, index: int, wanted: bytes) -> tuple[int, int]:
        """Count the tokens of `wanted` that a chunk has; return that and their place in its order."""
        view = self._views[index]
        read_at = self._reader(index, len(wanted))
        at = bisect_left(view, wanted, key=read_at)
        beside = (view[neighbour] for neighbour in (at - 1, at) if 0 <= neighbour < len(view))
        common = max((_common_bytes(wanted, read_at(neighbour)) for neighbour in beside), default=0)
        return common // self._width.num_bytes, at

    def _range(self, index: int, wanted: bytes, at: int) -> MatchRange:
        """Return all places of `wanted` in a chunk; `at` is one of them, or next to one."""
        view = self._views[index]
        read_at = self._reader(index, len(wanted))
        lo = bisect_left(view, wanted, 0, at, key=read_at)
        return MatchRange(index, lo, bisect_right(view, wanted, at, key=read_at))

    def _reader(self, index: int, size: int) -> Callable[[int], bytes]:
        """Return a function that reads this many bytes of a chunk at a position."""
        text = self._chunks[index].text
        width = self._width.num_bytes
        return lambda position: text[width * position : width * position + size]

    def _following(self, index: int, order_M: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        chunk = self._chunks[index]
        at_MC = chunk.position_M[order_M].astype(np.int64)[:, None] - np.arange(1, length + 1)
        # "clip" keeps the indices inside the text
        tokens_MC = chunk.tokens_B.take(at_MC, mode="clip").astype(np.int64)
        # a separator, or an id beyond the vocabulary, ends the continuation
        is_over_MC = np.logical_or.accumulate(tokens_MC >= self.vocab_size, axis=1)
        tokens_MC[is_over_MC] = -1
        return tokens_MC


def _common_bytes(wanted: bytes, held: bytes) -> int:
    """Return the length of the common prefix in bytes."""
    size = len(wanted)
    difference = int.from_bytes(wanted, "big") ^ int.from_bytes(held.ljust(size, b"\0"), "big")
    return min(size - (difference.bit_length() + 7) // 8, len(held))


def _drawn_indices(matches: Matches, most: int, seed: int) -> NDArray[np.int64]:
    """Return the indices of the matches to use, counted across all ranges, rising."""
    if matches.count <= most:
        return np.arange(matches.count)
    key = [seed, matches.length, *(number for match in matches.ranges for number in match)]
    drawn = np.random.default_rng(key).choice(matches.count, most, replace=False, shuffle=False)
    return np.sort(drawn)


class Trie(NamedTuple):
    """Nodes in falling order of their counts; a parent precedes its children."""

    parent_R: Ints  # index of the parent among the nodes, -1 below the root
    token_R: Ints
    count_R: Ints  # continuations that pass through the node
    num_continuations: int


def heaviest(continuations_MC: Ints, num_nodes: int) -> Trie:
    """Return the nodes that most continuations pass through, with all their ancestors.

    A row ends at its first negative token. Ties go to the shallower node, then to the path with the
    lower token, so the choice does not depend on the order of the rows.
    """
    num_rows, depth = continuations_MC.shape
    if not num_rows or not depth:
        none_R = np.empty(0, np.int64)
        return Trie(none_R, none_R, none_R, num_rows)
    is_over_MC = np.logical_or.accumulate(continuations_MC < 0, axis=1)
    sorted_CM = _sorted_rows(np.where(is_over_MC, -1, continuations_MC)).T
    # A run of rows with the same first tokens is a node; runs of one depth are adjacent, and those
    # of the next depth follow.
    is_first_CM = np.ones((depth, num_rows), bool)
    np.logical_or.accumulate(sorted_CM[:, 1:] != sorted_CM[:, :-1], axis=0, out=is_first_CM[:, 1:])
    first = np.flatnonzero(is_first_CM)
    count = np.diff(first, append=num_rows * depth)
    run_CM = np.cumsum(is_first_CM) - 1
    token = sorted_CM.ravel()[first]
    num_kept = min(num_nodes, np.count_nonzero(token >= 0))
    kept = np.argsort(np.where(token < 0, 0, -count), kind="stable")[:num_kept]
    parent = np.where(first < num_rows, -1, run_CM[first - num_rows])
    rank = np.full(len(first) + 1, -1)  # the root's entry is the last
    rank[kept] = np.arange(len(kept))
    return Trie(rank[parent[kept]], token[kept], count[kept], num_rows)


def _sorted_rows(rows_MC: Ints) -> Ints:
    """Sort rows token by token: big-endian bytes compare as their numbers do."""
    keys_MC = np.ascontiguousarray(rows_MC + 1, dtype=">u4")
    order_M = np.argsort(keys_MC.view(f"S{4 * rows_MC.shape[1]}").ravel(), kind="stable")
    return rows_MC[order_M]
