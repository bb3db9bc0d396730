"""Where the bytes of slabs come from: a disk, or whatever else can put them into host memory."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np

from offload.checkpoint.layout import SlabLayout


class ByteSource(Protocol):
    """The weight files of one checkpoint. Whoever opens a source closes it."""

    paths: Sequence[Path]  # by the numbers of their shards
    rate_limit_bytes_per_s: float | None  # that reads are slowed down to, for studies

    @property
    def note(self) -> str | None:
        """A line for the user when the fast way to read is not open."""

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        """Start filling page-aligned uint8; valid once all futures are done, whose `result()` may raise `ReadError`."""

    def fetch(self, layout: SlabLayout) -> np.ndarray:
        """A slab of its own, complete. Raises `ReadError`."""

    def close(self) -> None:
        """Drop queued reads and wait for running ones."""


# Of shards, of `stamps` that these must have, and of `rate_limit_bytes_per_s` where it is slowed down.
OpenSource = Callable[..., ByteSource]


def finish(reads: Iterable[Future[None]]) -> None:
    """Return once all of these reads have arrived. Raises `ReadError`."""
    for read in reads:
        read.result()


def drop(reads: Iterable[Future[None]]) -> None:
    """Return once no reader touches the slab any more; what a dropped read would have reported no longer matters."""
    for read in reads:
        if not read.cancel():
            read.exception()


def read_all(
    source: ByteSource, slabs: Iterable[tuple[SlabLayout, np.ndarray]], on_bytes: Callable[[int], None]
) -> None:
    """Fill all of these slabs; `on_bytes` hears of each that has landed. Raises `ReadError`."""
    reads = list[tuple[int, list[Future[None]]]]()
    try:
        for layout, slab in slabs:
            reads.append((layout.slab_bytes, source.read(layout, slab)))
        for num_bytes, futures in reads:
            finish(futures)
            on_bytes(num_bytes)
    finally:
        for _, futures in reads:
            drop(futures)
