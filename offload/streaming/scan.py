"""A scan of a model's weights on their first read: odd or non-finite numbers are named.

Readers look at what they have just read, which is still in the processor's cache. What is read once
is scanned whole, while there is nothing to compute. Of what passes in every sweep, each sweep scans
one part of `TURNS`: at the speed of a disk that keeps up with the processor, a scan of all of it
would cost the first sweep a seventh of its time.

Invariants: after `TURNS` sweeps all numbers have been scanned, and nothing is refused here. Whether
such a number matters shows in the scores, and a draft's changes no text.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import INFLATED
from offload.checkpoint.layout import SlabLayout
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
from offload.memory.tiers import LayerTier

# Sweeps until all of what passes has been looked at.
TURNS = 16
# Parts of one read; it has a turn in every second sweep, since asking alone takes time.
_NUM_STRIPES = TURNS // 2
# Runs are this short so that damage of 3 MiB in a row shows in the first sweep.
_STRIPE_BYTES = 16 << 10
# A smaller part of a tensor is looked at whole, which costs nothing.
_LEAST_BYTES = 128 << 10
_ASK = "offload verify says how much is damaged"
_Range = tuple[int, int]
# Tensors that are named as not finite: where all are, hundreds of lines would not be read.
_MOST_TOLD = 5


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

    def __init__(self, checkpoint: Checkpoint, report: Callable[[str], None]) -> None:
        self._found = report
        self._damaged = set[tuple[int, int]]()
        self._files = [path.name for path in checkpoint.shards]
        self._has_zeros = has_zeros(checkpoint.directory)
        watched: dict[int, list[_Watched]] = defaultdict(list)
        for name, entry in checkpoint.tensors.items():
            form = form_of(entry.dtype, name)
            if form is not None and entry.num_bytes:
                matters = is_matrix(entry.shape) or entry.coded is not None
                watched[entry.shard].append(_Watched(entry.lo, entry.hi, name, form, matters))
        self._watched = {shard: sorted(tensors) for shard, tensors in watched.items()}
        self._starts = {
            shard: [tensor.lo for tensor in tensors] for shard, tensors in self._watched.items()
        }
        self._tops = dict[tuple[int, int], tuple[int, list[_Range]]]()
        self._lock = Lock()
        self._turns = dict[int, int]()  # of every part that was read
        self._told = set[tuple[int, int]]()
        self._passing = dict[int, list[_Range]]()

    def expect(self, layouts: Sequence[SlabLayout], tier_L: Sequence[LayerTier]) -> None:
        """Note which layers are read from disk in every sweep; all else is looked at whole."""
        passing: dict[int, list[_Range]] = defaultdict(list)
        for layout, tier in zip(layouts, tier_L, strict=True):
            for piece in layout.pieces if tier is LayerTier.DISK else ():
                passing[piece.shard].append((piece.lo, piece.hi))
        self._passing = {shard: sorted(ranges) for shard, ranges in passing.items()}

    def look(self, shard: int, lo: int, stored: np.ndarray) -> None:
        """Look at bytes (uint8) of a file from byte `lo` on.

        A number, or block of numbers, that ends outside is left out.
        """
        # one number: of a large model there are many parts
        part = (shard << 48 | lo) << 32 | len(stored)
        turn = self._turns.get(part, 0)
        if turn >= TURNS:
            return
        tensors = self._watched.get(shard, [])
        hi = lo + len(stored)
        is_passing = self._passes(shard, lo + len(stored) // 2)
        self._turns[part] = turn + 1 if is_passing else TURNS
        if is_passing and turn and _stripe_at(lo, turn) is None:
            return
        for index in range(max(0, bisect_right(self._starts.get(shard, []), lo) - 1), len(tensors)):
            if tensors[index].lo >= hi:
                break
            self._look_at(shard, index, lo, stored, turn if is_passing else None)

    def news(self) -> list[str]:
        """Return remarks on finite tensors that were scanned whole since the last call."""
        with self._lock:
            tops = list[TensorMaximum]()
            for (shard, index), (bits, seen) in self._tops.items():
                key = (shard, index)
                tensor = self._watched[shard][index]
                is_whole = seen == [(tensor.lo, tensor.hi)]
                if is_whole and key not in self._damaged and key not in self._told:
                    self._told.add(key)
                    file = self._files[shard]
                    tops.append(
                        TensorMaximum(tensor.name, file, tensor.is_matrix, tensor.form, bits)
                    )
        return [f"{line}: {_ASK}" for line in remarks(tops, has_zeros=self._has_zeros)]

    def _passes(self, shard: int, at: int) -> bool:
        """Return True if this byte of a file is read in every sweep."""
        ranges = self._passing.get(shard, [])
        index = bisect_right(ranges, (at, 1 << 62)) - 1
        return index >= 0 and at < ranges[index][1]

    def _look_at(
        self, shard: int, index: int, lo: int, stored: np.ndarray, turn: int | None
    ) -> None:
        """Look at what there is of one tensor, or at its stripe of this turn where it passes again.

        A small tensor is looked at in the first turn.
        """
        tensor = self._watched[shard][index]
        item_bytes = tensor.form.item_bytes
        first = max(0, -(-(lo - tensor.lo) // item_bytes)) * item_bytes
        end = min(lo + len(stored), tensor.hi) - tensor.lo
        last = max(first, end // item_bytes * item_bytes)
        looked_at = [stored[tensor.lo + first - lo : tensor.lo + last - lo]]
        is_last = True
        if turn is not None and last - first >= _LEAST_BYTES:
            stripe = _stripe_at(lo, turn)
            if stripe is None:
                return
            looked_at = _stripes(looked_at[0], item_bytes, stripe)
            is_last = stripe == _NUM_STRIPES - 1
        elif turn:
            return
        bits = max(top_bits(some, tensor.form) for some in looked_at)
        with self._lock:
            is_news = not is_finite(bits, tensor.form) and (shard, index) not in self._damaged
            if is_news:
                self._damaged.add((shard, index))
                is_news = len(self._damaged) <= _MOST_TOLD
            known, seen = self._tops.get((shard, index), (0, []))
            # A block that lies over the ends of two reads is looked at in neither; it counts as
            # seen.
            if is_last:
                seen = _with_range(seen, max(lo, tensor.lo), min(lo + len(stored), tensor.hi))
            self._tops[shard, index] = max(known, bits), seen
        if is_news:
            self._found(f"{self._files[shard]}: {tensor.name:.200} {NOT_FINITE}: {_ASK}")


def _stripe_at(lo: int, turn: int) -> int | None:
    """Return which stripe of a read from byte `lo` on has this turn; None where others have one."""
    return turn // 2 if turn % 2 == (lo >> 21) % 2 else None


def _stripes(stored: np.ndarray, item_bytes: int, stripe: int) -> list[np.ndarray]:
    """Return every `_NUM_STRIPES`-th run of whole items from that on, bytes (uint8).

    The last stripe has what is left, too. Views: a copy of a stripe takes as long as a look at it.
    """
    step = max(1, _STRIPE_BYTES // item_bytes) * item_bytes
    end = len(stored) // (step * _NUM_STRIPES) * (step * _NUM_STRIPES)
    rows = stored[:end].reshape(-1, _NUM_STRIPES, step)[:, stripe]
    return [rows, stored[end:]] if stripe == _NUM_STRIPES - 1 else [rows]


def _with_range(seen: list[_Range], lo: int, hi: int) -> list[_Range]:
    """Return disjoint ranges with one more range merged in, so that bytes read twice count once."""
    met = [span for span in seen if span[0] <= hi and lo <= span[1]]
    ends = [lo, hi, *(end for span in met for end in span)]
    return [*(span for span in seen if span not in met), (min(ends), max(ends))]


def has_zeros(directory: Path) -> bool:
    """Return True if `inflate` has written a folder: it pads matrices with zeros."""
    return (directory / INFLATED).is_file()
