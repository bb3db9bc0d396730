"""Weights of 8-bit floating-point numbers, with one scale for each block of them.

All three forms take the number apart with integers: few processors, and only GPUs of the last
generations, know these types. Invariant: each number is exact in float32, and rounded once after it
was multiplied with its scale.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from offload.kernels.compiled import Compiled, compiled, share_rows
from offload.kernels.jit import jit, tl, triton
from offload.kernels.rounding import F32, U32, bits_of, numbers, rounded

_CHUNK_ROWS = 64  # expanded to float32 they stay in the cache
_RUN = 32  # columns of a block of MXFP8
_BLOCK = 2048  # numbers of a row that one program writes


class _Layout(NamedTuple):
    """The bits of a number, from the lowest: mantissa, exponent, sign."""

    shift: int  # moves the mantissa to its place in float32
    bias: int  # what the exponent lacks there, in that place
    least_normal: int  # bits without sign; below it numbers are multiples of `unit`
    unit: float
    first_special: int  # bits from here on are infinity or NaN


_LAYOUTS = {
    torch.float8_e4m3fn: _Layout(20, 120 << 23, 8, 2**-9, 127),
    torch.float8_e5m2: _Layout(21, 112 << 23, 4, 2**-16, 124),
}


def expand_float8_reference(
    weight_NK: Tensor,
    scale_AB: Tensor,
    block: tuple[int, int],
    out_NK: Tensor,
    levels: Tensor | None = None,
) -> None:
    """Fill `out` with weight x scale, in plain torch.

    `scale_AB` has one scale for each block of `block` rows and columns, in float32 or as bytes that
    index into `levels` (256,), float32; the last blocks may be cut. Two numbers are looked up at
    once where rows are whole words. Weights and `out` are contiguous; `out` is bfloat16, float16 or
    float32.
    """
    num_rows, num_columns = weight_NK.shape
    is_in_words = num_columns % 2 == 0 and weight_NK.storage_offset() % 2 == 0
    values = _look_up if is_in_words else Tensor.float
    num_whole, rest = divmod(num_columns, block[1])
    for lo in range(0, num_rows, _CHUNK_ROWS):
        value_RK = values(weight_NK[lo : lo + _CHUNK_ROWS])
        row_R = torch.arange(lo, lo + len(value_RK), device=scale_AB.device)
        scale_RB = scale_AB[row_R // block[0]]
        scale_RB = scale_RB if levels is None else levels[scale_RB.int()]
        whole_RK, rest_RK = value_RK.split([num_columns - rest, rest], 1)
        whole_RK.unflatten(1, (num_whole, block[1])).mul_(scale_RB[:, :num_whole, None])
        rest_RK.mul_(scale_RB[:, -1:])
        out_NK[lo : lo + _CHUNK_ROWS] = value_RK


def expand_float8_compiled(
    weight_NK: Tensor,
    scale_AB: Tensor,
    block: tuple[int, int],
    out_NK: Tensor,
    levels: Tensor | None = None,
) -> None:
    """Do what the reference does, with numba, on as many threads as torch has."""
    weight = weight_NK.view(torch.uint8).numpy()
    scale = scale_AB.numpy()
    out = numbers(out_NK)
    is_run = block[1] == _RUN and weight.shape[1] % _RUN == 0
    fill = _FILLS[weight_NK.dtype, _RUN if is_run else 0].to(out_NK.dtype)

    def share(lo: int, hi: int) -> None:
        if levels is None:
            fill(weight, scale, (lo, hi, *block), out)
            return
        # by numpy, and for as many rows as stay in the cache
        for first in range(lo, hi, _CHUNK_ROWS):
            last = min(first + _CHUNK_ROWS, hi)
            start = first // block[0]
            part = levels.numpy()[scale[start : (last - 1) // block[0] + 1]]
            rows = slice(start * block[0], last)
            inner = (first - start * block[0], last - start * block[0])
            fill(weight[rows], part, (*inner, *block), out[rows])

    share_rows(share, len(weight))


def expand_float8_kernel(
    weight_NK: Tensor,
    scale_AB: Tensor,
    block: tuple[int, int],
    out_NK: Tensor,
    levels: Tensor | None = None,
) -> None:
    """Do what the reference does, in Triton."""
    num_rows, num_columns = weight_NK.shape
    layout = _LAYOUTS[weight_NK.dtype]
    num_blocks = triton.cdiv(num_columns, _BLOCK)
    _fill_blocks[(num_rows * num_blocks,)](
        out_NK,
        weight_NK.view(torch.uint8),
        scale_AB,
        num_columns,
        num_blocks,
        *block,
        scale_AB.shape[1],
        scale_AB if levels is None else levels,
        HAS_LEVELS=levels is not None,
        SHIFT=layout.shift,
        BIAS=layout.bias,
        LEAST_NORMAL=layout.least_normal,
        UNIT=layout.unit,
        FIRST_SPECIAL=layout.first_special,
        BLOCK=_BLOCK,
    )


def _look_up(weight_RK: Tensor) -> Tensor:
    """Return the weights in float32."""
    word_W = weight_RK.reshape(-1).view(torch.int16).int().bitwise_and_(0xFFFF)
    pair_W = _pairs(weight_RK.dtype, weight_RK.device).index_select(0, word_W)
    return pair_W.view(torch.float32).view(weight_RK.shape)


@cache
def _pairs(kind: torch.dtype, device: torch.device) -> Tensor:
    """Return the float32 values of all words of two numbers, 8 bytes each: quick to look up."""
    word_P = torch.arange(1 << 16, device=device).to(torch.uint16)
    return word_P.view(kind).float().view(torch.int64)


def _fill_rows(layout: _Layout, run: int) -> Compiled:
    """Return the function for one layout and blocks of `run` columns; 0: of any.

    Numba takes bound values for constants: shifts by constants run twice as fast, and so do loops
    over a few numbers whose count is known.
    """
    shift = U32(layout.shift)
    bias = U32(layout.bias)
    unit = F32(layout.unit)
    least_normal = U32(layout.least_normal)
    first_special = U32(layout.first_special)

    @compiled
    def fill_rows(weight, scale, extent, out):  # type: ignore[no-untyped-def]  # numba infers types
        """Fill rows [first, last); subnormal codes are products, others are moved bits."""
        first, last, block_rows, block_columns = extent
        for row in range(first, last):
            source = weight[row]
            target = out[row]
            scales = scale[row // block_rows]
            for index in range(scales.size):
                begin = U32(index * block_columns)
                factor = scales[index]
                left = U32(source.size) - begin
                for step in range(U32(run) if run else U32(min(U32(block_columns), left))):
                    column = U32(begin + step)
                    code = U32(source[column])
                    size = U32(code & U32(0x7F))
                    sign = U32(U32(code & U32(0x80)) << U32(24))
                    place = U32(size << shift)
                    normal = U32(place + bias)
                    special = U32(U32(place & U32(0x7FFFFF)) | U32(0x7F800000))
                    bits = bits_of(F32(size) * unit) if size < least_normal else normal
                    bits = special if size >= first_special else bits
                    target[column] = rounded(U32(bits | sign).view(F32) * factor)

    return fill_rows


_FILLS = {
    (kind, run): _fill_rows(layout, run) for kind, layout in _LAYOUTS.items() for run in (0, _RUN)
}


@jit(do_not_specialize=["num_blocks", "block_rows", "block_columns", "num_scales"])
def _fill_blocks(
    out: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    num_columns: tl.tensor,
    num_blocks: tl.tensor,
    block_rows: tl.tensor,
    block_columns: tl.tensor,
    num_scales: tl.tensor,
    levels: tl.tensor,
    HAS_LEVELS: tl.constexpr,
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    LEAST_NORMAL: tl.constexpr,
    UNIT: tl.constexpr,
    FIRST_SPECIAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Run one program per row and block of consecutive numbers."""
    row = tl.program_id(0) // num_blocks
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < num_columns
    begin = row.to(tl.int64) * num_columns
    code = tl.load(weight + begin + column, mask=is_inside, other=0).to(tl.int32)
    size = code & 0x7F
    place = size << SHIFT
    bits = tl.where(size >= FIRST_SPECIAL, (place & 0x7FFFFF) | 0x7F800000, place + BIAS)
    bits = tl.where(
        size < LEAST_NORMAL, (size.to(tl.float32) * UNIT).to(tl.int32, bitcast=True), bits
    )
    # the sign is set as a bit, since `-value` would make 0 of -0
    value = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    factor = tl.load(
        scale + row // block_rows * num_scales + column // block_columns, mask=is_inside, other=0
    )
    if HAS_LEVELS:
        factor = tl.load(levels + factor.to(tl.int32), mask=is_inside, other=0)
    tl.store(out + begin + column, (value * factor).to(out.dtype.element_ty), mask=is_inside)
