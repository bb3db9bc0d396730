"""A sum of all bytes that a text needs of a model, taken in whatever order they are read.

Every block of 4 KiB adds its 512 words of 64 bits to as many columns, and all of its words
together, times a number of its own, to a total of the file; columns and totals are one name in the
end. What differs within one block alone changes it for certain, words that changed places within a
block or blocks that did among each other as well, and anything else but for one case in 2^64. It is
no proof against people. Invariant: each block counts once, whoever reads it how often.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from threading import Lock

import numpy as np

from offload.checkpoint.identity import stored_entries
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.safetensors import Checkpoint

_WORDS = BLOCK_BYTES // 8
_CACHED_BLOCKS = 128  # that are added while they lie in a cache
_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)
_SHIFT = np.uint64(29)
_DIGEST_CHARS = 32
_Range = tuple[int, int]


class BlockSum:
    """What has been added so far; any thread may show it what it has read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        sizes = [stamp.num_bytes for stamp in checkpoint.stamps]
        self._left = _needed(checkpoint, sizes)
        self._left_bytes = self.total_bytes = sum(hi - lo for own in self._left for lo, hi in own)
        self._sums = np.zeros((len(sizes), _WORDS + 1), np.uint64)  # the last is the total
        self._lock = Lock()

    def look(self, shard: int, lo: int, stored: np.ndarray) -> None:
        """Add what is new of bytes (uint8) of a file from byte `lo` on."""
        if not self._left[shard]:
            return
        for first, end in self._claim(shard, lo, lo + len(stored)):
            sums = _added(stored[first - lo : end - lo], first // BLOCK_BYTES)
            with self._lock:
                self._sums[shard] += sums
                self._left_bytes -= end - first

    @property
    def left_bytes(self) -> int:
        """How much has not been added yet."""
        return self._left_bytes

    def left(self) -> list[tuple[int, int, int]]:
        """Which bytes have not been read yet: shard, [lo, hi)."""
        with self._lock:
            return [(shard, lo, hi) for shard, own in enumerate(self._left) for lo, hi in own]

    @property
    def result(self) -> str | None:
        """The sum; None before all has been added."""
        if self._left_bytes:
            return None
        return hashlib.sha256(self._sums.astype("<u8").tobytes()).hexdigest()[:_DIGEST_CHARS]

    def _claim(self, shard: int, lo: int, hi: int) -> list[_Range]:
        """What nobody else adds of these bytes: whole blocks, or the end of the file."""
        with self._lock:
            left = self._left[shard]
            claimed = list[_Range]()
            index = max(0, bisect_right(left, (lo, lo)) - 1)
            lo = -(-lo // BLOCK_BYTES) * BLOCK_BYTES
            while index < len(left) and left[index][0] < hi:
                own_lo, own_hi = left[index]
                first = max(lo, own_lo)
                end = own_hi if own_hi <= hi else hi // BLOCK_BYTES * BLOCK_BYTES
                if first >= end:
                    index += 1
                    continue
                claimed.append((first, end))
                rest = [one for one in ((own_lo, first), (end, own_hi)) if one[0] < one[1]]
                left[index : index + 1] = rest
                index += len(rest)
            return claimed


def _needed(checkpoint: Checkpoint, sizes: list[int]) -> list[list[_Range]]:
    """By file, the blocks in which bytes of tensors lie, as ranges apart from each other."""
    spans = sorted(
        (one.shard, one.lo, one.hi) for _, one in stored_entries(checkpoint) if one.num_bytes
    )
    needed: list[list[_Range]] = [[] for _ in sizes]
    for shard, lo, hi in spans:
        lo = lo // BLOCK_BYTES * BLOCK_BYTES
        hi = min(-(-hi // BLOCK_BYTES) * BLOCK_BYTES, sizes[shard])
        own = needed[shard]
        if own and lo <= own[-1][1]:
            own[-1] = own[-1][0], max(hi, own[-1][1])
        else:
            own.append((lo, hi))
    return needed


def _added(stored: np.ndarray, first_block: int) -> np.ndarray:
    """Column sums and total of bytes from the beginning of a block on; an end of a file is filled
    up with zeros.
    """
    sums = np.zeros(_WORDS + 1, np.uint64)
    for block, words in _in_caches(stored, first_block):
        keys = np.arange(block + 1, block + 1 + len(words), dtype=np.uint64) * _ODD
        keys = (keys ^ (keys >> _SHIFT)) * _ODD
        sums[:_WORDS] += words.sum(axis=0)
        sums[_WORDS:] += (words.sum(axis=1) * keys).sum(keepdims=True)
    return sums


def _in_caches(stored: np.ndarray, first_block: int) -> Iterator[tuple[int, np.ndarray]]:
    """The number of a block, and the words (blocks, 512) of it and a few behind it."""
    num_whole = len(stored) // BLOCK_BYTES
    words = stored[: num_whole * BLOCK_BYTES].view(np.uint64).reshape(num_whole, _WORDS)
    for at in range(0, num_whole, _CACHED_BLOCKS):
        yield first_block + at, words[at : at + _CACHED_BLOCKS]
    if cut := len(stored) - num_whole * BLOCK_BYTES:
        last = np.zeros(BLOCK_BYTES, np.uint8)
        last[:cut] = stored[num_whole * BLOCK_BYTES :]
        yield first_block + num_whole, last.view(np.uint64).reshape(1, _WORDS)
