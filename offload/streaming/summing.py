"""Sums of all weights: taken while readers bring them, or by reading what is left of them."""

from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import numpy as np

from offload.checkpoint.block_sum import BlockSum
from offload.checkpoint.identity import ModelIdentity, keep_sum, same_model
from offload.checkpoint.layout import SlabLayout, SlabRead
from offload.checkpoint.safetensors import Checkpoint
from offload.streaming.disk import ByteSource, DiskReader, OpenSource, Watcher, allocate, finish

# bytes in memory at a time
_PART_BYTES = 16 << 20
OnBytes = Callable[[int, int], None]


class Watchers(NamedTuple):
    """Several watchers as one."""

    watchers: tuple[Watcher, ...]

    def look(self, shard: int, lo: int, stored: np.ndarray) -> None:
        """Show the bytes to each, see `Watcher`."""
        for one in self.watchers:
            one.look(shard, lo, stored)


def read_left(
    total: BlockSum, source: ByteSource, on_bytes: OnBytes = lambda done, of: None
) -> str:
    """Read all that a sum lacks from a source that shows it what it reads; return the sum.

    Raises `ReadError`.
    """
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
            "watcher": total,
        }
        with closing(open_source(checkpoint.shards, **how)) as source:
            result = read_left(total, source, on_bytes)
    keep_sum(identity, result)
    return identity.with_sum(result)


def difference(
    told: ModelIdentity, mine: ModelIdentity, summed: Callable[[], ModelIdentity]
) -> tuple[str, ModelIdentity]:
    """Return why a file belongs to another model (empty if it does not), and this model's identity.

    Args:
        told: what the file tells of its model.
        summed: reads all weights, which is done where nothing else can tell.
    """
    if told.has_weights_of(mine) is None and not told.difference(mine) and told.has_sum:
        mine = summed()
    return same_model(told, mine), mine
