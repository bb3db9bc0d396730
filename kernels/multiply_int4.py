"""Products of up to 16 rows and the words of `int4_blocks` on a GPU: words are read once for all rows.

For drafts: a matrix that is expanded first is written and read again, in 16 bits. Here codes become
numbers in registers, and tensor cores multiply them with the rows: the 16 rows that they take at
least cost little more than one. Sums of a group are float32, and so is what is made of them: scale
x (sum of (code - 8) x row) + offset x (sum of row). Columns are divided among programs by the shape
of the matrix alone, and what these have summed up is added in order.

Invariants: weights are never rounded; a row's bits depend on no row beside it.

Shape letters, in this file only: M rows, N columns of the result, L of them whose codes lie in the
lower bits; K numbers of a row; G groups of k each; P parts of the groups.
"""

import torch
from torch import Tensor

from offload.kernels.int4_blocks import WordLayout, expand_int4_reference
from offload.kernels.jit import jit, tl, triton

MOST_ROWS = 16
# bytes of words that a program reads of each column of the matrix
_LANES = 64
# programs from which a large GPU is busy
_PROGRAMS = 512
_SUMMED = 512
# What a code is joined to in its lowest bits, so that it becomes a number without a conversion, and
# what is then 8 too much; both are exact.
JOINED = {
    torch.bfloat16: (0x4300, 136.0),
    torch.float16: (0x6400, 1032.0),
}


def multiply_int4_reference(
    row_MK: Tensor, word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout
) -> Tensor:
    """Return rows times the transposed weights, (M, N), in plain torch: they are expanded first.

    Args:
        row_MK: of the scales' type.
        word_NK: packed in this layout.
        scale_GN2: scale and offset of each group.
        layout: of the words.
    """
    weight_KN = row_MK.new_empty(row_MK.shape[1], len(word_NK))
    expand_int4_reference(word_NK, scale_GN2, layout, weight_KN)
    return row_MK @ weight_KN


def can_multiply(num_rows: int, dtype: torch.dtype) -> bool:
    """Return True for few rows of 16-bit numbers: for float32 the kernel has too few registers."""
    return 0 < num_rows <= MOST_ROWS and dtype in JOINED


def multiply_int4_kernel(
    row_MK: Tensor, word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout
) -> Tensor:
    """Do what the reference does, in Triton, as long as `can_multiply`."""
    num_rows, num_columns = row_MK.shape
    assert can_multiply(num_rows, row_MK.dtype), "others are multiplied with expanded weights"
    num_groups, height, _ = scale_GN2.shape
    num_tiles = triton.cdiv(height, 2 * _LANES)
    part_groups = triton.cdiv(num_groups * num_tiles, _PROGRAMS)
    num_parts = triton.cdiv(num_groups, part_groups)
    sum_PMN = torch.empty(num_parts, num_rows, height, dtype=torch.float32, device=row_MK.device)
    joined, middle = JOINED[row_MK.dtype]
    _multiply_codes[(num_tiles, num_parts)](
        sum_PMN,
        row_MK.contiguous(),
        word_NK.contiguous(),
        scale_GN2.contiguous(),
        num_rows,
        height,
        num_groups,
        part_groups,
        JOINED=joined,
        MIDDLE=middle,
        GROUP=num_columns // num_groups,
        HALF=layout.block_rows // 2,
        BLOCK_M=MOST_ROWS,
        BLOCK_L=_LANES,
        num_warps=4,
        num_stages=4,
    )
    out_MN = row_MK.new_empty(num_rows, height)
    grid = (triton.cdiv(out_MN.numel(), _SUMMED),)
    _sum_parts[grid](out_MN, sum_PMN, out_MN.numel(), num_parts, BLOCK=_SUMMED)
    return out_MN


@jit(do_not_specialize=["num_rows", "num_groups", "part_groups"])
def _multiply_codes(
    out: tl.tensor,
    rows: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    height: tl.tensor,
    num_groups: tl.tensor,
    part_groups: tl.tensor,
    JOINED: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
) -> None:
    """Sum the products of the rows with some groups of some blocks of the codes."""
    lane_L = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    part = tl.program_id(1)
    block_L = lane_L // HALF
    low_L = block_L * (2 * HALF) + lane_L % HALF
    is_here_L = low_L < height
    row_M = tl.arange(0, BLOCK_M)
    is_row_M = row_M < num_rows
    column_k = tl.arange(0, GROUP)
    width = num_groups * GROUP
    first = part * part_groups
    last = tl.minimum(first + part_groups, num_groups)
    row_place = rows + row_M[:, None] * width + column_k[None, :]
    # tiles are HALF wide, and end with a block
    word_L = block_L.to(tl.int64) * width * HALF + lane_L % HALF
    word_place = words + word_L[None, :] + column_k[:, None] * HALF
    scale_place = scales + first.to(tl.int64) * height * 2 + low_L * 2
    low_ML = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    high_ML = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    factors = _factors(scale_place, is_here_L, HALF)
    for group in range(first, last):
        row_Mk = tl.load(row_place + group * GROUP, mask=is_row_M[:, None], other=0.0)
        place = word_place + group * (GROUP * HALF)
        word_kL = tl.load(place, mask=is_here_L[None, :], other=0)
        # the next group's factors are fetched while this group is computed
        scale_place += height * 2
        later = _factors(scale_place, is_here_L & (group + 1 < last), HALF)
        total_M1 = tl.sum(row_Mk.to(tl.float32), 1)[:, None]
        sum_ML = _product(row_Mk, word_kL & 15, JOINED, MIDDLE)
        low_ML += sum_ML * factors[0][None, :] + total_M1 * factors[1][None, :]
        sum_ML = _product(row_Mk, word_kL >> 4, JOINED, MIDDLE)
        high_ML += sum_ML * factors[2][None, :] + total_M1 * factors[3][None, :]
        factors = later
    line_M = (part * num_rows + row_M).to(tl.int64) * height
    target = out + line_M[:, None] + low_L[None, :]
    mask = is_row_M[:, None] & is_here_L[None, :]
    tl.store(target, low_ML, mask=mask)
    tl.store(target + HALF, high_ML, mask=mask)


@jit
def _factors(place: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Return scales and offsets of columns with codes in the lower, then in the upper half byte."""
    low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    low_offset = tl.load(place + 1, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(place + 2 * HALF, mask=mask, other=0.0).to(tl.float32)
    high_offset = tl.load(place + (2 * HALF + 1), mask=mask, other=0.0).to(tl.float32)
    return low, low_offset, high, high_offset


@jit
def _product(
    row_Mk: tl.tensor, code_kL: tl.tensor, JOINED: tl.constexpr, MIDDLE: tl.constexpr
) -> tl.tensor:
    """Return the sums of (code - 8) x row."""
    dtype: tl.constexpr = row_Mk.dtype
    number_kL = (code_kL.to(tl.int16) | JOINED).to(dtype, bitcast=True)
    number_kL = (number_kL - MIDDLE).to(dtype)
    return tl.dot(row_Mk, number_kL)


@jit(do_not_specialize=["num_numbers", "num_parts"])
def _sum_parts(
    out: tl.tensor,
    sums: tl.tensor,
    num_numbers: tl.tensor,
    num_parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Add up what the parts have, in order, and round it once."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_numbers
    total = tl.zeros((BLOCK,), tl.float32)
    source = sums + place
    for _ in range(num_parts):
        total += tl.load(source, mask=mask, other=0.0)
        source += num_numbers
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
