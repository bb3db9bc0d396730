"""Weights in the blocks of GGUF: 32 or 256 numbers with scales of their own, of 4 to 8 bits each.

A number is `scale x (q - zero) + offset` of its group. Whatever the kind, q has at most 8 bits and a scale at most 18, so
that the product is exact in float32 and one rounding is left, that of the sum; without an offset there is none. So ways
of computing it, fused or not, give the same bits. Layouts: ggml-common.h of llama.cpp.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.jit import jit, tl

_CHUNK_NUMBERS = 1 << 15  # what is made of them in float32 stays in the cache
_TILE = 1024  # numbers of one program
_NOTHING = -0.0  # as an offset: 0.0 would make a zero of another sign
_ZERO_OF = {"Q4_0": 8, "Q5_0": 16}  # what q is counted from
U, L, I, F = np.uint32, np.uint64, np.int32, np.float32


def expand_blocks_reference(kind: str, block_MB: Tensor, out_MW: Tensor) -> None:
    """Fill `out` with the numbers of blocks (uint8, as stored, one to a row) of a kind such as `Q4_K`."""
    step = max(1, _CHUNK_NUMBERS // out_MW.shape[1])
    parts = {"Q8_0": _q8_0, "Q6_K": _q6_k, "Q4_K": _q45_k, "Q5_K": _q45_k}.get(kind, _q45)
    for lo in range(0, len(block_MB), step):
        scale_MG, offset_MG, q_MW = parts(kind, block_MB[lo : lo + step])
        q_MGR = q_MW.float().unflatten(1, (scale_MG.shape[1], -1))
        out_MW[lo : lo + step] = (scale_MG[..., None] * q_MGR + offset_MG[..., None]).flatten(1).to(out_MW.dtype)


def _half(block_MB: Tensor, at: int) -> Tensor:
    """Of every block the fp16 number at a byte, (M, 1)."""
    return block_MB[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(byte_MB: Tensor, run: int) -> Tensor:
    """Low halves of so many bytes, then their high halves, and so on."""
    byte_MAR = byte_MB.unflatten(1, (-1, run))
    return torch.cat((byte_MAR & 15, byte_MAR >> 4), -1).flatten(1)


def _bits(byte_MB: Tensor, run: int, width: int) -> Tensor:
    """The lowest bits of so many bytes, then their next ones, and so on."""
    shift_S1 = torch.arange(0, 8, width, dtype=torch.uint8, device=byte_MB.device)[:, None]
    return (byte_MB.unflatten(1, (-1, 1, run)) >> shift_S1 & (1 << width) - 1).flatten(1)


def _q8_0(_: str, block_MB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale_M1 = _half(block_MB, 0)
    return scale_M1, torch.full_like(scale_M1, _NOTHING), block_MB[:, 2:].contiguous().view(torch.int8)


def _q45(kind: str, block_MB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: scale, offset if any, fifth bits if any, nibbles."""
    scale_M1, q_MW = _half(block_MB, 0), _nibbles(block_MB[:, -16:], 16)
    if kind[1] == "5":
        shift_8 = torch.arange(8, dtype=torch.uint8, device=block_MB.device)
        q_MW = q_MW | (block_MB[:, -20:-16, None] >> shift_8 & 1).flatten(1) << 4
    if kind[-1] == "1":
        return scale_M1, _half(block_MB, 2), q_MW
    return scale_M1, torch.full_like(scale_M1, _NOTHING), q_MW.to(torch.int8) - _ZERO_OF[kind]


def _q45_k(kind: str, block_MB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_K and Q5_K: two scales, eight 6-bit scales and offsets of groups, fifth bits if any, nibbles."""
    low, off, high = (block_MB[:, at : at + 4] for at in (4, 8, 12))
    scale_MG = torch.cat((low & 63, high & 15 | low >> 6 << 4), 1) * _half(block_MB, 0)
    offset_MG = torch.cat((off & 63, high >> 4 | off >> 6 << 4), 1) * _half(block_MB, 2)
    q_MW = _nibbles(block_MB[:, -128:], 32)
    return scale_MG, -offset_MG, q_MW if kind == "Q4_K" else q_MW | _bits(block_MB[:, 16:48], 32, 1) << 4


def _q6_k(_: str, block_MB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nibbles, upper two bits, an 8-bit scale for each group of 16, a scale for these."""
    q_MW = _nibbles(block_MB[:, :128], 64) | _bits(block_MB[:, 128:192], 32, 2) << 4
    scale_MG = block_MB[:, 192:208].contiguous().view(torch.int8) * _half(block_MB, 208)
    return scale_MG, torch.full_like(scale_MG, _NOTHING), q_MW.to(torch.int8) - 32


def expand_blocks_compiled(kind: str, block_MB: Tensor, out_MW: Tensor) -> None:
    """The same on a CPU, compiled; float16, which numba has not, is rounded by torch from float32 in the cache."""
    fill, halves, source = _COMPILED[kind], _float_of_half(), block_MB.numpy()
    bits = torch.uint16 if out_MW.dtype == torch.bfloat16 else torch.uint32
    step = max(1, _CHUNK_NUMBERS // out_MW.shape[1])

    def work(first: int, last: int) -> None:
        if out_MW.dtype != torch.float16:
            return fill(source[first:last], halves, out_MW[first:last].view(bits).numpy())
        scratch_MW = torch.empty(step, out_MW.shape[1])
        for lo in range(first, last, step):
            rows = slice(lo, min(lo + step, last))
            part_MW = scratch_MW[: rows.stop - lo]
            fill(source[rows], halves, part_MW.view(bits).numpy())
            out_MW[rows] = part_MW

    share_rows(work, len(block_MB))


@cache
def _float_of_half() -> Any:
    """All fp16 numbers in float32: numba has none of them, and a scale is for 16 numbers or more."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float().numpy()


# In what follows a number's bits in float32, v, are stored as (v + half + (v >> 16 & odd)) >> shift: bfloat16 rounded to
# the nearest, of two the even one, where numbers have 2 bytes, and themselves where they have 4. Indices are unsigned, or
# numba would look for negative ones in every turn of a loop.


@compiled
def _fill_q8_0(block_MB: Any, halves: Any, out_MW: Any) -> None:
    shift = U(32 - 8 * out_MW.itemsize)
    half, odd = (U(0x7FFF), U(1)) if shift else (U(0), U(0))
    for i in range(L(len(block_MB))):
        scale = halves[block_MB[i, 0] | U(block_MB[i, 1]) << U(8)]
        for k in range(U(32)):
            v = F(scale * F(np.int8(block_MB[i, U(2) + k]))).view(U)
            out_MW[i, k] = (v + half + ((v >> U(16)) & odd)) >> shift


@compiled
def _fill_q45(block_MB: Any, halves: Any, out_MW: Any) -> None:
    """Which of the four kinds it is, the size of a block tells."""
    shift = U(32 - 8 * out_MW.itemsize)
    half, odd = (U(0x7FFF), U(1)) if shift else (U(0), U(0))
    num_bytes = block_MB.shape[1]
    has_fifth, has_offset = num_bytes >= 22, num_bytes % 4 == 0
    zero, low_at, high = I(0 if has_offset else 16 if has_fifth else 8), U(num_bytes - 16), U(0)
    for i in range(L(len(block_MB))):
        scale = halves[block_MB[i, 0] | U(block_MB[i, 1]) << U(8)]
        offset = halves[block_MB[i, 2] | U(block_MB[i, 3]) << U(8) if has_offset else U(0x8000)]  # or -0
        if has_fifth:
            a, b, c, d = low_at - U(4), low_at - U(3), low_at - U(2), low_at - U(1)
            high = U(block_MB[i, a]) | U(block_MB[i, b]) << U(8) | U(block_MB[i, c]) << U(16) | U(block_MB[i, d]) << U(24)
        for k in range(U(16)):
            byte = U(block_MB[i, low_at + k])
            v = F(scale * F(I((byte & U(15)) | ((high >> k) & U(1)) << U(4)) - zero) + offset).view(U)
            out_MW[i, k] = (v + half + ((v >> U(16)) & odd)) >> shift
            v = F(scale * F(I((byte >> U(4)) | ((high >> (k + U(16))) & U(1)) << U(4)) - zero) + offset).view(U)
            out_MW[i, k + U(16)] = (v + half + ((v >> U(16)) & odd)) >> shift


@compiled
def _fill_q45_k(block_MB: Any, halves: Any, out_MW: Any) -> None:
    """The scales and offsets of a block first, then 64 of its numbers at a time; memory as one run is twice as fast."""
    shift = U(32 - 8 * out_MW.itemsize)
    half, odd = (U(0x7FFF), U(1)) if shift else (U(0), U(0))
    source, out = block_MB.ravel(), out_MW.ravel()
    size, has_fifth = L(block_MB.shape[1]), block_MB.shape[1] == 176
    scale, offset = np.empty(8, F), np.empty(8, F)
    for i in range(L(len(block_MB))):
        first, byte_at = i * size, i * size + size - L(128)
        by = halves[source[first] | U(source[first + L(1)]) << U(8)]
        off_by = halves[source[first + L(2)] | U(source[first + L(3)]) << U(8)]
        for j in range(L(4)):
            low, off, high = source[first + L(4) + j], source[first + L(8) + j], source[first + L(12) + j]
            scale[j], scale[L(4) + j] = by * F(low & 63), by * F((high & 15) | (low >> 6) << 4)
            offset[j], offset[L(4) + j] = off_by * F(off & 63), off_by * F((high >> 4) | (off >> 6) << 4)
        for j in range(L(4)):
            scale_a, scale_b = scale[L(2) * j], scale[L(2) * j + L(1)]
            offset_a, offset_b = offset[L(2) * j], offset[L(2) * j + L(1)]
            at, a, b, two = byte_at + L(32) * j, L(256) * i + L(64) * j, L(256) * i + L(64) * j + L(32), U(2) * U(j)
            if has_fifth:
                for k in range(L(32)):
                    byte, high = U(source[at + k]), U(source[first + L(16) + k]) >> two
                    v = F(scale_a * F(I((byte & U(15)) | (high & U(1)) << U(4))) - offset_a).view(U)
                    out[a + k] = (v + half + ((v >> U(16)) & odd)) >> shift
                    v = F(scale_b * F(I((byte >> U(4)) | (high & U(2)) << U(3))) - offset_b).view(U)
                    out[b + k] = (v + half + ((v >> U(16)) & odd)) >> shift
            else:
                for k in range(L(32)):
                    byte = U(source[at + k])
                    v = F(scale_a * F(I(byte & U(15))) - offset_a).view(U)
                    out[a + k] = (v + half + ((v >> U(16)) & odd)) >> shift
                    v = F(scale_b * F(I(byte >> U(4))) - offset_b).view(U)
                    out[b + k] = (v + half + ((v >> U(16)) & odd)) >> shift


@compiled
def _fill_q6_k(block_MB: Any, halves: Any, out_MW: Any) -> None:
    """Of 128 numbers, four runs of 32 share bytes: a byte of the first 32 low ones has halves for runs 0 and 2."""
    shift = U(32 - 8 * out_MW.itemsize)
    half, odd = (U(0x7FFF), U(1)) if shift else (U(0), U(0))
    for i in range(L(len(block_MB))):
        by = halves[block_MB[i, 208] | U(block_MB[i, 209]) << U(8)]
        for j in range(U(8)):  # both halves of a block, both low runs, both groups of 16 of a run
            first, run, group = U(j >> U(2)), U(j >> U(1)) & U(1), U(j) & U(1)
            low_at = U(64) * first + U(32) * run + U(16) * group
            high_at, two = U(128) + U(32) * first + U(16) * group, U(2) * run
            scale_at, out_at = U(192) + U(8) * first + U(2) * run + group, U(128) * first + U(32) * run + U(16) * group
            scale_a, scale_b = by * F(np.int8(block_MB[i, scale_at])), by * F(np.int8(block_MB[i, scale_at + U(4)]))
            for k in range(U(16)):
                low, high = U(block_MB[i, low_at + k]), U(block_MB[i, high_at + k]) >> two
                v = F(scale_a * F(I((low & U(15)) | (high & U(3)) << U(4)) - I(32))).view(U)
                out_MW[i, out_at + k] = (v + half + ((v >> U(16)) & odd)) >> shift
                v = F(scale_b * F(I((low >> U(4)) | (high >> U(4) & U(3)) << U(4)) - I(32))).view(U)
                out_MW[i, out_at + U(64) + k] = (v + half + ((v >> U(16)) & odd)) >> shift


_COMPILED = {"Q8_0": _fill_q8_0, "Q6_K": _fill_q6_k, "Q5_K": _fill_q45_k, "Q4_K": _fill_q45_k}
_COMPILED |= {kind: _fill_q45 for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")}


def expand_blocks_kernel(kind: str, block_MB: Tensor, out_MW: Tensor) -> None:
    """The same in Triton."""
    num_blocks, num_bytes = block_MB.shape
    if num_blocks:
        half = block_MB.view(torch.float16)
        grid, sizes = (-(-out_MW.numel() // _TILE),), {"BYTES": num_bytes, "NUMBERS": out_MW.shape[1]}
        _expand[grid](out_MW, block_MB, half, out_MW.numel(), KIND=kind, TILE=_TILE, **sizes)


@jit(do_not_specialize=["num_numbers"])
def _expand(
    out: tl.tensor,
    byte: tl.tensor,
    half: tl.tensor,
    num_numbers: tl.tensor,
    KIND: tl.constexpr,
    BYTES: tl.constexpr,
    NUMBERS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each lane finds the bytes of its number: those of a block are in the cache by then."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_real = place < num_numbers
    block = tl.minimum(place, num_numbers - 1) // NUMBERS
    at, k = byte + block * BYTES, (place % NUMBERS).to(tl.int32)
    scale = tl.load(half + block * (BYTES // 2)).to(tl.float32)
    if KIND == "Q8_0":
        value = scale * tl.load(at + 2 + k).to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "Q6_K":
        low = tl.load(at + (k // 128) * 64 + k % 64) >> (4 * (k // 64 % 2)).to(tl.uint8) & 15
        high = tl.load(at + 128 + (k // 128) * 32 + k % 32) >> (2 * (k // 32 % 4)).to(tl.uint8) & 3
        group = tl.load(at + 192 + k // 16).to(tl.int8, bitcast=True).to(tl.float32)
        by = tl.load(half + block * (BYTES // 2) + 104).to(tl.float32)
        value = by * group * ((low | high << 4).to(tl.int32) - 32).to(tl.float32)
    elif NUMBERS == 256:
        group = k // 32
        q = tl.load(at + (BYTES - 128) + (k // 64) * 32 + k % 32) >> (4 * (group % 2)).to(tl.uint8) & 15
        if KIND == "Q5_K":
            q |= (tl.load(at + 16 + k % 32) >> group.to(tl.uint8) & 1) << 4
        low, off, high = tl.load(at + 4 + group % 4), tl.load(at + 8 + group % 4), tl.load(at + 12 + group % 4)
        factor = tl.where(group < 4, low & 63, high & 15 | low >> 6 << 4).to(tl.float32)
        shift = tl.where(group < 4, off & 63, high >> 4 | off >> 6 << 4).to(tl.float32)
        by = tl.load(half + block * (BYTES // 2) + 1).to(tl.float32)
        value = scale * factor * q.to(tl.float32) - by * shift
    else:
        q = (tl.load(at + (BYTES - 16) + k % 16) >> (4 * (k // 16)).to(tl.uint8) & 15).to(tl.int32)
        if BYTES >= 22:
            q |= (tl.load(at + (BYTES - 20) + k // 8) >> (k % 8).to(tl.uint8) & 1).to(tl.int32) << 4
        if BYTES % 4 == 0:
            value = scale * q.to(tl.float32) + tl.load(half + block * (BYTES // 2) + 1).to(tl.float32)
        else:
            value = scale * (q - (16 if BYTES == 22 else 8)).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_real)
