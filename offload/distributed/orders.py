"""Messages between ranks: a type for each order and answer, and its form on the wire.

Invariant: bytes that are no order, or an impossible one, raise `ValueError` before anything is
computed. They are MessagePack of the types below and of nothing else: a peer is not trusted.
"""

from typing import Annotated, NamedTuple

import numpy as np
import torch
from msgspec import Meta, Raw, Struct, msgpack
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import ensure
from offload.sampling_options import Sampling

HEAD = 0  # the rank that writes the text
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# a list from a peer must not fill memory; texts and passes are far shorter
_MOST = Meta(max_length=2**22)
Tokens = Annotated[list[Token], _MOST]
Counts = Annotated[list[Count], _MOST]


class Order(Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """A message from one rank to another."""


class Reset(Order):
    """A text begins."""

    num_kept: Count  # committed positions that stay
    sampling: Sampling = Sampling()  # how tokens are drawn, for ranks that draw
    tokens: Annotated[tuple[Token, ...], _MOST] = ()  # the text itself, for a draft
    text: Count = 0  # which of the texts that are written at a time


class RunOrder(Order):
    """W rows to score after the uncommitted rows of the cache."""

    number: Count
    tokens: Tokens
    positions: Counts
    sees: bytes  # `packed`
    num_drawn: Count  # the number of last rows after which the target draws
    is_dead: bool = False  # whether it is cancelled, and not computed
    hidden: memoryview | None = None  # (W, D), output of the stage before, as bytes
    text: Count = 0  # which of the texts that are written at a time
    is_last: bool = True  # of the runs of several texts that share a pass

    def __post_init__(self) -> None:
        ensure(
            0 < len(self.tokens) == len(self.positions) and self.num_drawn <= len(self.tokens),
            f"run {self.number} of {len(self.tokens)} rows has {len(self.positions)} positions, "
            f"{self.num_drawn} drawn",
        )

    def rows(self, num_uncommitted: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (W,), positions (W,), and which rows each one sees (W, U), W of U its own.

        A row sees itself, and none behind it.
        """
        num_rows = len(self.tokens)
        num_seen = num_uncommitted + num_rows
        row_bytes = -(-num_seen // 8)
        ensure(
            len(self.sees) == num_rows * row_bytes,
            f"run {self.number} of {num_rows} rows behind {num_uncommitted} sees {len(self.sees)} bytes",
        )
        bits_WB = np.frombuffer(self.sees, np.uint8).reshape(num_rows, row_bytes)
        sees_WU = torch.from_numpy(np.unpackbits(bits_WB, axis=1, count=num_seen).astype(bool))
        own_WW = sees_WU[:, num_uncommitted:]
        ensure(
            bool(own_WW.diagonal().all()) and not own_WW.triu(1).any(),
            f"a row of run {self.number} must see itself last",
        )
        return torch.tensor(self.tokens), torch.tensor(self.positions), sees_WU

    def activations(self, width: int, dtype: torch.dtype) -> Tensor:
        """Return the activations of the stage before, (W, D), in memory that belongs to them."""
        hidden_WD = torch.empty(len(self.tokens), width, dtype=dtype)
        content = b"" if self.hidden is None else self.hidden
        num_bytes = len(content)
        ensure(
            num_bytes == hidden_WD.nbytes,
            f"run {self.number} has {num_bytes} bytes of activations, they must be {hidden_WD.nbytes}",
        )
        # in a message their address may be unaligned
        as_bytes(hidden_WD).copy_(torch.frombuffer(content, dtype=torch.uint8))
        return hidden_WD


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as flat bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def packed(sees_WU: NDArray[np.bool_] | Tensor) -> bytes:
    """Return which rows each row sees, as a bit mask."""
    return np.packbits(np.asarray(sees_WU, dtype=bool), axis=1).tobytes()


class Commit(Order):
    """The rows of a path are accepted; the others stay uncommitted, in a new order."""

    path: Counts
    kept: Counts = []
    text: Count = 0  # which of the texts that are written at a time

    def require_rows(self, num_uncommitted: int) -> None:
        """Raise `ValueError` for rows that do not exist or are named twice."""
        rows = [*self.path, *self.kept]
        ensure(
            len({*rows}) == len(rows) and max(rows, default=-1) < num_uncommitted,
            f"a commit of {len(self.path)} and rows {rows[:16]}, of {num_uncommitted} that there are",
        )


class Copy(Order):
    """A text takes over the first committed positions of another, in place of its own."""

    text: Count
    source: Count
    num_positions: Count


class Cancel(Order):
    """Runs that are no longer needed."""

    runs: Counts


class Drawn(Order):
    """A run is back with the target's draw after each row; without draws if it was dead."""

    run: Count
    is_dead: bool
    tokens: Tokens


class Least(NamedTuple):
    """Bounds of the guesses that are wanted."""

    f: float  # of the whole path below the root
    p: float  # of the token alone among its siblings


class Grow(Order):
    """The head has room for this many guesses within these bounds."""

    num_nodes: Count
    least: Least


class DraftNodeUpdate(NamedTuple):
    """A guess as it is sent to the head."""

    number: int
    parent: int
    token: Token
    p: float  # its chance among its siblings


class Guessed(Order):
    """Guesses of a draft, parents before their children."""

    nodes: Annotated[list[DraftNodeUpdate], _MOST]


class Accept(Order):
    """Tokens that continue the draft's text."""

    tokens: Tokens


class Figures(Order):
    """Ask for what a rank has moved and held, see `RankFigures`."""


class Word(Order):
    """Any small value that ranks agree on; the reader knows its type."""

    content: Raw


class Stop(Order):
    """End a service."""


decode = msgpack.Decoder(
    Reset
    | RunOrder
    | Commit
    | Copy
    | Cancel
    | Drawn
    | Grow
    | Guessed
    | Accept
    | Figures
    | Word
    | Stop
).decode
_ENCODER = msgpack.Encoder()


def encode(order: Order) -> bytearray:
    """Return the bytes that `decode` takes; activations are copied once."""
    content = bytearray()
    _ENCODER.encode_into(order, content)
    return content
