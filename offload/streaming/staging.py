"""A ring of locked host memory that kernels of a device read: small tensors get there without a copy of their own.

A device serves copies of one direction in their order, whatever stream they are of, so a copy would wait for all layers
queued before it.

Invariant: a part of the ring is written again only after the event behind its last reader has been reached.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

STAGING_BYTES = 32 << 20  # twice the embeddings of the largest trees
_ALIGN_BYTES, _WORD_BYTES = 256, 8
_PART_BYTES = 1 << 20  # small tensors in a row share an event, so that there are few


class _Part(NamedTuple):
    """Bytes that kernels read, or have read. Places go on counting where the ring begins anew."""

    lo: int
    hi: int
    read: Any  # an event of the stream that computes, behind the last of them


class StagingRing:
    """Tensors of the host become tensors of the device, through `array` (flat uint8, locked, a multiple of 256 bytes).

    `seen` is the same memory as the device sees it, int64; `record` gives an event behind all that has been given to
    the stream that computes, `synchronize` waits for one.
    """

    def __init__(
        self, array: np.ndarray, seen: Tensor, record: Callable[[], Any], synchronize: Callable[[Any], None]
    ) -> None:
        self._array, self._seen, self._record, self._synchronize = array, seen, record, synchronize
        self._parts, self._next = deque[_Part](), 0

    def has_room_for(self, source: Tensor) -> bool:
        """Whether it fits at all."""
        return 0 < source.numel() * source.element_size() <= len(self._array)

    def send(self, source: Tensor) -> Tensor:
        """The same numbers on the device, for what is enqueued from now on where it computes."""
        given = source.contiguous().flatten().view(torch.uint8).numpy()
        place = self._free_place(len(given))
        lo = place % len(self._array)
        self._array[lo : lo + len(given)] = given
        words = self._seen[lo // _WORD_BYTES : -(-(lo + len(given)) // _WORD_BYTES)]
        sent = words.bitwise_or(0)  # which is a kernel; `copy_` would be a copy, in the queue of all others
        self._note(place, place + len(given))
        return sent.view(torch.uint8)[: len(given)].view(source.dtype).view(source.shape)

    def _free_place(self, num_bytes: int) -> int:
        """Where the next bytes go, in one piece; waits for whoever still reads there."""
        size, lo = len(self._array), self._next
        if lo % size + num_bytes > size:
            lo = (lo // size + 1) * size
        last = None
        while self._parts and self._parts[0].lo + size < lo + num_bytes:
            last = self._parts.popleft()
        if last is not None:  # readers finish in the order in which they were asked
            self._synchronize(last.read)
        self._next = -(-(lo + num_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        return lo

    def _note(self, lo: int, hi: int) -> None:
        if self._parts and hi - self._parts[-1].lo <= _PART_BYTES:
            lo = self._parts.pop().lo
        self._parts.append(_Part(lo, hi, self._record()))
