"""What the link gives on this machine, measured on the very files that will be streamed."""

import time
from pathlib import Path

from offload.host_store import HostStore, allocate
from offload.layout import Piece, SlabLayout

_CHUNK_BYTES = 64 << 20


def link_bytes_per_s(shard: Path, *, budget_s: float = 0.4, limit_bytes_per_s: float | None = None) -> float:
    """Bytes per second at which a slab of `shard` arrives, the way a sweep reads it.

    Args:
        limit_bytes_per_s: of the link, where it is slowed down on purpose.
    """
    size_bytes = shard.stat().st_size
    slab = allocate(min(_CHUNK_BYTES, -(-size_bytes // 4096) * 4096))
    store = HostStore([shard], rate_limit_bytes_per_s=limit_bytes_per_s)
    started, lo = time.perf_counter(), 0
    try:
        while time.perf_counter() - started < budget_s:
            hi = min(lo + _CHUNK_BYTES, size_bytes)
            for future in store.read(SlabLayout((Piece(0, lo, hi, 0),), {}, slab.nbytes, is_direct=True), slab):
                future.result()
            lo = hi if hi < size_bytes else 0
        return store.bytes_read / (time.perf_counter() - started)
    finally:
        store.close()
