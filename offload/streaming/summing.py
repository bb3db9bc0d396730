"""A checksum over all bytes that a text needs of a model, added up in any order of reading.

It is taken while readers bring the weights, or by reading what is left of them. Each block of
128 KiB has an XXH3 of 128 bits, seeded with the block's place, and the sum of all of them names
the weights. XXH3 mixes words with one another, so no structure of a change makes it likelier to be
missed: one case in 2^64 at most. It is no protection against forgery. Invariant: each block counts
once, however often, in whatever pieces and by however many threads it is read.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import closing
from threading import Lock

import numpy as np
from xxhash import xxh3_128_intdigest

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.identity import ModelIdentity, keep_sum
from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, SlabRead, allocate
from offload.streaming.disk import ByteSource, DiskReader, OpenSource, finish

# A block has a mask with a bit for each of its sectors, which readers bring whole.
_SECTORS = 32
_WHOLE = (1 << _SECTORS) - 1
_HASHED_BYTES = _SECTORS * BLOCK_BYTES
# Blocks that are kept in part until the rest is read; of others the bytes are read again.
_MOST_PARTS = 256

# bytes in memory at a time
_PART_BYTES = 16 << 20
OnBytes = Callable[[int, int], None]


class BlockSum:
    """The sum of the blocks that have been read so far; any thread may add to it.

    Attributes:
        total_bytes: of all sectors that hold weights.
        left_bytes: of those that were not added yet.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._sizes = [stamp.num_bytes for stamp in checkpoint.stamps]
        self._needed = _sectors_of_tensors(checkpoint, self._sizes)
        self._left = [masks.copy() for masks in self._needed]
        self._parts = dict[tuple[int, int], np.ndarray]()
        self._sum = 0
        self._lock = Lock()
        self.total_bytes = sum(int(np.bitwise_count(masks).sum()) for masks in self._needed)
        self.total_bytes *= BLOCK_BYTES
        self.left_bytes = self.total_bytes

    def look(self, shard: int, lo: int, stored: np.ndarray) -> None:
        """Add those sectors of a file's bytes from `lo` on that have not counted yet."""
        hi = lo + len(stored)
        whole = range(-(-lo // _HASHED_BYTES), hi // _HASHED_BYTES)
        # One reader hashes at a time: each hash gives Python's lock away, and several readers that
        # win it back from one another take more of a fast disk's time than hashing does.
        with self._lock:
            done = self._add_whole(shard, lo, stored, whole)
            for block in range(lo // _HASHED_BYTES, -(-hi // _HASHED_BYTES)):
                if block in done:
                    continue
                first = max(lo, block * _HASHED_BYTES)
                end = min(hi, (block + 1) * _HASHED_BYTES)
                content = self._claim(shard, block, first, stored[first - lo : end - lo])
                if content is not None:
                    self._sum += xxh3_128_intdigest(content.data, seed=shard << 40 | block)

    def _add_whole(self, shard: int, lo: int, stored: np.ndarray, blocks: range) -> Container[int]:
        """Add the sums of blocks that were read whole and not counted before; return these blocks.

        Readers hold Python's lock for little else, so there are as few steps for each as may be.
        """
        if not blocks:
            return ()
        masks = self._left[shard][blocks.start : blocks.stop]
        is_fresh = masks == _WHOLE
        masks[is_fresh] = 0
        fresh = (blocks.start + np.flatnonzero(is_fresh)).tolist()
        self.left_bytes -= len(fresh) * _HASHED_BYTES
        view = stored.data
        for block in fresh:
            start = block * _HASHED_BYTES - lo
            content = view[start : start + _HASHED_BYTES]
            self._sum += xxh3_128_intdigest(content, seed=shard << 40 | block)
        return blocks if len(fresh) == len(blocks) else set(fresh)

    def left(self) -> list[tuple[int, int, int]]:
        """Return the byte ranges that have not been read yet: (shard, lo, hi) for [lo, hi)."""
        with self._lock:
            return [
                (shard, lo * BLOCK_BYTES, min(hi * BLOCK_BYTES, self._sizes[shard]))
                for shard, masks in enumerate(self._left)
                for lo, hi in _runs(masks)
            ]

    @property
    def result(self) -> str | None:
        """Return the checksum, or None until all bytes have been added."""
        return None if self.left_bytes else f"{self._sum % (1 << 128):032x}"

    def _claim(self, shard: int, block: int, lo: int, stored: np.ndarray) -> np.ndarray | None:
        """Return the block's content once all of it is here.

        `stored` are bytes of the block from byte `lo` of the file on. Sectors that hold no weights,
        and what lies beyond the file's end, count as zeros.
        """
        start = block * _HASHED_BYTES
        hi = lo + len(stored)
        first = -(-(lo - start) // BLOCK_BYTES)
        is_end = hi == self._sizes[shard]
        end = -(-(hi - start) // BLOCK_BYTES) if is_end else (hi - start) // BLOCK_BYTES
        covered = (1 << max(first, end)) - (1 << first)
        left = int(self._left[shard][block])
        fresh = left & covered
        if not fresh:
            return None
        if (shard, block) in self._parts or len(self._parts) < _MOST_PARTS:
            empty = np.zeros(_HASHED_BYTES, np.uint8)
            content = self._parts.setdefault((shard, block), empty)
            for run_lo, run_hi in _runs(np.array([fresh], "<u4")):
                piece = stored[start - lo + run_lo * BLOCK_BYTES :][
                    : (run_hi - run_lo) * BLOCK_BYTES
                ]
                content[run_lo * BLOCK_BYTES :][: len(piece)] = piece
        else:
            return None
        self._left[shard][block] = left & ~fresh
        self.left_bytes -= fresh.bit_count() * BLOCK_BYTES
        if left & ~fresh:
            return None
        self._parts.pop((shard, block), None)
        return content


def _sectors_of_tensors(checkpoint: Checkpoint, sizes: list[int]) -> list[np.ndarray]:
    """Return the masks (uint32) of all blocks of each file: sectors with bytes of tensors."""
    sectors = [np.zeros(-(-size // _HASHED_BYTES) * _SECTORS, np.bool_) for size in sizes]
    for _, entry in checkpoint.stored_entries:
        if entry.num_bytes:
            sectors[entry.shard][entry.lo // BLOCK_BYTES : -(-entry.hi // BLOCK_BYTES)] = True
    return [np.packbits(flags, bitorder="little").view("<u4") for flags in sectors]


def _runs(masks: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield [lo, hi) of sectors that follow one another, of masks in a row."""
    flags = np.unpackbits(masks.view(np.uint8), bitorder="little").view(np.int8)
    edges = np.flatnonzero(np.diff(flags, prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


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
        settings = {
            "stamps": checkpoint.stamps,
            "rate_limit_bytes_per_s": limit_bytes_per_s,
            "watcher": total.look,
        }
        with closing(open_source(checkpoint.shards, **settings)) as source:
            result = read_left(total, source, on_bytes)
    keep_sum(identity, result)
    return identity.with_sum(result)
