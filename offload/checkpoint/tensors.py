"""Where one tensor of a checkpoint lies, and how its bytes become the weight that a model has."""

from typing import NamedTuple

from offload.encoding.base import Coding


class TensorEntry(NamedTuple):
    """A tensor on disk; of a coded weight its words, the shape being that of the weight."""

    shard: int  # index into Checkpoint.shards
    dtype: str  # name used by the format: BF16, F16, F32; of a coded weight that of its words
    shape: tuple[int, ...]
    lo: int  # absolute byte offsets in the shard: [lo, hi)
    hi: int
    coded: "Coded | None" = None  # None: its numbers are stored as they are

    @property
    def num_bytes(self) -> int:
        return self.hi - self.lo


class Coded(NamedTuple):
    """How words are expanded, and what else that takes."""

    coding: Coding
    companions: tuple[tuple[str, TensorEntry], ...] = ()  # by their suffixes

    @property
    def num_bytes(self) -> int:
        """Of the companions in the file."""
        return sum(entry.num_bytes for _, entry in self.companions)
