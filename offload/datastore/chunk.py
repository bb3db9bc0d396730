"""A chunk of a corpus: the tokens of its documents in reversed order, and the sorted suffixes of that text.

Why reversed: what a context ends with is then what a suffix begins with, so one search finds the longest match. Tokens
are big-endian, so that bytes compare as tokens do and one comparison is one call into C.

Invariant: a separator, which is no token, stands before, between and after the documents. Positions are sorted by what
begins there, and there is exactly one for every token of the corpus: that which follows it in the reversed text, hence
stands before it in the document. So every match has a continuation, and neither runs across two documents.
"""

import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.config import require
from offload.errors import ReadError, UserError

MAX_TEXT_BYTES = 2**31 - 1  # positions, also those between tokens that are sorted along, are int32
_BLOCK = 1 << 16  # positions that are looked at together


class Width(NamedTuple):
    """How one token is stored."""

    num_bytes: int
    dtype: np.dtype[np.unsignedinteger]
    separator: int  # the highest value

    @classmethod
    def of(cls, vocab_size: int) -> "Width":
        """Two bytes where they hold every token beside the separator, else four. Raises `UserError`."""
        is_possible = 0 < vocab_size < 2**32
        require(is_possible, "`vocab_size` must lie in [1, 2^32)", vocab_size, "take that of the tokenizer")
        num_bytes = 2 if vocab_size < 2**16 else 4
        return cls(num_bytes, np.dtype(f">u{num_bytes}"), 256**num_bytes - 1)


class Chunk(NamedTuple):
    """In memory or mapped from a file."""

    text: bytes | mmap.mmap  # sliced and compared by searches
    tokens_B: NDArray[np.unsignedinteger]  # the same bytes as numbers
    position_M: NDArray[np.int32]  # one for every token of the documents
    files: tuple[mmap.mmap, ...] = ()  # what it is mapped from

    def require_whole(self) -> None:
        """Raises `ReadError` where a file was cut since it was mapped: whoever touches what is gone is killed."""
        if any(file.size() < len(file) for file in self.files):
            raise ReadError("a file of the datastore was cut short while in use: build it again")

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> "Chunk":
        """Raises `UserError` for tokens outside of the vocabulary, or more of them than one chunk can hold."""
        given = [np.asarray(one, np.int64) for one in documents]
        text = ReversedText(vocab_size, sum(len(one) + 1 for one in given))
        for one in given:
            text.add(one)
        raw = text.tokens_B.tobytes()
        return cls(raw, np.frombuffer(raw, text.width.dtype), sorted_positions(text.tokens_B))


class ReversedText:
    """Documents as they come, each written before the last into memory that is taken once.

    Args:
        room: how many tokens there may be, with a separator for every document.
    """

    def __init__(self, vocab_size: int, room: int) -> None:
        self.width, self._vocab_size = Width.of(vocab_size), vocab_size
        num_bytes, remedy = (room + 1) * self.width.num_bytes, "take fewer tokens"
        require(num_bytes <= MAX_TEXT_BYTES, f"a chunk must have at most {MAX_TEXT_BYTES} bytes", num_bytes, remedy)
        self._buffer = np.empty(room + 1, self.width.dtype)
        self._buffer[room] = self.width.separator
        self.room = room  # what is left of it
        self.num_tokens = self.num_documents = 0

    def add(self, document: Sequence[int] | NDArray[np.int64]) -> None:
        """Another document; one without tokens is none. Raises `UserError` for tokens outside of the vocabulary."""
        tokens = np.asarray(document, np.int64)
        if not len(tokens):
            return
        assert len(tokens) < self.room
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if len(wrong):
            raise UserError(
                f"tokens must lie in [0, {self._vocab_size}), got {wrong[0]}: take the tokenizer of this vocabulary"
            )
        end = self.room
        self.room -= len(tokens) + 1
        self._buffer[self.room] = self.width.separator
        self._buffer[self.room + 1 : end] = tokens[::-1]
        self.num_tokens += len(tokens)
        self.num_documents += 1

    @property
    def tokens_B(self) -> NDArray[np.unsignedinteger]:
        """The text so far."""
        return self._buffer[self.room :]


def sorted_positions(tokens_B: NDArray[np.unsignedinteger]) -> NDArray[np.int32]:
    """Positions of a reversed text, sorted by what begins there; those of which nothing stands before are left out.

    Sorted as bytes, for which there is a library; what begins within a token is dropped, in place: 4 bytes for every
    byte of the text is all that it takes.
    """
    import pydivsufsort

    separator, width = 256**tokens_B.itemsize - 1, tokens_B.itemsize
    order = pydivsufsort.divsufsort(tokens_B.view(np.uint8))
    num_kept = 0
    for lo in range(0, len(order), _BLOCK):
        at = order[lo : lo + _BLOCK]
        at = at[at % width == 0] // width
        at = at[tokens_B[at - 1] != separator]  # of the first position, that is the last separator
        order[num_kept : num_kept + len(at)] = at
        num_kept += len(at)
    return order[:num_kept].view(np.int32)  # ctypes' own type says the same, but memoryviews do not know it
