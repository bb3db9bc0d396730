"""A checksum over all bytes that a text needs of a model, added up in any order of reading.

It is taken while readers bring the weights, or by reading what is left of them. Each block of 4 KiB
adds its 512 words of 64 bits to 512 column sums, and the sum of its words, times a key that depends
on the block's number, to one total of the file. The columns and totals are hashed into one name. A
change within a single block always changes the name, and so do words that change places within a
block and blocks that change places; any other change goes unseen in one case of 2^64. It is no
protection against forgery. Invariant: each block counts once, however often and by however many
threads it is read.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Lock

import numpy as np

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.identity import ModelIdentity, keep_sum
from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, SlabRead
from offload.streaming.disk import ByteSource, DiskReader, OpenSource, allocate, finish

_WORDS = BLOCK_BYTES // 8
_CACHED_BLOCKS = 128  # a batch that stays in a processor's cache while it is added
_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)
_SHIFT = np.uint64(29)
_DIGEST_CHARS = 32
_Range = tuple[int, int]

# bytes in memory at a time
_PART_BYTES = 16 << 20
OnBytes = Callable[[int, int], None]


class BlockSum:
    """The sum of the blocks that have been read so far; any thread may add to it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        sizes = [stamp.num_bytes for stamp in checkpoint.stamps]
        self._left = _blocks_of_tensors(checkpoint, sizes)
        self.total_bytes = sum(hi - lo for own in self._left for lo, hi in own)
        self._left_bytes = self.total_bytes
        # columns, then the total
        self._sums = np.zeros((len(sizes), _WORDS + 1), np.uint64)
        self._lock = Lock()

    def look(self, shard: int, lo: int, stored: np.ndarray) -> None:
        """Add those blocks of a file's bytes from `lo` on that have not counted yet."""
        if not self._left[shard]:
            return
        for first, end in self._claim(shard, lo, lo + len(stored)):
            sums = _sums_of(stored[first - lo : end - lo], first // BLOCK_BYTES)
            with self._lock:
                self._sums[shard] += sums
                self._left_bytes -= end - first

    @property
    def left_bytes(self) -> int:
        """Return how many bytes have not been added yet."""
        return self._left_bytes

    def left(self) -> list[tuple[int, int, int]]:
        """Return the byte ranges that have not been read yet: (shard, lo, hi) for [lo, hi)."""
        with self._lock:
            return [(shard, lo, hi) for shard, own in enumerate(self._left) for lo, hi in own]

    @property
    def result(self) -> str | None:
        """Return the checksum, or None until all bytes have been added."""
        if self._left_bytes:
            return None
        return hashlib.sha256(self._sums.astype("<u8").tobytes()).hexdigest()[:_DIGEST_CHARS]

    def _claim(self, shard: int, lo: int, hi: int) -> list[_Range]:
        """Take the blocks in [lo, hi), or the end of the file, that no thread has taken."""
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


def _blocks_of_tensors(checkpoint: Checkpoint, sizes: list[int]) -> list[list[_Range]]:
    """Return the blocks that hold bytes of tensors, as disjoint ranges for each file."""
    entries = (one for _, one in checkpoint.stored_entries if one.num_bytes)
    spans = sorted((one.shard, one.lo, one.hi) for one in entries)
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


def _sums_of(stored: np.ndarray, first_block: int) -> np.ndarray:
    """Return column sums and total of bytes that begin at a block, filled up with zeros."""
    sums = np.zeros(_WORDS + 1, np.uint64)
    for block, words in _cached_batches(stored, first_block):
        keys = np.arange(block + 1, block + 1 + len(words), dtype=np.uint64) * _ODD
        keys = (keys ^ (keys >> _SHIFT)) * _ODD
        sums[:_WORDS] += words.sum(axis=0)
        sums[_WORDS:] += (words.sum(axis=1) * keys).sum(keepdims=True)
    return sums


def _cached_batches(stored: np.ndarray, first_block: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield batches of blocks that fit a cache: number of the first, words (blocks, 512)."""
    num_whole = len(stored) // BLOCK_BYTES
    words = stored[: num_whole * BLOCK_BYTES].view(np.uint64).reshape(num_whole, _WORDS)
    for at in range(0, num_whole, _CACHED_BLOCKS):
        yield first_block + at, words[at : at + _CACHED_BLOCKS]
    if cut := len(stored) - num_whole * BLOCK_BYTES:
        last = np.zeros(BLOCK_BYTES, np.uint8)
        last[:cut] = stored[num_whole * BLOCK_BYTES :]
        yield first_block + num_whole, last.view(np.uint64).reshape(1, _WORDS)


def read_left(
    total: BlockSum, source: ByteSource, on_bytes: OnBytes = lambda done, of: None
) -> str:
    """Read all that a sum lacks from a source that shows it what it reads. Raises `ReadError`."""
    slab = allocate(_PART_BYTES)
    for shard, lo, hi in total.left():
        for at in range(lo, hi, _PART_BYTES):
            end = min(hi, at + _PART_BYTES)
            layout = SlabLayout((SlabRead(shard, at, end, 0),), {}, _PART_BYTES, is_direct=True)
            finish(source.read(layout, slab))
            on_bytes(total.total_bytes - total.left_bytes, total.total_bytes)
    result = total.result
    assert result is not None, "all has been read"
    return result


def with_sum(
    checkpoint: Checkpoint,
    identity: ModelIdentity,
    total: BlockSum | None = None,
    *,
    open_source: OpenSource = DiskReader,
    limit_bytes_per_s: float | None = None,
    on_bytes: OnBytes = lambda done, of: None,
) -> ModelIdentity:
    """Return the identity with the sum of all bytes, which is kept for the next time.

    What `total` lacks of the sum is read. Raises `ReadError`.
    """
    total = total or BlockSum(checkpoint)
    if (result := total.result) is None:
        how = {
            "stamps": checkpoint.stamps,
            "rate_limit_bytes_per_s": limit_bytes_per_s,
            "watcher": total.look,
        }
        with closing(open_source(checkpoint.shards, **how)) as source:
            result = read_left(total, source, on_bytes)
    keep_sum(identity, result)
    return identity.with_sum(result)
