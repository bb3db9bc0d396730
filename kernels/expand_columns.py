"""Weights of 4 bits, eight rows of a column in a word, as AWQ packs them.

A weight is (code - zero point) x scale. Row r of the eight lies in nibble NIBBLES[r] of their word.
Invariant: codes and zero points are small integers, so only the product is rounded.
"""

import numpy as np
import torch
from torch import Tensor

from offload.kernels.compiled import compiled, share_rows
from offload.kernels.expand_integers import BLOCK, expand_row_block, scale_groups, turn
from offload.kernels.jit import triton
from offload.kernels.rounding import F32, I32, U64, pairs, rounded_pair

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
_CHUNK_WORDS = 16  # as many as a cache line holds


def expand_columns_reference(
    words_CK: Tensor, scale_NG: Tensor, zero_NG: Tensor, group: int, out_NK: Tensor
) -> None:
    """Fill `out` with (code - zero point) x scale.

    Args:
        words_CK: int32, of any strides, for N = 8 C rows.
        scale_NG: in a floating-point type.
        zero_NG: integers.
        group: how many columns share a scale, the last of them maybe fewer.
        out_NK: bfloat16, float16 or float32.
    """
    words_CK = words_CK.contiguous()
    shift_R = 4 * torch.tensor(NIBBLES, dtype=torch.int32, device=out_NK.device)
    for first in range(0, len(words_CK), _CHUNK_WORDS):
        words = words_CK[first : first + _CHUNK_WORDS]
        rows = slice(8 * first, 8 * (first + len(words)))
        code_RK = ((words[:, None] >> shift_R[:, None]) & 15).flatten(0, 1).float()
        out_NK[rows] = scale_groups(code_RK, zero_NG[rows], scale_NG[rows], group)


def expand_columns_compiled(
    words_CK: Tensor, scale_NG: Tensor, zero_NG: Tensor, group: int, out_NK: Tensor
) -> None:
    """Do what the reference does, with numba. Odd groups, in no known model, are left to it."""
    if group % 2 or out_NK.shape[1] % 2:
        return expand_columns_reference(words_CK, scale_NG, zero_NG, group, out_NK)
    fill = _pairs_of_rows.to(out_NK.dtype)
    scale = scale_NG.float().numpy()
    zero = zero_NG.float().numpy()

    def share(lo: int, hi: int) -> None:
        lines = np.empty((_CHUNK_WORDS, out_NK.shape[1]), np.int32)
        for first in range(lo, hi, _CHUNK_WORDS):
            last = min(first + _CHUNK_WORDS, hi)
            rows = slice(8 * first, 8 * last)
            turn(words_CK[first:last].numpy(), lines[: last - first])
            fill(lines, scale[rows], zero[rows], group, pairs(out_NK[rows]))

    share_rows(share, len(words_CK))


@compiled
def _shift(row):  # type: ignore[no-untyped-def]  # numba infers types
    """Return the shift to the row's nibble, as in NIBBLES."""
    inner = row & U64(7)
    return I32(U64(4) * ((inner >> U64(1)) + U64(4) * (inner & U64(1))))


@compiled
def _code(word, shift):  # type: ignore[no-untyped-def]
    return F32(I32(I32(word >> shift) & I32(15)))


@compiled
def _pairs_of_rows(lines, scale, zero, group, out):  # type: ignore[no-untyped-def]
    """Fill `out`, two columns of a row at a time; see `rounded_pair`."""
    half = U64(group // 2)
    num_pairs = U64(out.shape[1])
    for row in range(U64(out.shape[0])):
        line = lines[row >> U64(3)]
        place = out[row]
        shift = _shift(row)
        for group_index in range(U64(scale.shape[1])):
            s = scale[row, group_index]
            z = zero[row, group_index]
            for pair in range(group_index * half, min((group_index + U64(1)) * half, num_pairs)):
                first = line[U64(2) * pair]
                second = line[U64(2) * pair + U64(1)]
                place[pair] = rounded_pair(
                    (_code(first, shift) - z) * s, (_code(second, shift) - z) * s
                )


def expand_columns_kernel(
    words_CK: Tensor, scale_NG: Tensor, zero_NG: Tensor, group: int, out_NK: Tensor
) -> None:
    num_rows, num_columns = out_NK.shape
    sizes = (num_columns, scale_NG.shape[1], num_columns, group)
    kinds = {"HAS_ZERO": True, "HAS_ADDED": False, "IS_ORDERED": False, "IN_COLUMNS": True}
    sizes_of_codes = {"MIDDLE": 0, "BITS": 4, "PER_WORD": 0, "BLOCK": BLOCK}
    expand_row_block[num_rows, triton.cdiv(num_columns, BLOCK)](
        words_CK.contiguous(), scale_NG, zero_NG, scale_NG, scale_NG, out_NK, *sizes,
        **kinds, **sizes_of_codes,
    )  # fmt: skip
