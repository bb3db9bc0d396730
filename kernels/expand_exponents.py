"""Expand bfloat16 or float16 weights that are stored without loss, see `exponents_layout`.

Invariant: whatever the words say, nothing is written outside of `out`: only the last chunk may be
cut, and there places are checked.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import ByType, compiled, faster, share_rows
from offload.kernels.exponents_layout import BLOCK, CHUNK, RUN
from offload.kernels.jit import jit, tl, triton
from offload.kernels.rounding import U64, numbers, of_bfloat16, of_float16, rounded

# type of the mantissas -> type of the weights
TYPE_OF = {torch.uint8: torch.bfloat16, torch.int8: torch.float16}
_KEPT = -32641  # 0x807F as an int16: sign and mantissa of a byte whose sign was extended
_PIECE_CHUNKS = 4  # chunks that the reference expands at once, within the cache
_ESCAPES = 1024  # that a program handles at once
I16 = np.int16
U8 = np.uint8


def expand_exponents_reference(
    mantissa_N: Tensor,
    distance_B: Tensor,
    escape_B: Tensor,
    start_C: Tensor,
    top_1: Tensor,
    out_N: Tensor,
) -> None:
    """Fill `out` with the original numbers, in plain torch.

    An `out` of another type than the weights' gets each number rounded once.

    Args:
        mantissa_N: sign and mantissa of each weight, uint8 for bfloat16, int8 for float16.
        distance_B: uint8, the planes, block after block; the last one is padded.
        escape_B: uint8, the three lists, then padding.
        start_C: int64, where the escapes of each chunk begin in a list, then their number.
        top_1: int64, the exponent at distance 0.
    """
    num_weights = len(mantissa_N)
    starts = start_C.tolist()
    plane = distance_B.view(-1, _plane_bytes(distance_B, num_weights))
    lists = escape_B[: 3 * starts[-1]].view(3, -1)
    piece_blocks = _PIECE_CHUNKS * CHUNK // BLOCK
    top = top_1.to(torch.int16)
    for chunk in range(0, len(starts) - 1, _PIECE_CHUNKS):
        lo = chunk * CHUNK
        block = chunk * CHUNK // BLOCK
        kept = mantissa_N[lo : lo + _PIECE_CHUNKS * CHUNK].view(torch.int8).to(torch.int16)
        kept.bitwise_and_(_KEPT)
        distance = _distances(plane[block : block + piece_blocks])[: len(kept)].to(torch.int16)
        bits = kept + (top - distance).bitwise_left_shift_(7)
        counts = start_C[chunk : chunk + _PIECE_CHUNKS + 1].diff()
        end = starts[min(chunk + _PIECE_CHUNKS, len(starts) - 1)]
        low, high, exponent = lists[:, starts[chunk] : end].long()
        chunk_of = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        place = chunk_of * CHUNK + (high << 8) + low
        is_inside = place < len(kept)
        place = place[is_inside]
        exponent = exponent[is_inside]
        bits[place] = kept[place] | (exponent << 7).to(torch.int16)
        if mantissa_N.dtype == torch.int8:
            bits = bits & -32768 | (bits & 4095) << 3 | bits >> 12 & 7
        out_N[lo : lo + len(kept)] = bits.view(TYPE_OF[mantissa_N.dtype])


def expand_exponents_compiled(
    mantissa_N: Tensor,
    distance_B: Tensor,
    escape_B: Tensor,
    start_C: Tensor,
    top_1: Tensor,
    out_N: Tensor,
) -> None:
    """Do what the reference does, with numba, on as many threads as torch has."""
    kind = TYPE_OF[mantissa_N.dtype]
    expand = _expand.to(kind)
    widen = (_widen if kind == torch.bfloat16 else _widen_half).to(out_N.dtype)
    put_escapes = _put_escapes.to(kind)
    kept = mantissa_N.view(torch.int8).numpy()
    window = (int(top_1), _plane_bytes(distance_B, len(mantissa_N)) // RUN)
    num_chunks = len(start_C) - 1
    words = (kept, distance_B.numpy())
    lists = (escape_B.numpy(), start_C.numpy())

    def work(lo: int, hi: int) -> None:
        if out_N.dtype == kind:
            bits = out_N.view(torch.int16).numpy()
            expand(*words, window, bits, (lo, hi, 0))
            put_escapes(kept, *lists, bits, (lo, hi, 0))
            return
        buffer = torch.empty(CHUNK, dtype=torch.int16)
        for chunk in range(lo, hi):
            chunk_N = buffer[: len(out_N) - chunk * CHUNK]
            expand(*words, window, chunk_N.numpy(), (chunk, chunk + 1, chunk * CHUNK))
            put_escapes(kept, *lists, chunk_N.numpy(), (chunk, chunk + 1, chunk * CHUNK))
            widen(chunk_N.numpy(), numbers(out_N[chunk * CHUNK : (chunk + 1) * CHUNK]))

    share_rows(work, num_chunks)


expand_exponents = faster(expand_exponents_compiled, expand_exponents_reference)


def expand_exponents_kernel(
    mantissa_N: Tensor,
    distance_B: Tensor,
    escape_B: Tensor,
    start_C: Tensor,
    top_1: Tensor,
    out_N: Tensor,
) -> None:
    """Do what the reference does, in Triton: all weights, then all escapes."""
    num_weights = len(mantissa_N)
    if not num_weights:
        return
    width = _plane_bytes(distance_B, num_weights) // RUN
    out = out_N.view(torch.int16) if out_N.dtype == TYPE_OF[mantissa_N.dtype] else out_N
    blocks = (triton.cdiv(num_weights, BLOCK),)
    chunks = (len(start_C) - 1,)
    _expand_blocks[blocks](
        mantissa_N, distance_B, top_1, out, num_weights, WIDTH=width, BLOCK=BLOCK, RUN=RUN
    )
    _put_lists[chunks](
        mantissa_N, escape_B, start_C, out, num_weights, chunks[0], CHUNK=CHUNK, AT_ONCE=_ESCAPES
    )


def _plane_bytes(distance_B: Tensor, num_weights: int) -> int:
    """Return the bytes of one block: 4 x 128 or 3 x 128."""
    return len(distance_B) // -(-num_weights // BLOCK) if num_weights else 4 * RUN


def _distances(plane_KB: Tensor) -> Tensor:
    """Return the distances (uint8) of all weights of these blocks, in order."""
    if plane_KB.shape[1] == 4 * RUN:
        return _unpacked(plane_KB, 4)
    low = _unpacked(plane_KB[:, : 2 * RUN], 2)
    high = _unpacked(plane_KB[:, 2 * RUN :], 1)
    return low | high << 2


def _unpacked(plane_KB: Tensor, num_bits: int) -> Tensor:
    """Return numbers of `num_bits` bits each."""
    shift_R = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=plane_KB.device)[:, None]
    return ((plane_KB[:, None] >> shift_R) & ((1 << num_bits) - 1)).flatten()


@compiled
def _same(word):  # type: ignore[no-untyped-def]
    return word


@compiled
def _half(word):  # type: ignore[no-untyped-def]
    """Return the bits of a float16."""
    high = I16(I16(word & I16(-32768)) | I16(I16(word << I16(3)) & I16(0x7FF8)))
    return I16(high | I16(I16(word >> I16(12)) & I16(7)))


# turns a word into the bits of the weight's type
_number = ByType({torch.bfloat16: _same, torch.float16: _half})


@compiled
def _word(kept, exponent):  # type: ignore[no-untyped-def]
    """Return the word of a weight: its sign and mantissa, and this exponent."""
    return I16(I16(I16(kept) & I16(-32641)) + I16(exponent << I16(7)))


@compiled
def _expand(kept: Any, plane: Any, window: Any, bits: Any, span: Any) -> None:
    """Expand chunks [lo, hi) without their escapes; `span` is (lo, hi, origin).

    `bits` begins with the weight `origin`. Indices are unsigned and numbers as narrow as they can
    be, since the compiler vectorises nothing else.
    """
    size = U64(kept.size)
    origin = U64(span[2])
    top = I16(window[0])
    width = window[1]
    for block in range(U64(span[0] * 64), min(U64(span[1] * 64), (size + U64(1023)) // U64(1024))):
        for run in range(U64(8)):
            at = block * U64(1024) + run * U64(128)
            place = at - origin
            num_here = min(U64(128), size - min(at, size))
            if width == 4:
                source = block * U64(512) + (run & U64(3)) * U64(128)
                shift = U8(run & U64(4))
                for i in range(num_here):
                    distance = I16((plane[source + i] >> shift) & U8(15))
                    bits[place + i] = _number(_word(kept[at + i], I16(top - distance)))
            else:
                low = block * U64(384) + (run & U64(1)) * U64(128)
                high = block * U64(384) + U64(256)
                shift = U8(run & U64(6))
                for i in range(num_here):
                    third = U8(U8(U8(plane[high + i] >> U8(run)) & U8(1)) << U8(2))
                    distance = I16(U8(U8(plane[low + i] >> shift) & U8(3)) | third)
                    bits[place + i] = _number(_word(kept[at + i], I16(top - distance)))


@compiled
def _put_escapes(kept: Any, lists: Any, start: Any, bits: Any, span: Any) -> None:
    """Overwrite the escaped weights of chunks."""
    num_all = start[start.size - 1]
    for chunk in range(span[0], span[1]):
        for at in range(start[chunk], start[chunk + 1]):
            place = chunk * 65536 + lists[at] + 256 * lists[num_all + at]
            if place < kept.size:
                exponent = I16(lists[2 * num_all + at])
                bits[place - span[2]] = _number(_word(kept[place], exponent))


@compiled
def _widen(bits: Any, out: Any) -> None:
    """Convert bfloat16 to another type."""
    for i in range(U64(out.size)):
        out[i] = rounded(of_bfloat16(bits[i]))


@compiled
def _widen_half(bits: Any, out: Any) -> None:
    """Convert float16 to another type."""
    for i in range(U64(out.size)):
        out[i] = rounded(of_float16(bits[i]))


@jit(do_not_specialize=["num_weights"])
def _expand_blocks(
    mantissa: tl.tensor,
    plane: tl.tensor,
    top: tl.tensor,
    out: tl.tensor,
    num_weights: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Run one program per block."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    run = lane // RUN
    at = lane % RUN
    plane += block * (WIDTH * RUN)
    if WIDTH == 4:
        distance = (tl.load(plane + run % 4 * RUN + at).to(tl.int32) >> (run & 4)) & 15
    else:
        low = (tl.load(plane + run % 2 * RUN + at).to(tl.int32) >> (run & 6)) & 3
        distance = low | ((tl.load(plane + 2 * RUN + at).to(tl.int32) >> run) & 1) << 2
    here = block * BLOCK + lane
    byte = tl.load(mantissa + here, mask=here < num_weights, other=0).to(tl.int32)
    exponent = tl.load(top).to(tl.int32) - distance
    _store_number(
        mantissa,
        out + here,
        ((byte & 0x80) << 8 | byte & 0x7F) + (exponent << 7),
        here < num_weights,
    )


@jit(do_not_specialize=["num_weights", "num_chunks"])
def _put_lists(
    mantissa: tl.tensor,
    lists: tl.tensor,
    start: tl.tensor,
    out: tl.tensor,
    num_weights: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Run one program per chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, AT_ONCE)
    num_all = tl.load(start + num_chunks)
    lo = tl.load(start + chunk)
    hi = tl.load(start + chunk + 1)
    for first in range(lo, hi, AT_ONCE):
        at = first + lane
        low = tl.load(lists + at, mask=at < hi, other=0).to(tl.int64)
        high = tl.load(lists + num_all + at, mask=at < hi, other=0).to(tl.int64)
        exponent = tl.load(lists + 2 * num_all + at, mask=at < hi, other=0).to(tl.int32)
        place = chunk * CHUNK + high * 256 + low
        is_own = (at < hi) & (place < num_weights)
        byte = tl.load(mantissa + place, mask=is_own, other=0).to(tl.int32)
        _store_number(
            mantissa, out + place, (byte & 0x80) << 8 | byte & 0x7F | exponent << 7, is_own
        )


@jit
def _store_number(mantissa: tl.tensor, out: tl.tensor, word: tl.tensor, mask: tl.tensor) -> None:
    """Store the bits as they are, or rounded to another type."""
    if mantissa.dtype.element_ty == tl.int8:
        bits = (word & -32768 | (word & 4095) << 3 | word >> 12 & 7).to(tl.int16)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = word.to(tl.int16)
        number = (word << 16).to(tl.float32, bitcast=True)
    if out.dtype.element_ty == tl.int16:
        tl.store(out, bits, mask=mask)
    else:
        tl.store(out, number.to(out.dtype.element_ty), mask=mask)
