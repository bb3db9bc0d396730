"""A scan of a model's weights on their first read: odd or non-finite numbers are named.

Readers look at what they have just read, which is still in the processor's cache, and at every part
once: a reader waits for the disk most of its time, so that nothing waits for the scan.

Invariant: nothing is refused here. Whether such a number matters shows in the scores, and a draft's
changes no text.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from offload.checkpoint.numbers import (
    NOT_FINITE,
    Form,
    TensorMaximum,
    form_of,
    is_finite,
    is_matrix,
    remarks,
    top_bits,
)
from offload.checkpoint.safetensors import INFLATED, Checkpoint

_ASK = "offload verify says how much is damaged"
_Range = tuple[int, int]
_MOST_TOLD = 5  # of tensors that are not finite; where all are, nobody reads hundreds of lines


class _Watched(NamedTuple):
    """A tensor in its file."""

    lo: int
    hi: int
    name: str
    form: Form
    is_matrix: bool


class WeightScan:
    """Looks at the weights of a checkpoint as they are read, in any thread.

    Args:
        found: called once, in the thread that reads, with the first few tensors that have numbers
            that are not finite.
    """

    def __init__(self, checkpoint: Checkpoint, found: Callable[[str], None]) -> None:
        self._found, self._damaged = found, set[tuple[int, int]]()
        self._files, self._has_zeros = (
            [path.name for path in checkpoint.shards],
            has_zeros(checkpoint.directory),
        )
        watched: dict[int, list[_Watched]] = defaultdict(list)
        for name, entry in checkpoint.tensors.items():
            form = form_of(entry.dtype, name)
            if form is not None and entry.num_bytes:
                matters = is_matrix(entry.shape) or entry.coded is not None
                watched[entry.shard].append(_Watched(entry.lo, entry.hi, name, form, matters))
        self._watched = {
            shard: sorted(own, key=lambda one: one.lo) for shard, own in watched.items()
        }
        self._starts = {shard: [one.lo for one in own] for shard, own in self._watched.items()}
        self._seen, self._tops, self._lock = (
            set[int](),
            dict[tuple[int, int], tuple[int, list[_Range]]](),
            Lock(),
        )

    def look(self, shard: int, lo: int, stored: np.ndarray) -> None:
        """Look at bytes (uint8) of a file from byte `lo` on.

        A number, or block of numbers, that ends outside is left out.
        """
        # one number: of a large model there are many parts
        part = (shard << 48 | lo) << 32 | len(stored)
        if part in self._seen:
            return
        own = self._watched.get(shard, [])
        hi = lo + len(stored)
        for index in range(max(0, bisect_right(self._starts.get(shard, []), lo) - 1), len(own)):
            if own[index].lo >= hi:
                break
            self._look_at(shard, index, lo, stored)
        self._seen.add(part)

    @property
    def notes(self) -> list[str]:
        """Return what is odd about finite tensors of which all has been seen, for the user."""
        with self._lock:
            tops = {key: seen for key, seen in self._tops.items() if key not in self._damaged}
            found = [
                (self._watched[shard][index], shard, *seen) for (shard, index), seen in tops.items()
            ]
        whole = [
            TensorMaximum(one.name, self._files[shard], one.is_matrix, one.form, bits)
            for one, shard, bits, seen in found
            if seen == [(one.lo, one.hi)]
        ]
        return [f"{line}: {_ASK}" for line in remarks(whole, has_zeros=self._has_zeros)]

    def _look_at(self, shard: int, index: int, lo: int, stored: np.ndarray) -> None:
        one = self._watched[shard][index]
        item_bytes = self._watched[shard][index].form.item_bytes
        first = max(0, -(-(lo - one.lo) // item_bytes)) * item_bytes
        last = max(
            first, min(lo + len(stored) - one.lo, one.hi - one.lo) // item_bytes * item_bytes
        )
        bits = top_bits(stored[one.lo + first - lo : one.lo + last - lo], one.form)
        with self._lock:
            is_news = not is_finite(bits, one.form) and (shard, index) not in self._damaged
            if is_news:
                self._damaged.add((shard, index))
                is_news = len(self._damaged) <= _MOST_TOLD
            known, seen = self._tops.get((shard, index), (0, []))
            # A block that lies over the ends of two reads is looked at in neither; it counts as
            # seen.
            seen = _united(seen, max(lo, one.lo), min(lo + len(stored), one.hi))
            self._tops[shard, index] = max(known, bits), seen
        if is_news:
            self._found(f"{self._files[shard]}: {one.name:.200} {NOT_FINITE}: {_ASK}")


def _united(seen: list[_Range], lo: int, hi: int) -> list[_Range]:
    """Return ranges that lie apart, joined with one more: what is read twice is seen once."""
    met = [one for one in seen if one[0] <= hi and lo <= one[1]]
    ends = [lo, hi, *(end for one in met for end in one)]
    return [*(one for one in seen if one not in met), (min(ends), max(ends))]


def has_zeros(directory: Path) -> bool:
    """Return whether `inflate` has written a folder: it pads matrices with zeros."""
    return (directory / INFLATED).is_file()
