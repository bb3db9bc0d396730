"""Weights of 1 to 8 bits, packed along rows, with scale and zero point for each group of columns.

Codes lie one behind the other, the first in the lowest bits, so little-endian words of any size are
the same bytes; or as many to a word of 32 bits as it holds whole. A weight is
(code - zero point) x scale, to which MLX adds a bias of the group. Invariant: codes and zero points
are small integers, so float32 holds their difference exactly; product and sum are those of float32.
"""

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import Compiled, compiled, share_rows
from offload.kernels.jit import jit, tl, triton
from offload.kernels.rounding import F32, I32, U64, numbers, pairs, rounded, rounded_pair

_CHUNK_ROWS = 64  # what is made of them in float32 stays in the cache
_CHUNK_WORDS = 8  # of a row, likewise
BLOCK = 1024


def scale_groups(
    code_RK: Tensor,
    zero_RG: Tensor | None,
    scale_RG: Tensor,
    group: int | Tensor,
    added_RG: Tensor | None = None,
) -> Tensor:
    """Return (code - zero point) x scale + added; `code_RK` (float32) is changed in place.

    Zero points and what is added (None: none) and scales are of any type. `group` is how many
    columns share a scale, the last group maybe fewer; or the index (K,) of each column's scale.
    """
    num_columns = code_RK.shape[1]
    num_groups = scale_RG.shape[1]
    if isinstance(group, int) and num_columns == num_groups * group:
        grouped = code_RK.unflatten(1, (num_groups, group))
        if zero_RG is not None:
            grouped.sub_(zero_RG.float()[..., None])
        grouped.mul_(scale_RG.float()[..., None])
        if added_RG is not None:
            grouped.add_(added_RG.float()[..., None])
        return code_RK
    if isinstance(group, int):
        group = torch.arange(num_columns, device=code_RK.device) // group
    if zero_RG is not None:
        code_RK.sub_(zero_RG.float().index_select(1, group))
    code_RK.mul_(scale_RG.float().index_select(1, group))
    return code_RK if added_RG is None else code_RK.add_(added_RG.float().index_select(1, group))


def expand_integers_reference(
    words_NW: Tensor,
    bits: int,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    group: int | Tensor,
    out_NK: Tensor,
    *,
    added_NG: Tensor | None = None,
    codes_per_word: int = 0,
) -> None:
    """Fill `out` with (code - zero point) x scale + added.

    Args:
        words_NW: int32 or uint8, rows of packed codes, of any strides; int8 where codes of 8 bits
            have a sign.
        bits: 1 to 8.
        scale_NG: in a floating-point type, a row's scales.
        zero_NG: integers; None is the middle of the codes: 8 of 4 bits, 128 of 8, 0 of those with a
            sign, and 0 where something is added.
        group: how many columns share a scale, the last of them maybe fewer; or which scale (K,)
            each column has.
        out_NK: bfloat16, float16 or float32.
        added_NG: in a floating-point type; None adds nothing.
        codes_per_word: how many codes a word of 32 bits begins with; 0: they lie without gaps.
    """
    # at once: of a whole matrix torch has a fast way
    words_NW = _lying_in_rows(words_NW)
    middle = _middle(words_NW, bits, zero_NG, added_NG)
    for lo in range(0, len(out_NK), _CHUNK_ROWS):
        rows = slice(lo, lo + _CHUNK_ROWS)
        code_RK = _codes(words_NW[rows], bits, middle, codes_per_word)[:, : out_NK.shape[1]]
        zero_RG, added_RG = (None if each is None else each[rows] for each in (zero_NG, added_NG))
        out_NK[rows] = scale_groups(code_RK, zero_RG, scale_NG[rows], group, added_RG)


def _lying_in_rows(words_NW: Tensor) -> Tensor:
    """Return words that can be viewed as bytes; one a row counts as contiguous however they lie."""
    if words_NW.stride(-1) != 1:
        return words_NW.clone(memory_format=torch.contiguous_format)
    return words_NW.contiguous()


def _middle(words_NW: Tensor, bits: int, zero_NG: Tensor | None, added_NG: Tensor | None) -> int:
    """Return the zero point where none is given."""
    is_given = zero_NG is not None or added_NG is not None
    return 0 if is_given or words_NW.dtype == torch.int8 else 1 << (bits - 1)


def _codes(words_RW: Tensor, bits: int, middle: int, codes_per_word: int) -> Tensor:
    """Return codes less the middle, in float32; two of 4 bits become bytes of one 16-bit word."""
    if words_RW.dtype == torch.int8:
        return words_RW.float()
    bytes_RB = words_RW.view(torch.uint8)
    if bits == 8:
        return bytes_RB.float().sub_(middle)
    if bits == 4:
        pair_RB = bytes_RB.to(torch.int16)
        pair_RB = (pair_RB << 4).bitwise_or_(pair_RB).bitwise_and_(0x0F0F)
        return pair_RB.view(torch.int8).sub_(middle).float()
    num_bytes, num_codes = (4, codes_per_word) if codes_per_word else (bits, 8)
    padded_RB = torch.nn.functional.pad(bytes_RB, (0, -bytes_RB.shape[1] % num_bytes))
    place_B = 8 * torch.arange(num_bytes, device=words_RW.device)
    place_C = bits * torch.arange(num_codes, device=words_RW.device)
    word_RW = (padded_RB.unflatten(1, (-1, num_bytes)).long() << place_B).sum(-1)
    code_RC = (word_RW[..., None] >> place_C) & ((1 << bits) - 1)
    return code_RC.flatten(1).float().sub_(middle)


def expand_integers_compiled(
    words_NW: Tensor,
    bits: int,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    group: int | Tensor,
    out_NK: Tensor,
    *,
    added_NG: Tensor | None = None,
    codes_per_word: int = 0,
) -> None:
    """Do what the reference does, with numba. Odd sizes, in no known model, are left to it."""
    is_ordered = isinstance(group, Tensor)
    num_columns = out_NK.shape[1]
    if isinstance(group, Tensor):
        has_whole_words = 32 % bits == 0 and num_columns % (32 // bits) == 0
        is_even = words_NW.dtype == torch.int32 and has_whole_words and added_NG is None
    else:
        # how many codes are unpacked at once, by `_expand_rows`
        unit = {4: 2, 8: 1}.get(bits, 8)
        is_even = num_columns % unit == 0 and (group % unit == 0 or group >= num_columns)
    if not is_even or (codes_per_word and codes_per_word * bits != 32):
        return expand_integers_reference(
            words_NW, bits, scale_NG, zero_NG, group, out_NK,
            added_NG=added_NG, codes_per_word=codes_per_word,
        )  # fmt: skip
    scale = scale_NG.float()
    zero = torch.full_like(scale, _middle(words_NW, bits, zero_NG, added_NG))
    zero = zero if zero_NG is None else zero_NG.float()
    # what leaves any number as it is, 0 with its sign
    added = torch.full_like(scale, -0.0) if added_NG is None else added_NG.float()

    def rows(lo: int, hi: int) -> None:
        is_turned = is_ordered or words_NW.stride(-1) != 1
        # what is turned stays in the cache; of few bits more rows do
        step = _CHUNK_ROWS * (1 if bits > 3 or is_ordered else 4) if is_turned else hi - lo
        for first in range(lo, hi, step):
            some = slice(first, min(first + step, hi))
            if isinstance(group, Tensor):
                _expand_columns(words_NW[some], bits, scale[some], zero[some], group, out_NK[some])
            else:
                factors = (scale[some], zero[some], added[some])
                _expand_rows(words_NW[some], bits, factors, group, out_NK[some])

    share_rows(rows, len(out_NK))


def _expand_rows(
    words_RW: Tensor, bits: int, factors: tuple[Tensor, ...], group: int, out_RK: Tensor
) -> None:
    if words_RW.stride(-1) != 1:
        lying_RW = words_RW
        words_RW = torch.empty(words_RW.shape, dtype=words_RW.dtype)
        turn(lying_RW.numpy(), words_RW.numpy())
    words = (words_RW if words_RW.dtype == torch.int8 else words_RW.view(torch.uint8)).numpy()
    fill = {4: _nibble_pairs, 8: _bytes}.get(bits) or _STREAMS[bits]
    out = pairs(out_RK) if bits == 4 else numbers(out_RK)
    fill.to(out_RK.dtype)(words, tuple(factor.numpy() for factor in factors), group, out)


def _expand_columns(
    words_RW: Tensor, bits: int, scale_RG: Tensor, zero_RG: Tensor, group_K: Tensor, out_RK: Tensor
) -> None:
    # By numpy: torch would call threads of its own for that many numbers, each time from each of
    # ours.
    given = (words_RW, scale_RG, zero_RG)
    words, scale, zero = (np.ascontiguousarray(rows.numpy().T) for rows in given)
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
def _nibble_pairs(words, factors, group, out):  # type: ignore[no-untyped-def]
    """Fill rows of pairs of numbers with (code - zero) * scale + added, two codes a byte."""
    scale, zero, added = factors
    half = U64((group + 1) // 2)
    num_pairs = U64(out.shape[1])
    for row in range(out.shape[0]):
        source = words[row]
        place = out[row]
        for number in range(scale.shape[1]):
            s = scale[row, number]
            z = zero[row, number]
            a = added[row, number]
            first = U64(number) * half
            for pair in range(first, min(first + half, num_pairs)):
                byte = source[pair]
                place[pair] = rounded_pair(
                    (F32(I32(byte & I32(15))) - z) * s + a, (F32(I32(byte >> I32(4))) - z) * s + a
                )


@compiled
def _bytes(words, factors, group, out):  # type: ignore[no-untyped-def]
    """Fill rows with (code - zero) * scale + added, one code a byte."""
    scale, zero, added = factors
    size = U64(group)
    num_columns = U64(out.shape[1])
    for row in range(out.shape[0]):
        source = words[row]
        place = out[row]
        for number in range(scale.shape[1]):
            s = scale[row, number]
            z = zero[row, number]
            a = added[row, number]
            first = U64(number) * size
            for column in range(first, min(first + size, num_columns)):
                place[column] = rounded((F32(source[column]) - z) * s + a)


def _stream(bits: int) -> Compiled:
    """Return the function that fills rows from a stream of codes of `bits` bits, low bits first.

    Eight codes lie in `bits` bytes. They are spread to the eight bytes of a 64-bit word by moving
    halves, then quarters, then single codes apart. Numba treats bound values as constants, so it
    unrolls loops over them.
    """
    num_bytes = U64(bits)
    half_gap, quarter_gap, code_gap = (U64(size - size // 8 * bits) for size in (32, 16, 8))
    # masks of the first of two parts at each level; the second is masked where it was moved to
    half = U64((1 << 4 * bits) - 1)
    quarters = U64(((1 << 2 * bits) - 1) * 0x0000000100000001)
    odd = U64(((1 << bits) - 1) * 0x0001000100010001)
    half_moved = half << U64(32)
    quarters_moved = quarters << U64(16)
    odd_moved = odd << U64(8)

    @compiled
    def fill_rows(words, factors, group, out):  # type: ignore[no-untyped-def]
        scale, zero, added = factors
        num_columns = U64(out.shape[1])
        num_eights = num_columns >> U64(3)
        eights = np.empty(num_eights, np.uint64)
        codes = eights.view(np.uint8)
        size = U64(group)
        for row in range(out.shape[0]):
            source = words[row]
            place = out[row]
            for eight in range(num_eights):
                word = U64(0)
                for byte in range(bits):
                    part = U64(source[eight * num_bytes + U64(byte)])
                    word |= part << U64(8 * byte)
                word = (word & half) | ((word << half_gap) & half_moved)
                word = (word & quarters) | ((word << quarter_gap) & quarters_moved)
                eights[eight] = (word & odd) | ((word << code_gap) & odd_moved)
            for nth in range(scale.shape[1]):
                s = scale[row, nth]
                z = zero[row, nth]
                a = added[row, nth]
                first = U64(nth) * size
                for column in range(first, min(first + size, num_columns)):
                    place[column] = rounded((F32(codes[column]) - z) * s + a)

    return fill_rows


_STREAMS = {bits: _stream(bits) for bits in (1, 2, 3, 5, 6, 7)}


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
                here = U64(index[column])
                beside = U64(index[column + U64(1)])
                s = scale[here]
                z = zero[here]
                s_beside = scale[beside]
                z_beside = zero[beside]
                low = I32(I32(2 * bits) * I32(pair))
                line = made[(number - first) * pairs_of_word + pair]
                high = I32(low + I32(bits))
                for row in range(num_rows):
                    code = I32(I32(word[row] >> low) & mask)
                    code_beside = I32(I32(word[row] >> high) & mask)
                    line[row] = rounded_pair(
                        (F32(code) - z[row]) * s[row],
                        (F32(code_beside) - z_beside[row]) * s_beside[row],
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
    *,
    added_NG: Tensor | None = None,
    codes_per_word: int = 0,
) -> None:
    """Do what the reference does, in Triton."""
    num_rows, num_columns = out_NK.shape
    words = _lying_in_rows(words_NW)
    words = words if words.dtype == torch.int8 else words.view(torch.uint8)
    is_ordered = isinstance(group, Tensor)
    expand_row_block[(num_rows, triton.cdiv(num_columns, BLOCK))](
        words,
        scale_NG,
        scale_NG if zero_NG is None else zero_NG,
        scale_NG if added_NG is None else added_NG,
        group if is_ordered else scale_NG,
        out_NK,
        words.shape[1],
        scale_NG.shape[1],
        num_columns,
        1 if is_ordered else group,
        HAS_ZERO=zero_NG is not None,
        HAS_ADDED=added_NG is not None,
        IS_ORDERED=is_ordered,
        IN_COLUMNS=False,
        MIDDLE=_middle(words_NW, bits, zero_NG, added_NG),
        BITS=bits,
        PER_WORD=codes_per_word,
        BLOCK=BLOCK,
    )


@jit
def expand_row_block(
    words: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    added: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    row_size: tl.tensor,
    num_groups: tl.tensor,
    num_columns: tl.tensor,
    group: tl.tensor,
    HAS_ZERO: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    IS_ORDERED: tl.constexpr,
    IN_COLUMNS: tl.constexpr,
    MIDDLE: tl.constexpr,
    BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
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
    elif BITS == 8:
        code = tl.load(words + row * row_size + column, mask=here, other=0).to(tl.int32)
    else:
        bit = column // PER_WORD * 32 + column % PER_WORD * BITS if PER_WORD else column * BITS
        place = bit // 8
        low = tl.load(words + row * row_size + place, mask=here, other=0).to(tl.int32)
        beyond = here & (place + 1 < row_size)  # a code may end in the next byte
        high = tl.load(words + row * row_size + place + 1, mask=beyond, other=0).to(tl.int32)
        code = ((low | (high << 8)) >> (bit % 8)) & ((1 << BITS) - 1)
    group_at = row * num_groups + (
        tl.load(index + column, mask=here, other=0) if IS_ORDERED else column // group
    )
    code = code - (
        tl.load(zero + group_at, mask=here, other=0).to(tl.int32) if HAS_ZERO else MIDDLE
    )
    product = code.to(tl.float32) * tl.load(scale + group_at, mask=here, other=0).to(tl.float32)
    if HAS_ADDED:
        product += tl.load(added + group_at, mask=here, other=0).to(tl.float32)
    tl.store(out + row * num_columns + column, product.to(out.dtype.element_ty), mask=here)
