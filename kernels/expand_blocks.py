"""Weights in the blocks of GGUF: 32 or 256 numbers of 2 to 8 bits with their own scales.

A number is `scale x (q - zero) + offset` of its group, or `scale x code` where q is the place of a
code in a table. In every kind the bits of q and of the scale
fit together into float32, so their product is exact and one rounding is left, that of the sum;
without an offset there is none. So all ways of computing it, fused or not, give the same bits.
Layouts: ggml-common.h of llama.cpp.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.jit import jit, tl
from offload.kernels.rounding import F32, I32, U32, U64, numbers, rounded

# What is made of this many in float32 stays in the cache; a quarter of it would keep Python busier
# than torch.
_CHUNK_NUMBERS = 1 << 17
_TILE = 1024  # numbers of one program
_ZERO_OF = {"Q4_0": 8, "Q5_0": 16}  # what q is counted from
# by nibble: of IQ4_NL and IQ4_XS; of MXFP4, doubled, for which its scales are halved
_IQ4_CODES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
_E2M1_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
I8 = np.int8
# each group's scale, its offset if it has one, and its codes
Parts = tuple[Tensor, Tensor | None, Tensor]


def expand_blocks_reference(kind: str, block_MB: Tensor, out_MW: Tensor) -> None:
    """Fill `out` with the numbers of blocks (uint8, one to a row) of a kind such as `Q4_K`."""
    step = max(1, _CHUNK_NUMBERS // out_MW.shape[1])
    parts = _PARTS_OF.get(kind, _q45)
    for lo in range(0, len(block_MB), step):
        scale_MG, offset_MG, q_MW = parts(kind, block_MB[lo : lo + step])
        value_MW = q_MW.float()
        value_MGR = value_MW.unflatten(1, (scale_MG.shape[1], -1)).mul_(scale_MG[..., None])
        if offset_MG is not None:
            value_MGR.add_(offset_MG[..., None])
        out_MW[lo : lo + step] = value_MW


def _half(block_MB: Tensor, at: int) -> Tensor:
    """Return the fp16 number at byte `at` of every block, (M, 1)."""
    return block_MB[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(byte_MB: Tensor, run: int) -> Tensor:
    """Return the low halves of `run` bytes, then their high halves, and so on."""
    byte_MAR = byte_MB.unflatten(1, (-1, run))
    return torch.cat((byte_MAR & 15, byte_MAR >> 4), -1).flatten(1)


def _bits(byte_MB: Tensor, run: int, width: int) -> Tensor:
    """Return the lowest `width` bits of `run` bytes, then their next ones, and so on."""
    shift_S1 = torch.arange(0, 8, width, dtype=torch.uint8, device=byte_MB.device)[:, None]
    return (byte_MB.unflatten(1, (-1, 1, run)) >> shift_S1 & (1 << width) - 1).flatten(1)


def _q8_0(_: str, block_MB: Tensor) -> Parts:
    scale_M1 = _half(block_MB, 0)
    return scale_M1, None, block_MB[:, 2:].view(torch.int8)


def _q45(kind: str, block_MB: Tensor) -> Parts:
    """Take apart Q4_0, Q4_1, Q5_0 and Q5_1: scale, maybe offset, maybe fifth bits, nibbles."""
    scale_M1 = _half(block_MB, 0)
    q_MW = _nibbles(block_MB[:, -16:], 16)
    if kind[1] == "5":
        shift_8 = torch.arange(8, dtype=torch.uint8, device=block_MB.device)
        q_MW = q_MW | (block_MB[:, -20:-16, None] >> shift_8 & 1).flatten(1) << 4
    if kind[-1] == "1":
        return scale_M1, _half(block_MB, 2), q_MW
    return scale_M1, None, q_MW.view(torch.int8) - _ZERO_OF[kind]


def _q45_k(kind: str, block_MB: Tensor) -> Parts:
    """Take apart Q4_K and Q5_K: two scales, 6-bit scales and offsets, maybe fifth bits, nibbles."""
    low, off, high = (block_MB[:, at : at + 4] for at in (4, 8, 12))
    scale_MG = torch.cat((low & 63, high & 15 | low >> 6 << 4), 1) * _half(block_MB, 0)
    offset_MG = torch.cat((off & 63, high >> 4 | off >> 6 << 4), 1) * _half(block_MB, 2)
    q_MW = _nibbles(block_MB[:, -128:], 32)
    return (
        scale_MG,
        -offset_MG,
        q_MW if kind == "Q4_K" else q_MW | _bits(block_MB[:, 16:48], 32, 1) << 4,
    )


def _q6_k(_: str, block_MB: Tensor) -> Parts:
    """Take apart Q6_K: nibbles, upper two bits, 8-bit scales of groups of 16, a scale for these."""
    q_MW = _nibbles(block_MB[:, :128], 64) | _bits(block_MB[:, 128:192], 32, 2) << 4
    scale_MG = block_MB[:, 192:208].contiguous().view(torch.int8) * _half(block_MB, 208)
    return scale_MG, None, q_MW.view(torch.int8) - 32


def _q2_k(_: str, block_MB: Tensor) -> Parts:
    """Take apart Q2_K: 4-bit scales and offsets of groups of 16, two bits a number, two scales."""
    group_MG = block_MB[:, :16]
    scale_MG = (group_MG & 15) * _half(block_MB, 80)
    offset_MG = (group_MG >> 4) * _half(block_MB, 82)
    return scale_MG, -offset_MG, _bits(block_MB[:, 16:80], 32, 2)


def _q3_k(_: str, block_MB: Tensor) -> Parts:
    """Take apart Q3_K: third bits, two bits a number, 6-bit scales of groups of 16, a scale."""
    low, high = block_MB[:, 96:104], block_MB[:, 104:108]
    factor_MG = torch.cat((low & 15, low >> 4), 1) | _bits(high, 4, 2) << 4
    q_MW = _bits(block_MB[:, 32:96], 32, 2) | _bits(block_MB[:, :32], 32, 1) << 2
    scale_MG = (factor_MG.view(torch.int8) - 32) * _half(block_MB, 108)
    return scale_MG, None, q_MW.view(torch.int8) - 4


def _iq4_nl(_: str, block_MB: Tensor) -> Parts:
    """Take apart IQ4_NL: a scale, and the places of codes."""
    return _half(block_MB, 0), None, _coded(_IQ4_CODES, _nibbles(block_MB[:, 2:], 16))


def _iq4_xs(_: str, block_MB: Tensor) -> Parts:
    """Take apart IQ4_XS: a scale, 6-bit scales of groups of 32, and the places of codes."""
    nibble_MG = torch.stack((block_MB[:, 4:8] & 15, block_MB[:, 4:8] >> 4), -1).flatten(1)
    shift_S = torch.arange(0, 8, 2, dtype=torch.uint8, device=block_MB.device)
    high_MG = (block_MB[:, 2:4, None] >> shift_S & 3).flatten(1)
    scale_MG = ((nibble_MG | high_MG << 4).view(torch.int8) - 32) * _half(block_MB, 0)
    return scale_MG, None, _coded(_IQ4_CODES, _nibbles(block_MB[:, 8:], 16))


def _mxfp4(_: str, block_MB: Tensor) -> Parts:
    """Take apart MXFP4: an exponent, and the places of codes."""
    scale_M1 = torch.from_numpy(_halved_powers()).to(block_MB.device)[block_MB[:, :1].long()]
    return scale_M1, None, _coded(_E2M1_CODES, _nibbles(block_MB[:, 1:], 16))


def _coded(codes: np.ndarray, place_MW: Tensor) -> Tensor:
    return torch.from_numpy(codes).to(place_MW.device)[place_MW.int()]


@cache
def _halved_powers() -> np.ndarray:
    """Return 2^(e - 128) in float32 for all exponents of 8 bits, two of them subnormal."""
    exponent = np.arange(256, dtype=np.uint32)
    subnormal = np.uint32(1 << 21) << np.minimum(exponent, 1)
    return np.where(exponent < 2, subnormal, np.maximum(exponent, 1) - 1 << 23).view(np.float32)


_PARTS_OF = {"Q8_0": _q8_0, "Q6_K": _q6_k, "Q4_K": _q45_k, "Q5_K": _q45_k, "Q2_K": _q2_k, "Q3_K": _q3_k,
             "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4}  # fmt: skip


def expand_blocks_compiled(kind: str, block_MB: Tensor, out_MW: Tensor) -> None:
    fill = _COMPILED[kind].to(out_MW.dtype)
    source = block_MB.numpy()
    out = numbers(out_MW)
    halves = _halved_powers() if kind == "MXFP4" else _float_of_half()
    share_rows(lambda lo, hi: fill(source[lo:hi], halves, out[lo:hi]), len(source))


@cache
def _float_of_half() -> np.ndarray:
    """Return a table of all fp16 numbers in float32, since numba has no fp16.

    All NaNs become the one that `rounded` takes; others would come out as zeros.
    """
    table = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    return table.masked_fill_(table.isnan(), torch.nan).numpy()


# Memory as one run is twice as fast as rows of it. Indices are unsigned, see `Compiled`.


@compiled
def _half_at(source, halves, at):  # type: ignore[no-untyped-def]  # numba infers types
    return halves[U32(source[at]) | U32(U32(source[at + U64(1)]) << U32(8))]


@compiled
def _fill_q8_0(block_MB, halves, out_MW):  # type: ignore[no-untyped-def]
    source = block_MB.ravel()
    out = out_MW.ravel()
    for i in range(U64(len(block_MB))):
        at = U64(34) * i + U64(2)
        to = U64(32) * i
        scale = _half_at(source, halves, U64(34) * i)
        for k in range(U64(32)):
            out[to + k] = rounded(F32(scale * F32(I8(source[at + k]))))


@compiled
def _fill_q45(block_MB, halves, out_MW):  # type: ignore[no-untyped-def]
    """Fill blocks of any of the four kinds, which differ in the size of a block."""
    source = block_MB.ravel()
    out = out_MW.ravel()
    size = U64(block_MB.shape[1])
    has_fifth = size >= U64(22)
    has_offset = size % U64(4) == U64(0)
    zero = I32(0 if has_offset else 16 if has_fifth else 8)
    high = U32(0)
    offset = F32(-0.0)
    for i in range(U64(len(block_MB))):
        to = U64(32) * i
        at = size * i + size - U64(16)
        scale = _half_at(source, halves, size * i)
        if has_offset:
            offset = _half_at(source, halves, size * i + U64(2))
        if has_fifth:
            high = U32(0)
            for k in range(U64(4)):
                high = U32(high | U32(U32(source[at - U64(4) + k]) << U32(U64(8) * k)))
        for k in range(U64(16)):
            byte = U32(source[at + k])
            bits = U32(high >> U32(k))
            low_q = I32(U32(byte & U32(15)) | U32(U32(bits & U32(1)) << U32(4)))
            high_q = I32(U32(byte >> U32(4)) | U32(U32(U32(bits >> U32(16)) & U32(1)) << U32(4)))
            out[to + k] = rounded(F32(F32(scale * F32(I32(low_q - zero))) + offset))
            out[to + U64(16) + k] = rounded(F32(F32(scale * F32(I32(high_q - zero))) + offset))


@compiled
def _fill_q45_k(block_MB, halves, out_MW):  # type: ignore[no-untyped-def]
    """Compute the scales and offsets of a block first, then 64 of its numbers at a time."""
    source = block_MB.ravel()
    out = out_MW.ravel()
    size = U64(block_MB.shape[1])
    has_fifth = size == U64(176)
    scale = np.empty(8, np.float32)
    offset = np.empty(8, np.float32)
    for i in range(U64(len(block_MB))):
        first = size * i
        by = _half_at(source, halves, first)
        off_by = _half_at(source, halves, first + U64(2))
        for j in range(U64(4)):
            low = source[first + U64(4) + j]
            off = source[first + U64(8) + j]
            high = source[first + U64(12) + j]
            scale[j], scale[U64(4) + j] = (
                by * F32(low & 63),
                by * F32((high & 15) | (low >> 6) << 4),
            )
            offset[j], offset[U64(4) + j] = (
                off_by * F32(off & 63),
                off_by * F32((high >> 4) | (off >> 6) << 4),
            )
        for j in range(U64(4)):
            scale_a = scale[U64(2) * j]
            scale_b = scale[U64(2) * j + U64(1)]
            offset_a = offset[U64(2) * j]
            offset_b = offset[U64(2) * j + U64(1)]
            at = first + size - U64(128) + U64(32) * j
            to = U64(256) * i + U64(64) * j
            two = U32(U64(2) * j)
            for k in range(U64(32)):
                byte = U32(source[at + k])
                high = U32(U32(source[first + U64(16) + k]) >> two) if has_fifth else U32(0)
                low_q = I32(U32(byte & U32(15)) | U32(U32(high & U32(1)) << U32(4)))
                high_q = I32(U32(byte >> U32(4)) | U32(U32(high & U32(2)) << U32(3)))
                out[to + k] = rounded(F32(F32(scale_a * F32(low_q)) - offset_a))
                out[to + U64(32) + k] = rounded(F32(F32(scale_b * F32(high_q)) - offset_b))


@compiled
def _fill_q6_k(block_MB, halves, out_MW):  # type: ignore[no-untyped-def]
    """Fill blocks of Q6_K.

    Among 128 numbers, four runs of 32 share bytes: each of the first 32 low bytes has halves for
    runs 0 and 2.
    """
    source = block_MB.ravel()
    out = out_MW.ravel()
    for i in range(U64(len(block_MB))):
        by = _half_at(source, halves, U64(210) * i + U64(208))
        for j in range(U64(8)):  # both halves of a block, both low runs, both groups of 16 of a run
            half = j >> U64(2)
            run = (j >> U64(1)) & U64(1)
            group = j & U64(1)
            at = U64(210) * i + U64(16) * group
            to = U64(256) * i + U64(128) * half + U64(32) * run + U64(16) * group
            low_at = at + U64(64) * half + U64(32) * run
            high_at = at + U64(128) + U64(32) * half
            scale_at = U64(210) * i + U64(192) + U64(8) * half + U64(2) * run + group
            two = U32(U64(2) * run)
            scale_a = by * F32(I8(source[scale_at]))
            scale_b = by * F32(I8(source[scale_at + U64(4)]))
            for k in range(U64(16)):
                low = U32(source[low_at + k])
                high = U32(U32(source[high_at + k]) >> two)
                q_a = I32(U32(low & U32(15)) | U32(U32(high & U32(3)) << U32(4)))
                q_b = I32(U32(low >> U32(4)) | U32(high & U32(48)))
                out[to + k] = rounded(F32(scale_a * F32(I32(q_a - I32(32)))))
                out[to + U64(64) + k] = rounded(F32(scale_b * F32(I32(q_b - I32(32)))))


@compiled
def _fill_q2_k(block_MB, halves, out_MW):  # type: ignore[no-untyped-def]
    """Fill blocks of Q2_K: a byte has bits of four runs of 32 numbers."""
    source = block_MB.ravel()
    out = out_MW.ravel()
    for i in range(U64(len(block_MB))):
        first = U64(84) * i
        by = _half_at(source, halves, first + U64(80))
        off_by = _half_at(source, halves, first + U64(82))
        for j in range(U64(16)):
            group = source[first + j]
            scale = by * F32(group & 15)
            offset = off_by * F32(group >> 4)
            at = first + U64(16) + U64(32) * (j >> U64(3)) + U64(16) * (j & U64(1))
            two = U32(U64(2) * ((j >> U64(1)) & U64(3)))
            to = U64(256) * i + U64(16) * j
            for k in range(U64(16)):
                q = I32(U32(U32(source[at + k]) >> two) & U32(3))
                out[to + k] = rounded(F32(F32(scale * F32(q)) - offset))


@compiled
def _fill_q3_k(block_MB, halves, out_MW):  # type: ignore[no-untyped-def]
    """Fill blocks of Q3_K: as Q2_K, and a byte has third bits of eight runs of 32 numbers."""
    source = block_MB.ravel()
    out = out_MW.ravel()
    for i in range(U64(len(block_MB))):
        first = U64(110) * i
        by = _half_at(source, halves, first + U64(108))
        for j in range(U64(16)):
            low = U32(U32(source[first + U64(96) + (j & U64(7))]) >> U32(U64(4) * (j >> U64(3))))
            high = U32(U32(source[first + U64(104) + (j & U64(3))]) >> U32(U64(2) * (j >> U64(2))))
            factor = I32(U32(low & U32(15)) | U32(U32(high & U32(3)) << U32(4)))
            scale = F32(by * F32(I32(factor - I32(32))))
            at = first + U64(16) * (j & U64(1))
            words = at + U64(32) + U64(32) * (j >> U64(3))
            two = U32(U64(2) * ((j >> U64(1)) & U64(3)))
            pair_bit = U32(j >> U64(1))
            to = U64(256) * i + U64(16) * j
            for k in range(U64(16)):
                q = U32(U32(U32(source[words + k]) >> two) & U32(3))
                third = U32(U32(U32(source[at + k]) >> pair_bit) & U32(1))
                value = I32(I32(q | U32(third << U32(2))) - I32(4))
                out[to + k] = rounded(F32(scale * F32(value)))


@compiled
def _fill_coded(block_MB, scales, out_MW):  # type: ignore[no-untyped-def]
    """Fill blocks of IQ4_NL or of the shorter MXFP4, whose scales take a byte."""
    source = block_MB.ravel()
    out = out_MW.ravel()
    size = U64(block_MB.shape[1])
    has_byte = size == U64(17)
    codes = _E2M1_CODES if has_byte else _IQ4_CODES
    for i in range(U64(len(block_MB))):
        at = size * i + size - U64(16)
        to = U64(32) * i
        scale = scales[source[size * i]] if has_byte else _half_at(source, scales, size * i)
        for k in range(U64(16)):
            byte = source[at + k]
            out[to + k] = rounded(F32(scale * F32(codes[byte & 15])))
            out[to + U64(16) + k] = rounded(F32(scale * F32(codes[byte >> 4])))


@compiled
def _fill_iq4_xs(block_MB, halves, out_MW):  # type: ignore[no-untyped-def]
    """Fill blocks of IQ4_XS: eight runs of 32 codes, each with a factor of 4 low and 2 high bits."""
    source = block_MB.ravel()
    out = out_MW.ravel()
    for i in range(U64(len(block_MB))):
        first = U64(136) * i
        by = _half_at(source, halves, first)
        for j in range(U64(8)):
            low = U32(U32(source[first + U64(4) + (j >> U64(1))]) >> U32(U64(4) * (j & U64(1))))
            high = U32(U32(source[first + U64(2) + (j >> U64(2))]) >> U32(U64(2) * (j & U64(3))))
            factor = I32(U32(low & U32(15)) | U32(U32(high & U32(3)) << U32(4)))
            scale = F32(by * F32(I32(factor - I32(32))))
            at = first + U64(8) + U64(16) * j
            to = U64(256) * i + U64(32) * j
            for k in range(U64(16)):
                byte = source[at + k]
                out[to + k] = rounded(F32(scale * F32(_IQ4_CODES[byte & 15])))
                out[to + U64(16) + k] = rounded(F32(scale * F32(_IQ4_CODES[byte >> 4])))


_COMPILED = {"Q8_0": _fill_q8_0, "Q6_K": _fill_q6_k, "Q5_K": _fill_q45_k, "Q4_K": _fill_q45_k}
_COMPILED |= {"Q2_K": _fill_q2_k, "Q3_K": _fill_q3_k, "MXFP4": _fill_coded}
_COMPILED |= {"IQ4_NL": _fill_coded, "IQ4_XS": _fill_iq4_xs}
_COMPILED |= dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1"), _fill_q45)


def expand_blocks_kernel(kind: str, block_MB: Tensor, out_MW: Tensor) -> None:
    """Do what the reference does, in Triton."""
    num_blocks, num_bytes = block_MB.shape
    if num_blocks:
        # blocks of an odd length have no half-precision scales
        half = block_MB if num_bytes % 2 else block_MB.view(torch.float16)
        grid = (-(-out_MW.numel() // _TILE),)
        sizes = {"BYTES": num_bytes, "NUMBERS": out_MW.shape[1]}
        # four codes to a word
        words = (_E2M1_CODES if kind == "MXFP4" else _IQ4_CODES).view("<u4").tolist()
        codes = {f"CODES_{index}": word for index, word in enumerate(words)}
        _expand[grid](
            out_MW, block_MB, half, out_MW.numel(), KIND=kind, TILE=_TILE, **sizes, **codes
        )


@jit
def _q23_value(at: tl.tensor, half: tl.tensor, k: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return number `k` of a block of Q2_K or Q3_K, which begins at `at`, seen as halves at `half`."""
    group = k // 16
    words = at + (16 if KIND == "Q2_K" else 32) + k // 128 * 32 + k % 32
    q = tl.load(words) >> (2 * (k // 32 % 4)).to(tl.uint8) & 3
    if KIND == "Q2_K":
        both = tl.load(at + group)
        by = tl.load(half + 40).to(tl.float32)
        off_by = tl.load(half + 41).to(tl.float32)
        value = by * (both & 15).to(tl.float32) * q.to(tl.float32)
        value = value - off_by * (both >> 4).to(tl.float32)
    else:
        q |= (tl.load(at + k % 32) >> (k // 32).to(tl.uint8) & 1) << 2
        low = tl.load(at + 96 + group % 8) >> (4 * (group // 8)).to(tl.uint8) & 15
        high = tl.load(at + 104 + group % 4) >> (2 * (group // 4)).to(tl.uint8) & 3
        by = tl.load(half + 54).to(tl.float32)
        factor = ((low | high << 4).to(tl.int32) - 32).to(tl.float32)
        value = by * factor * (q.to(tl.int32) - 4).to(tl.float32)
    return value


@jit
def _coded_value(
    at: tl.tensor,
    scale: tl.tensor,
    k: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    CODES_0: tl.constexpr,
    CODES_1: tl.constexpr,
    CODES_2: tl.constexpr,
    CODES_3: tl.constexpr,
) -> tl.tensor:
    """Return number `k` of a block whose nibbles, from byte `FIRST` on, are the places of codes."""
    group = k // 32
    q = tl.load(at + FIRST + 16 * group + k % 16)
    q = (q >> (4 * (k // 16 % 2)).to(tl.uint8) & 15).to(tl.int64)
    word = tl.where(
        q < 8, tl.where(q < 4, CODES_0, CODES_1), tl.where(q < 12, CODES_2, CODES_3)
    ).to(tl.int64)
    code = (word >> 8 * (q % 4) & 255).to(tl.int32)
    code = tl.where(code < 128, code, code - 256).to(tl.float32)
    if KIND == "IQ4_XS":
        low = tl.load(at + 4 + group // 2) >> (4 * (group % 2)).to(tl.uint8) & 15
        high = tl.load(at + 2 + group // 4) >> (2 * (group % 4)).to(tl.uint8) & 3
        scale = scale * ((low | high << 4).to(tl.int32) - 32).to(tl.float32)
    return scale * code


@jit
def _q45_k_value(
    at: tl.tensor,
    half: tl.tensor,
    scale: tl.tensor,
    k: tl.tensor,
    KIND: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """Return number `k` of a block of Q4_K or Q5_K, which begins at `at`, seen as halves at `half`."""
    group = k // 32
    q = tl.load(at + (BYTES - 128) + (k // 64) * 32 + k % 32) >> (4 * (group % 2)).to(tl.uint8) & 15
    if KIND == "Q5_K":
        q |= (tl.load(at + 16 + k % 32) >> group.to(tl.uint8) & 1) << 4
    low = tl.load(at + 4 + group % 4)
    off = tl.load(at + 8 + group % 4)
    high = tl.load(at + 12 + group % 4)
    factor = tl.where(group < 4, low & 63, high & 15 | low >> 6 << 4).to(tl.float32)
    shift = tl.where(group < 4, off & 63, high >> 4 | off >> 6 << 4).to(tl.float32)
    by = tl.load(half + 1).to(tl.float32)
    return scale * factor * q.to(tl.float32) - by * shift


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
    CODES_0: tl.constexpr,
    CODES_1: tl.constexpr,
    CODES_2: tl.constexpr,
    CODES_3: tl.constexpr,
) -> None:
    """Expand one number in each lane; the lanes of a block load the same cache lines."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_real = place < num_numbers
    block = tl.minimum(place, num_numbers - 1) // NUMBERS
    at = byte + block * BYTES
    k = (place % NUMBERS).to(tl.int32)
    if KIND == "MXFP4":
        exponent = tl.load(at).to(tl.int32)
        bits = tl.where(exponent < 2, (1 << 21) << exponent % 2, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(half + block * (BYTES // 2)).to(tl.float32)
    if (KIND == "IQ4_NL" or KIND == "IQ4_XS") or KIND == "MXFP4":
        first: tl.constexpr = BYTES - NUMBERS // 2
        value = _coded_value(at, scale, k, KIND, first, CODES_0, CODES_1, CODES_2, CODES_3)
    elif KIND == "Q2_K" or KIND == "Q3_K":
        value = _q23_value(at, half + block * (BYTES // 2), k, KIND)
    elif KIND == "Q8_0":
        value = scale * tl.load(at + 2 + k).to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "Q6_K":
        low = tl.load(at + (k // 128) * 64 + k % 64) >> (4 * (k // 64 % 2)).to(tl.uint8) & 15
        high = tl.load(at + 128 + (k // 128) * 32 + k % 32) >> (2 * (k // 32 % 4)).to(tl.uint8) & 3
        group = tl.load(at + 192 + k // 16).to(tl.int8, bitcast=True).to(tl.float32)
        by = tl.load(half + block * (BYTES // 2) + 104).to(tl.float32)
        value = by * group * ((low | high << 4).to(tl.int32) - 32).to(tl.float32)
    elif NUMBERS == 256:
        value = _q45_k_value(at, half + block * (BYTES // 2), scale, k, KIND, BYTES)
    else:
        q = (tl.load(at + (BYTES - 16) + k % 16) >> (4 * (k // 16)).to(tl.uint8) & 15).to(tl.int32)
        if BYTES >= 22:
            q |= (tl.load(at + (BYTES - 20) + k // 8) >> (k % 8).to(tl.uint8) & 1).to(tl.int32) << 4
        if BYTES % 4 == 0:
            value = scale * q.to(tl.float32) + tl.load(half + block * (BYTES // 2) + 1).to(
                tl.float32
            )
        else:
            value = scale * (q - (16 if BYTES == 22 else 8)).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_real)
