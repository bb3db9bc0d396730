"""Weights of 4 or 8 bits, packed along rows, with scale and zero point for each group of columns.

Codes lie one behind the other, the first in the lowest bits, so little-endian words of any size are
the same bytes. A weight is (code - zero point) x scale. Invariant: codes and zero points are small
integers, so float32 holds their difference exactly and only the product is rounded.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.jit import jit, tl, triton
from offload.kernels.rounding import F32, I32, U64, numbers, pairs, rounded, rounded_pair

_CHUNK_ROWS = 64  # what is made of them in float32 stays in the cache
_CHUNK_WORDS = 8  # of a row, likewise
BLOCK = 1024


def scale_groups(
    code_RK: Tensor, zero_RG: Tensor | None, scale_RG: Tensor, group: int | Tensor
) -> Tensor:
    """Return (code - zero point) x scale; `code_RK` (float32) is changed in place.

    Zero points (None: none) and scales are of any type. `group` is how many columns share a scale,
    the last group maybe fewer; or the index (K,) of each column's scale.
    """
    num_columns = code_RK.shape[1]
    num_groups = scale_RG.shape[1]
    if isinstance(group, int) and num_columns == num_groups * group:
        grouped = code_RK.unflatten(1, (num_groups, group))
        if zero_RG is not None:
            grouped.sub_(zero_RG.float()[..., None])
        grouped.mul_(scale_RG.float()[..., None])
        return code_RK
    if isinstance(group, int):
        group = torch.arange(num_columns, device=code_RK.device) // group
    if zero_RG is not None:
        code_RK.sub_(zero_RG.float().index_select(1, group))
    return code_RK.mul_(scale_RG.float().index_select(1, group))


def expand_integers_reference(
    words_NW: Tensor,
    bits: int,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    group: int | Tensor,
    out_NK: Tensor,
) -> None:
    """Fill `out` with (code - zero point) x scale.

    Args:
        words_NW: int32 or uint8, rows of packed codes, of any strides; int8 where codes of 8 bits
            have a sign.
        bits: 4 or 8.
        scale_NG: in a floating-point type, a row's scales.
        zero_NG: integers; None is the middle of the codes: 8 of 4 bits, 128 of 8, 0 of those with a
            sign.
        group: how many columns share a scale, the last of them maybe fewer; or which scale (K,)
            each column has.
        out_NK: bfloat16, float16 or float32.
    """
    # at once: of a whole matrix torch has a fast way
    words_NW = _lying_in_rows(words_NW)
    middle = _middle(words_NW, bits) if zero_NG is None else 0
    for lo in range(0, len(out_NK), _CHUNK_ROWS):
        rows = slice(lo, lo + _CHUNK_ROWS)
        code_RK = _codes(words_NW[rows], bits, middle)[:, : out_NK.shape[1]]
        zero_RG = None if zero_NG is None else zero_NG[rows]
        out_NK[rows] = scale_groups(code_RK, zero_RG, scale_NG[rows], group)


def _lying_in_rows(words_NW: Tensor) -> Tensor:
    """Return words that can be viewed as bytes; one a row counts as contiguous however they lie."""
    if words_NW.stride(-1) != 1:
        return words_NW.clone(memory_format=torch.contiguous_format)
    return words_NW.contiguous()


def _middle(words_NW: Tensor, bits: int) -> int:
    return 0 if words_NW.dtype == torch.int8 else 1 << (bits - 1)


def _codes(words_RW: Tensor, bits: int, middle: int) -> Tensor:
    """Return codes less the middle, in float32; two of 4 bits become bytes of one 16-bit word."""
    if words_RW.dtype == torch.int8:
        return words_RW.float()
    bytes_RB = words_RW.view(torch.uint8)
    if bits == 8:
        return bytes_RB.float().sub_(middle)
    pair_RB = bytes_RB.to(torch.int16)
    pair_RB = (pair_RB << 4).bitwise_or_(pair_RB).bitwise_and_(0x0F0F)
    return pair_RB.view(torch.int8).sub_(middle).float()


def expand_integers_compiled(
    words_NW: Tensor,
    bits: int,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    group: int | Tensor,
    out_NK: Tensor,
) -> None:
    """Do what the reference does, with numba; it is left odd sizes, which no known model has."""
    num_columns = out_NK.shape[1]
    if isinstance(group, Tensor):
        expand: Callable[..., None] = _expand_columns
        is_even = words_NW.dtype == torch.int32 and num_columns % (32 // bits) == 0
    else:
        expand = _expand_rows
        is_even = bits == 8 or group % 2 == num_columns % 2 == 0
    if not is_even:
        return expand_integers_reference(words_NW, bits, scale_NG, zero_NG, group, out_NK)
    scale = scale_NG.float()
    zero = torch.full_like(scale, _middle(words_NW, bits)) if zero_NG is None else zero_NG.float()

    def rows(lo: int, hi: int) -> None:
        is_turned = isinstance(group, Tensor) or words_NW.stride(-1) != 1
        step = _CHUNK_ROWS if is_turned else hi - lo  # what is turned stays in the cache
        for first in range(lo, hi, step):
            some = slice(first, min(first + step, hi))
            expand(words_NW[some], bits, scale[some], zero[some], group, out_NK[some])

    share_rows(rows, len(out_NK))


def _expand_rows(
    words_RW: Tensor, bits: int, scale_RG: Tensor, zero_RG: Tensor, group: int, out_RK: Tensor
) -> None:
    if words_RW.stride(-1) != 1:
        lying_RW = words_RW
        words_RW = torch.empty(words_RW.shape, dtype=words_RW.dtype)
        turn(lying_RW.numpy(), words_RW.numpy())
    words = (words_RW if words_RW.dtype == torch.int8 else words_RW.view(torch.uint8)).numpy()
    scale = scale_RG.numpy()
    zero = zero_RG.numpy()
    if bits == 8:
        _bytes.to(out_RK.dtype)(words, scale, zero, group, numbers(out_RK))
    else:
        _nibble_pairs.to(out_RK.dtype)(words, scale, zero, group, pairs(out_RK))


def _expand_columns(
    words_RW: Tensor, bits: int, scale_RG: Tensor, zero_RG: Tensor, group_K: Tensor, out_RK: Tensor
) -> None:
    # By numpy: torch would call threads of its own for so many numbers, each time from each of
    # ours.
    given = (words_RW, scale_RG, zero_RG)
    words, scale, zero = (np.ascontiguousarray(one.numpy().T) for one in given)
    out = pairs(out_RK)
    made = np.empty((_CHUNK_WORDS * 16 // bits, len(out)), out.dtype)
    _pairs_of_columns.to(out_RK.dtype)(words, bits, (scale, zero), group_K.numpy(), made, out)


@compiled
def turn(lying, out):  # type: ignore[no-untyped-def]  # numba infers types
    """Transpose in small squares, which stay in the cache."""
    side = U64(16)
    num_rows = U64(out.shape[0])
    num_words = U64(out.shape[1])
    for first_row in range(U64(0), num_rows, side):
        for first in range(U64(0), num_words, side):
            for row in range(first_row, min(first_row + side, num_rows)):
                for word in range(first, min(first + side, num_words)):
                    out[row, word] = lying[row, word]


@compiled
def _nibble_pairs(words, scale, zero, group, out):  # type: ignore[no-untyped-def]
    half = U64(group // 2)
    num_pairs = U64(out.shape[1])
    for row in range(out.shape[0]):
        source = words[row]
        place = out[row]
        for one in range(scale.shape[1]):
            s = scale[row, one]
            z = zero[row, one]
            first = U64(one) * half
            for pair in range(first, min(first + half, num_pairs)):
                byte = source[pair]
                place[pair] = rounded_pair(
                    (F32(I32(byte & I32(15))) - z) * s, (F32(I32(byte >> I32(4))) - z) * s
                )


@compiled
def _bytes(words, scale, zero, group, out):  # type: ignore[no-untyped-def]
    size = U64(group)
    num_columns = U64(out.shape[1])
    for row in range(out.shape[0]):
        source = words[row]
        place = out[row]
        for one in range(scale.shape[1]):
            s = scale[row, one]
            z = zero[row, one]
            first = U64(one) * size
            for column in range(first, min(first + size, num_columns)):
                place[column] = rounded((F32(source[column]) - z) * s)


@compiled
def _pairs_of_columns(words, bits, factors, index, made, out):  # type: ignore[no-untyped-def]
    """Expand two columns at once, for all rows; they are copied into rows when `made` is full.

    Words, scales and zero points are those of columns, so none is looked up in an inner loop.
    """
    scale, zero = factors
    num_words = U64(words.shape[0])
    num_rows = U64(words.shape[1])
    pairs_of_word = U64(16 // bits)
    mask = I32((1 << bits) - 1)
    step = U64(made.shape[0]) // pairs_of_word
    for first in range(U64(0), num_words, step):
        end = min(first + step, num_words)
        for number in range(first, end):
            word = words[number]
            for pair in range(pairs_of_word):
                column = U64(2) * (number * pairs_of_word + pair)
                one = U64(index[column])
                two = U64(index[column + U64(1)])
                s = scale[one]
                z = zero[one]
                s_two = scale[two]
                z_two = zero[two]
                low = I32(I32(2 * bits) * I32(pair))
                line = made[(number - first) * pairs_of_word + pair]
                high = I32(low + I32(bits))
                for row in range(num_rows):
                    code = I32(I32(word[row] >> low) & mask)
                    code_two = I32(I32(word[row] >> high) & mask)
                    line[row] = rounded_pair(
                        (F32(code) - z[row]) * s[row], (F32(code_two) - z_two[row]) * s_two[row]
                    )
        start = first * pairs_of_word
        num_pairs = (end - first) * pairs_of_word
        for row in range(num_rows):
            for pair in range(num_pairs):
                out[row, start + pair] = made[pair, row]


def expand_integers_kernel(
    words_NW: Tensor,
    bits: int,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    group: int | Tensor,
    out_NK: Tensor,
) -> None:
    num_rows, num_columns = out_NK.shape
    words = _lying_in_rows(words_NW)
    words = words if words.dtype == torch.int8 else words.view(torch.uint8)
    is_ordered = isinstance(group, Tensor)
    expand_row_block[(num_rows, triton.cdiv(num_columns, BLOCK))](
        words,
        scale_NG,
        scale_NG if zero_NG is None else zero_NG,
        group if is_ordered else scale_NG,
        out_NK,
        words.shape[1],
        scale_NG.shape[1],
        num_columns,
        1 if is_ordered else group,
        HAS_ZERO=zero_NG is not None,
        IS_ORDERED=is_ordered,
        IN_COLUMNS=False,
        MIDDLE=_middle(words_NW, bits),
        BITS=bits,
        BLOCK=BLOCK,
    )


@jit
def expand_row_block(
    words: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    row_size: tl.tensor,
    num_groups: tl.tensor,
    num_columns: tl.tensor,
    group: tl.tensor,
    HAS_ZERO: tl.constexpr,
    IS_ORDERED: tl.constexpr,
    IN_COLUMNS: tl.constexpr,
    MIDDLE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Run one program per row and block of columns.

    Words are those of rows, or with `IN_COLUMNS` those of `expand_columns`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < num_columns
    if IN_COLUMNS:
        nibble = (row % 8 // 2 + row % 2 * 4).to(tl.int32)  # NIBBLES
        code = (
            tl.load(words + row // 8 * row_size + column, mask=here, other=0) >> (4 * nibble)
        ) & 15
    elif BITS == 4:
        byte = tl.load(words + row * row_size + column // 2, mask=here, other=0).to(tl.int32)
        code = (byte >> (column % 2 * 4)) & 15
    else:
        code = tl.load(words + row * row_size + column, mask=here, other=0).to(tl.int32)
    one = row * num_groups + (
        tl.load(index + column, mask=here, other=0) if IS_ORDERED else column // group
    )
    code = code - (tl.load(zero + one, mask=here, other=0).to(tl.int32) if HAS_ZERO else MIDDLE)
    product = code.to(tl.float32) * tl.load(scale + one, mask=here, other=0).to(tl.float32)
    tl.store(out + row * num_columns + column, product.to(out.dtype.element_ty), mask=here)
