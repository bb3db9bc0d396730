"""What ranks send each other in one pass, and how long that takes on a network.

Ranks with shares of every layer gather what each has computed: a rank sends its own columns to all others. Ranks with
layers of their own hand rows on to the next. The two ways of a cable are used at once, as a switch allows. No torch, no
clock. Invariant: bytes are those of the tensors; messages' headers come on top.
"""

from collections.abc import Sequence
from typing import NamedTuple

DRAWN_BYTES = 8  # of the token that comes back from the last stage for a row


class Network(NamedTuple):
    """Between any two ranks, each way."""

    bytes_per_s: float
    latency_s: float  # of a message


class Gathers(NamedTuple):
    """The exchanges of ranks that share every layer."""

    widths: Sequence[Sequence[int]]  # of each gather of a layer: numbers in a row, rank by rank
    num_layers: int
    width: int  # D, of the rows that the head gives to all before the first layer
    item_bytes: int

    @property
    def num_ranks(self) -> int:
        return len(self.widths[0])

    def sent_bytes(self, num_rows: int) -> tuple[int, ...]:
        """What each rank sends in a pass of so many rows, to all others together; parts are filled up to the widest."""
        parts = self.num_layers * sum(map(max, self.widths))
        own = [parts + self.width, *[parts] * (self.num_ranks - 1)]
        return tuple((self.num_ranks - 1) * numbers * num_rows * self.item_bytes for numbers in own)

    def seconds(self, num_rows: int, network: Network) -> float:
        """Time of a pass in which nobody computes."""
        others = self.num_ranks - 1
        if not others:
            return 0.0
        numbers = others * (self.num_layers * sum(map(max, self.widths)) + self.width)
        num_messages = others * (self.num_layers * len(self.widths) + 1)
        return num_rows * numbers * self.item_bytes / network.bytes_per_s + num_messages * network.latency_s


class Hops(NamedTuple):
    """The exchanges of ranks with layers of their own."""

    num_stages: int
    width: int  # D
    item_bytes: int

    def sent_bytes(self, num_rows: int) -> tuple[int, ...]:
        """What each rank sends in a pass: rows to the next, and what was drawn to the head."""
        rows_bytes = num_rows * self.width * self.item_bytes
        drawn_bytes = num_rows * DRAWN_BYTES if self.num_stages > 1 else 0
        return (*[rows_bytes] * (self.num_stages - 1), drawn_bytes)

    def hop_s(self, num_rows: int, network: Network) -> float:
        """Time of one hop."""
        rows_bytes = num_rows * self.width * self.item_bytes
        return rows_bytes / network.bytes_per_s + network.latency_s

    def seconds(self, num_rows: int, network: Network) -> float:
        """All hops of one pass, one behind the other, and the way back."""
        if self.num_stages == 1:
            return 0.0
        back_s = num_rows * DRAWN_BYTES / network.bytes_per_s + network.latency_s
        return (self.num_stages - 1) * self.hop_s(num_rows, network) + back_s
