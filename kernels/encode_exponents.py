"""Encode bfloat16 or float16 weights as `exponents_layout` describes; see `expand_exponents`.

Invariant: for any bits, also those of NaNs, infinities and subnormal numbers, expanding returns the
same bits.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from offload.kernels.compiled import compiled, faster
from offload.kernels.exponents_layout import BLOCK, CHUNK, RUN, word_of_half
from offload.kernels.rounding import U64

I16 = np.int16
U8 = np.uint8
U16 = np.uint16


class ExponentWords(NamedTuple):
    """The words of a tensor, or of some of its chunks."""

    mantissa_N: Tensor  # uint8 of bfloat16, int8 of float16
    distance_B: Tensor
    escape_3E: Tensor  # low and high bytes of places, exponents
    count_C: Tensor  # int64, escapes of each chunk


def encode_exponents_reference(weight_N: Tensor, top: int, width: int) -> ExponentWords:
    """Return the words of bfloat16 or float16 weights, in plain torch.

    Args:
        top: the exponent at distance 0.
        width: bits of a distance, 3 or 4.
    """
    bits_N, kind = _as_words(weight_N)
    num_weights = len(bits_N)
    mark = (1 << width) - 1
    exponent = (bits_N >> 7) & 0xFF
    distance = top - exponent
    distance = torch.where((distance < 0) | (distance > mark), mark, distance)
    place = (distance == mark).nonzero()[:, 0]
    escapes = (place & 0xFF, (place % CHUNK) >> 8, exponent[place])
    escape_3E = torch.cat([part.to(torch.uint8) for part in escapes])
    counts = torch.bincount(place // CHUNK, minlength=-(-num_weights // CHUNK))
    filled = functional.pad(distance.to(torch.uint8), (0, -num_weights % BLOCK)).view(-1, BLOCK)
    planes = [(filled, 4)] if width == 4 else [(filled & 3, 2), (filled >> 2, 1)]
    distance_KB = torch.cat([_packed(*plane) for plane in planes], 1)
    kept = (((bits_N >> 8) & 0x80) | (bits_N & 0x7F)).to(torch.uint8)
    return ExponentWords(kept.view(kind), distance_KB.flatten(), escape_3E, counts)


def encode_exponents_compiled(weight_N: Tensor, top: int, width: int) -> ExponentWords:
    """Do what the reference does, with numba, on this thread."""
    bits_N, kind = _as_words(weight_N)
    num_weights = len(bits_N)
    num_blocks = -(-len(bits_N) // BLOCK)
    kept = np.empty(num_weights, np.uint8)
    plane = np.empty(num_blocks * width * RUN, np.uint8)
    lists = np.empty((3, num_weights), np.uint8)
    counts = np.zeros(-(-num_weights // CHUNK), np.int64)
    _encode(bits_N.numpy(), (top, width), kept, plane, lists, counts)
    escapes = lists[:, : counts.sum()].reshape(-1)
    kept_N, *others = map(torch.from_numpy, (kept, plane, escapes, counts))
    return ExponentWords(kept_N.view(kind), *others)


encode_exponents = faster(encode_exponents_compiled, encode_exponents_reference)


def _as_words(weight_N: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return the weights as int16, and the type of their mantissas."""
    bits_N = weight_N.view(torch.int16)
    if weight_N.dtype == torch.bfloat16:
        return bits_N, torch.uint8
    return word_of_half(bits_N), torch.int8


def _packed(number_KB: Tensor, num_bits: int) -> Tensor:
    """Return the planes of blocks."""
    parts = number_KB.view(len(number_KB), 8 // num_bits, num_bits * RUN)
    shift_R = torch.arange(0, 8, num_bits, dtype=torch.uint8)[:, None]
    return (parts << shift_R).sum(1, dtype=torch.uint8)


@compiled
def _encode(bits: Any, window: Any, kept: Any, plane: Any, lists: Any, counts: Any) -> None:
    """Encode block by block.

    Unsigned and narrow types let the compiler vectorise.
    """
    top = I16(window[0])
    width = window[1]
    size = U64(bits.size)
    mark = U16((1 << width) - 1)
    num_escapes = U64(0)
    distance = np.zeros(1024, np.uint8)
    for block in range((size + U64(1023)) // U64(1024)):
        at = block * U64(1024)
        here = min(U64(1024), size - at)
        distance[here:] = U8(0)
        for i in range(here):
            kept[at + i] = U8(U8(U16(bits[at + i]) >> U16(8)) & U8(0x80)) | U8(
                U8(bits[at + i]) & U8(0x7F)
            )
            # wraps to more than 255 for an exponent above the top
            far = U16(top - I16(I16(bits[at + i] >> I16(7)) & I16(0xFF)))
            distance[i] = U8(min(far, mark))
        first = num_escapes
        num_escapes = _list_escapes(bits[at : at + here], at, distance, U64(mark), lists, first)
        counts[block // U64(64)] += num_escapes - first
        if width == 4:
            for i in range(U64(512)):
                plane[block * U64(512) + i] = U8(distance[i] | U8(distance[U64(512) + i] << U8(4)))
            continue
        for i in range(U64(256)):
            low = U8(U8(distance[i] & U8(3)) | U8(U8(distance[U64(256) + i] & U8(3)) << U8(2)))
            high = U8(
                U8(distance[U64(512) + i] & U8(3)) | U8(U8(distance[U64(768) + i] & U8(3)) << U8(2))
            )
            plane[block * U64(384) + i] = U8(low | U8(high << U8(4)))
        for i in range(U64(128)):
            byte = U8(0)
            for run in range(U64(8)):
                byte = U8(byte | U8(U8(distance[run * U64(128) + i] >> U8(2)) << U8(run)))
            plane[block * U64(384) + U64(256) + i] = byte


@compiled
def _list_escapes(bits: Any, at: Any, distance: Any, mark: Any, lists: Any, end: Any) -> Any:
    """Append a block's escapes to the lists, and return their new end.

    Eight distances are looked at together: 0x7F more, all but a mark that was taken away have the
    highest bit of their byte.
    """
    eights = distance.view(np.uint64)
    for eight in range(U64(128)):
        differs = U64(eights[eight] ^ U64(mark * U64(0x0101010101010101)))
        left = U64(~U64(differs + U64(0x7F7F7F7F7F7F7F7F)) & U64(0x8080808080808080))
        while left:
            below = U64(U64(left & U64(U64(0) - left)) - U64(1))
            left &= U64(left - U64(1))
            # a bit of each byte up to the marked one, added up in the highest byte
            ones = U64(below & U64(0x0101010101010101))
            nth = U64(U64(ones * U64(0x0101010101010101)) >> U64(56)) - U64(1)
            i = eight * U64(8) + nth
            place = (at & U64(0xFFFF)) + i
            lists[0, end] = U8(place)
            lists[1, end] = U8(place >> U64(8))
            lists[2, end] = U8(bits[i] >> I16(7))
            end += U64(1)
    return end
