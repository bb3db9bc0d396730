"""Scores of a tree's nodes, computed when a walk reads them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class Logits:
    """Scores of N nodes, computed a chunk of rows at a time.

    The logits of 768 rows and 128,000 tokens take 200 MB in bf16, and a walk down a tree looks at a
    handful of rows. So the last hidden states of all nodes are kept, which are small, and the head
    is applied to the chunk with the node that is looked at. The first chunk is given; `score`
    computes rows [lo, hi).

    Invariant: at most one chunk is held, and it is let go before the next one is computed; since a
    path's nodes lie behind one another, none is computed twice.
    """

    def __init__(
        self, num_rows: int, max_rows: int, first_CV: Tensor, score: Callable[[int, int], Tensor]
    ) -> None:
        assert len(first_CV) == min(num_rows, max_rows), (
            f"{len(first_CV)} rows scored, {num_rows} in all"
        )
        self._num_rows = num_rows
        self._max_rows = max_rows
        self._score = score
        self._lo = 0
        self._chunk_CV = first_CV

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, node: int) -> Tensor:
        lo, chunk_CV = self.chunk_with(node)
        return chunk_CV[node - lo]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[node] for node in range(len(self)))

    def chunk_with(self, node: int) -> tuple[int, Tensor]:
        """Return the chunk that has a node: its first row, and its logits (C, V)."""
        assert 0 <= node < len(self), f"node {node} of {len(self)}"
        lo = node - node % self._max_rows
        if lo != self._lo:
            del self._chunk_CV
            self._chunk_CV = self._score(lo, min(lo + self._max_rows, len(self)))
            self._lo = lo
        return self._lo, self._chunk_CV

    def part(self, lo: int, hi: int) -> "Logits":
        """Return rows [lo, hi), such as one text's among several, over the same chunks."""
        return self if (lo, hi) == (0, len(self)) else _Part(self, lo, hi)

    def whole(self) -> Tensor:
        """Return all rows (N, V), if there is memory for them."""
        return torch.stack(list(self))


class _Part(Logits):
    """Rows [lo, hi) of other logits."""

    def __init__(self, whole: Logits, lo: int, hi: int) -> None:
        assert 0 <= lo <= hi <= len(whole), f"rows {lo} to {hi} of {len(whole)}"
        self._whole = whole
        self._first = lo
        self._num_rows = hi - lo
        self._max_rows = whole._max_rows

    def chunk_with(self, node: int) -> tuple[int, Tensor]:
        assert 0 <= node < len(self), f"node {node} of {len(self)}"
        lo, chunk_CV = self._whole.chunk_with(self._first + node)
        first = max(lo, self._first)
        last = min(lo + len(chunk_CV), self._first + len(self))
        return first - self._first, chunk_CV[first - lo : last - lo]


class AdjustedRows(Logits):
    """Rows that are adjusted when they are read; `adjust` takes the node and its logits (V)."""

    def __init__(self, rows: "Rows", adjust: Callable[[int, Tensor], Tensor]) -> None:
        self._num_rows = len(rows)
        self._max_rows = 1
        self._rows = rows
        self._adjust = adjust

    def chunk_with(self, node: int) -> tuple[int, Tensor]:
        """Return the row alone: others may never be read."""
        return node, self._adjust(node, self._rows[node])[None]


# what a rule verifies by: logits (N, V), there already or computed on the way
Rows = Tensor | Logits


def chunk_with(logits: Rows, node: int) -> tuple[int, Tensor]:
    """Return `Logits.chunk_with`; a tensor is one chunk."""
    return (0, logits) if isinstance(logits, Tensor) else logits.chunk_with(node)
