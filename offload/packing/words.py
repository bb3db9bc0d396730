"""Weights of a packed file, decoded part by part from the words that they are stored in."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.files import PART_BYTES, read_part
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import STORED
from offload.encoding.exponents import CODE, ESCAPE_BYTES, Exponents, distance_bytes
from offload.errors import UserError
from offload.kernels.expand_exponents import TYPE_OF, expand_exponents
from offload.kernels.exponents_layout import BLOCK, CHUNK, RUN

_PART_CHUNKS = PART_BYTES // 2 // CHUNK


def read_tensor(fd: int, entry: TensorEntry) -> Tensor:
    """Return a tensor that is stored as it is."""
    dtype = getattr(torch, STORED[entry.dtype].dtype)
    return as_tensor(read_part(fd, entry.lo, entry.hi), dtype).view(entry.shape)


def as_tensor(raw: bytearray, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers; there may be none."""
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def decoded_parts(
    where: str, entry: TensorEntry, companions: Sequence[Tensor], fd: int
) -> Iterator[Callable[[], np.ndarray]]:
    """Yield for each part of a tensor with coded exponents a function that decodes it."""
    coding = None if entry.coded is None else entry.coded.coding
    assert isinstance(coding, Exponents), "no other words were looked for"
    (code,) = companions
    num_weights = math.prod(entry.shape)
    exponents_lo = entry.lo + num_weights
    escapes_lo = exponents_lo + distance_bytes(num_weights, coding.width)
    kind = torch.int8 if entry.dtype == "I8" else torch.uint8
    try:
        ready = coding.prepare({CODE: code}, entry.shape)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    start_C = ready["start"]
    listed = as_tensor(read_part(fd, escapes_lo, entry.hi), torch.uint8)
    list_3E = listed[: ESCAPE_BYTES * int(start_C[-1])].view(3, -1)
    for index, at in enumerate(range(0, num_weights, PART_BYTES // 2)):
        after = at + PART_BYTES // 2
        own_C = start_C[index * _PART_CHUNKS : (index + 1) * _PART_CHUNKS + 1]
        own_3E = list_3E[:, own_C[0] : own_C[-1]].flatten()
        lists = (own_3E, own_C - own_C[0], ready["top"])
        own_mantissas = (entry.lo + at, min(entry.lo + after, exponents_lo))
        lo, hi = (exponents_lo + place // BLOCK * RUN * coding.width for place in (at, after))
        places = (own_mantissas, (lo, min(hi, escapes_lo)))
        yield partial(_decoded, fd, kind, places, lists)


def _decoded(
    fd: int,
    kind: torch.dtype,
    places: tuple[tuple[int, int], tuple[int, int]],
    lists: tuple[Tensor, Tensor, Tensor],
) -> np.ndarray:
    """Decode the weights with these ranges of mantissas and of distances in the file, as bytes."""
    mantissa_N = as_tensor(read_part(fd, *places[0]), kind)
    distance_B = as_tensor(read_part(fd, *places[1]), torch.uint8)
    out_N = torch.empty(len(mantissa_N), dtype=TYPE_OF[kind])
    expand_exponents(mantissa_N, distance_B, *lists, out_N)
    return out_N.view(torch.uint8).numpy()
