"""Weights of a packed file, decoded part by part from the words that they are stored in."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.files import PART_BYTES
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import STORED
from offload.encoding.exponents import CODE, ESCAPE_BYTES, Exponents, distance_bytes
from offload.errors import UserError
from offload.kernels.expand_exponents import TYPE_OF, expand_exponents
from offload.kernels.exponents_layout import BLOCK, CHUNK, RUN
from offload.packing.reading import PartFile

_PART_CHUNKS = PART_BYTES // 2 // CHUNK


# fills a part's original bytes in
Fill = Callable[[np.ndarray], None]


class Part(NamedTuple):
    """A part of a tensor that can be decoded: its original bytes, and what fills them in."""

    num_bytes: int
    fill: Fill


def read_tensor(file: PartFile, entry: TensorEntry) -> Tensor:
    """Return a tensor that is stored as it is."""
    dtype = getattr(torch, STORED[entry.dtype].dtype)
    return torch.from_numpy(file.copy_of(entry.lo, entry.hi)).view(dtype).view(entry.shape)


def decoded_parts(
    where: str, entry: TensorEntry, companions: Sequence[Tensor], file: PartFile
) -> Iterator[Part]:
    """Yield the parts of a tensor with coded exponents."""
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
    listed = torch.from_numpy(file.copy_of(escapes_lo, entry.hi))
    list_3E = listed[: ESCAPE_BYTES * int(start_C[-1])].view(3, -1)
    for index, at in enumerate(range(0, num_weights, PART_BYTES // 2)):
        after = at + PART_BYTES // 2
        own_C = start_C[index * _PART_CHUNKS : (index + 1) * _PART_CHUNKS + 1]
        own_3E = list_3E[:, own_C[0] : own_C[-1]].flatten()
        lists = (own_3E, own_C - own_C[0], ready["top"])
        own_mantissas = (entry.lo + at, min(entry.lo + after, exponents_lo))
        lo, hi = (exponents_lo + place // BLOCK * RUN * coding.width for place in (at, after))
        places = (own_mantissas, (lo, min(hi, escapes_lo)))
        fill = partial(_decode, file, kind, places, lists)
        yield Part(2 * (own_mantissas[1] - own_mantissas[0]), fill)


def _decode(
    file: PartFile,
    kind: torch.dtype,
    places: tuple[tuple[int, int], tuple[int, int]],
    lists: tuple[Tensor, Tensor, Tensor],
    out: np.ndarray,
) -> None:
    """Decode the weights with these ranges of mantissas and of distances in the file."""
    mantissa_N, distance_B = map(torch.from_numpy, file.read(*places))
    out_N = torch.from_numpy(out).view(TYPE_OF[kind])
    expand_exponents(mantissa_N.view(kind), distance_B, *lists, out_N)
