"""How a message becomes tensors on the way, and what is refused of those that arrive.

A header of fixed size says how many whole numbers follow and of which type and shape the payload is. A peer is a
stranger: nothing is allocated before the sizes that it names are found to be possible.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from offload.errors import ensure
from offload.ranks.messages import Kind, Message

MAX_PAYLOAD_BYTES = 2**30  # 512 rows of the widest models take a tenth of it
MAX_NUMBERS = 2**22  # a row says which of some thousand rows it sees
MAX_DIMENSIONS = 2
HEADER_NUMBERS = 2 + MAX_DIMENSIONS  # of 32 bits: what is drawn returns in 16 bytes a row, for runs of four rows
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
_NO_PAYLOAD = 0  # in place of a type, which count from 1
_END = -1  # in place of the first number: nothing will follow


class Announced(NamedTuple):
    """What a header says will follow."""

    kind: Kind
    num_numbers: int
    dtype: torch.dtype | None  # None: no payload
    shape: tuple[int, ...]

    def empty_payload(self) -> Tensor | None:
        """Room for it."""
        return None if self.dtype is None else torch.empty(self.shape, dtype=self.dtype)


def header_of(message: Message) -> Tensor:
    """`HEADER_NUMBERS` of them: kind, type and dimensions of the payload in a byte each, count of numbers, sizes."""
    payload = message.payload
    shape = [] if payload is None else list(payload.shape)
    assert len(shape) <= MAX_DIMENSIONS, f"a payload has {MAX_DIMENSIONS} dimensions at most"
    dtype = _NO_PAYLOAD if payload is None else 1 + _DTYPES.index(payload.dtype)
    header = [int(message.kind) | dtype << 8 | len(shape) << 16, len(message.numbers), *shape]
    return torch.tensor(header + [0] * (HEADER_NUMBERS - len(header)), dtype=torch.int32)


def end_header() -> Tensor:
    """The last one of a channel."""
    return torch.full((HEADER_NUMBERS,), _END, dtype=torch.int32)


def read_header(header: Tensor) -> Announced | None:
    """What follows; None is nothing, ever. Raises `ValueError` where that cannot be."""
    first, num_numbers, *dimensions = header.tolist()
    if first == _END:
        return None
    kind, dtype, num_dimensions = first & 0xFF, first >> 8 & 0xFF, first >> 16
    ensure(kind in Kind.__members__.values(), f"kind {kind} is none")
    ensure(0 <= num_numbers <= MAX_NUMBERS, f"{num_numbers} numbers are not between 0 and {MAX_NUMBERS}")
    if dtype == _NO_PAYLOAD:
        return Announced(Kind(kind), num_numbers, None, ())
    ensure(dtype <= len(_DTYPES), f"type {dtype} is none")
    ensure(0 <= num_dimensions <= MAX_DIMENSIONS, f"{num_dimensions} dimensions are not between 0 and {MAX_DIMENSIONS}")
    shape, own = tuple(dimensions[:num_dimensions]), _DTYPES[dtype - 1]
    is_possible = min(shape, default=0) >= 0 and math.prod(shape) * own.itemsize <= MAX_PAYLOAD_BYTES
    ensure(is_possible, f"a payload of shape {shape} is not possible, or larger than {MAX_PAYLOAD_BYTES} bytes")
    return Announced(Kind(kind), num_numbers, own, shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as flat bytes, which every carrier takes whatever the type. `tensor` is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)
