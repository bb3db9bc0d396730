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
MAX_DIMENSIONS = 4
HEADER_NUMBERS = 4 + MAX_DIMENSIONS
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
_NO_PAYLOAD = -1
_END = -1  # in place of a kind: nothing will follow


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
    """`HEADER_NUMBERS` whole numbers: kind, count of numbers, type of the payload, count of dimensions, dimensions."""
    payload = message.payload
    shape = [] if payload is None else list(payload.shape)
    dtype = _NO_PAYLOAD if payload is None else _DTYPES.index(payload.dtype)
    header = [int(message.kind), len(message.numbers), dtype, len(shape), *shape]
    return torch.tensor(header + [0] * (HEADER_NUMBERS - len(header)), dtype=torch.int64)


def end_header() -> Tensor:
    """The last one of a channel."""
    return torch.full((HEADER_NUMBERS,), _END, dtype=torch.int64)


def read_header(header: Tensor) -> Announced | None:
    """What follows; None is nothing, ever. Raises `ValueError` where that cannot be."""
    kind, num_numbers, dtype, num_dimensions, *dimensions = header.tolist()
    if kind == _END:
        return None
    ensure(kind in Kind.__members__.values(), f"kind {kind} is none")
    ensure(0 <= num_numbers <= MAX_NUMBERS, f"{num_numbers} numbers are not between 0 and {MAX_NUMBERS}")
    if dtype == _NO_PAYLOAD:
        return Announced(Kind(kind), num_numbers, None, ())
    ensure(0 <= dtype < len(_DTYPES), f"type {dtype} is none")
    ensure(0 <= num_dimensions <= MAX_DIMENSIONS, f"{num_dimensions} dimensions are not between 0 and {MAX_DIMENSIONS}")
    shape = tuple(dimensions[:num_dimensions])
    is_possible = min(shape, default=0) >= 0 and math.prod(shape) * _DTYPES[dtype].itemsize <= MAX_PAYLOAD_BYTES
    ensure(is_possible, f"a payload of shape {shape} is not possible, or larger than {MAX_PAYLOAD_BYTES} bytes")
    return Announced(Kind(kind), num_numbers, _DTYPES[dtype], shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as flat bytes, which every carrier takes whatever the type. `tensor` is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)
