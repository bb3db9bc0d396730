"""Is a store what was written, and sorted as searches need it? Every byte is read once, and every position checked.

Why beside checksums: whoever edits a store can edit those, too. A store that passes gives right answers.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.config import require
from offload.datastore.chunk import Chunk, Width
from offload.datastore.store import AGAIN, FileEntry, Store, chunk_files, map_chunk

_BLOCK_BYTES = 1 << 22
_BLOCK = 1 << 20  # positions that are looked at together


def verify(store: Store, on_bytes: Callable[[int, int], object]) -> None:
    """Raises `UserError` for the first thing that is wrong; `on_bytes` hears of the bytes done and all.

    Takes some eight bytes of memory for every token of the largest chunk.
    """
    done_bytes = 0
    for index, entry in enumerate(store.chunks):
        files, chunk = chunk_files(store.path, index), map_chunk(store, index)
        for path, wanted, part in zip(files, entry[2:], (chunk.tokens_B, chunk.position_M), strict=True):
            for num_bytes in _check_sum(path, wanted, part.view(np.uint8)):
                done_bytes += num_bytes
                on_bytes(done_bytes, store.num_bytes)
        _check_tokens(files[0], chunk, store.vocab_size, entry.num_documents)
        _check_order(files[1], chunk, Width.of(store.vocab_size).separator)


def _check_sum(path: Path, wanted: FileEntry, raw_B: NDArray[np.uint8]) -> Iterator[int]:
    """Yields the bytes of every block that was read."""
    digest = hashlib.sha256()
    for lo in range(0, len(raw_B), _BLOCK_BYTES):
        block = raw_B[lo : lo + _BLOCK_BYTES].data
        digest.update(block)
        yield len(block)
    found = digest.hexdigest()
    require(found == wanted.sha256, f"{path} must have sha256 {wanted.sha256[:12]}...", f"{found[:12]}...", AGAIN)


def _check_tokens(path: Path, chunk: Chunk, vocab_size: int, num_documents: int) -> None:
    """Of the vocabulary all of them, and a separator before, between and after the documents, which are not empty."""
    tokens_B, separator = chunk.tokens_B, Width.of(vocab_size).separator
    is_end_B = tokens_B == separator
    wrong = tokens_B[(tokens_B >= vocab_size) & ~is_end_B]
    require(not len(wrong), f"{path}: tokens must lie below {vocab_size}", wrong[:1], AGAIN)
    is_parted = is_end_B[0] and is_end_B[-1] and not np.any(is_end_B[1:] & is_end_B[:-1])
    num_ends = np.count_nonzero(is_end_B)
    is_right = is_parted and num_ends == num_documents + 1
    require(is_right, f"{path} must hold {num_documents} documents between separators", num_ends - 1, AGAIN)


def _check_order(path: Path, chunk: Chunk, separator: int) -> None:
    """Every position once but those behind separators, and each suffix no less than the one before.

    Two suffixes with the same first token are in order if what follows is, which is read off the positions' own ranks.
    Behind a separator nothing is compared, because no search looks further.
    """
    tokens_B, position_M = chunk.tokens_B, chunk.position_M
    is_inside = position_M.min() > 0 and position_M.max() < len(tokens_B)
    require(is_inside, f"{path}: positions must lie in [1, {len(tokens_B)})", position_M.min(), AGAIN)
    rank_B = np.full(len(tokens_B) + 1, -1, np.int32)
    rank_B[position_M] = np.arange(len(position_M), dtype=np.int32)
    is_complete = np.array_equal(rank_B[1:-1] >= 0, tokens_B[:-1] != separator)
    require(is_complete, f"{path} must hold every position once", "others", AGAIN)
    for lo in range(0, len(position_M) - 1, _BLOCK):
        at, then = position_M[lo : lo + _BLOCK], position_M[lo + 1 : lo + 1 + _BLOCK]
        at = at[: len(then)]
        token, later = tokens_B[at], tokens_B[then]
        is_right = (token < later) | (token == later) & ((token == separator) | (rank_B[at + 1] < rank_B[then + 1]))
        wrong = np.flatnonzero(~is_right)
        require(not len(wrong), f"{path} must be sorted", f"another order at {lo + wrong[:1]}", AGAIN)
