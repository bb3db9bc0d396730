"""Products with 4-bit weights as they are, for few rows on a CPU: torch's own, which reads a quarter of the bytes.

Torch keeps such weights in an order that depends on the processor, so they are packed by torch here, once. Sums differ
in the last place from those of another number of rows: a draft's weights may be held so, a target's never. Whether a
processor has the product, and up to how many rows it is the faster one, is tried first (`int4_choice.py`).
Invariant: a weight is (code - zero) x scale; what torch adds for the zero is rounded to the type of the rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUPS = (32, 64, 128, 256)  # numbers of a row that may share a scale
_MOST_ROWS = 16  # at once: beyond, time grows faster than rows
_PACKED_ROWS = 1024  # of weights at once: torch wants their codes in 32 bits; a multiple of its blocks
_MULTIPLE = 16  # of rows; others are added
_MIDDLE = 8  # is what torch takes from a code


class Int4Weight(NamedTuple):
    """A matrix (N, K) as `int4_linear` takes it."""

    packed_NB: Tensor  # uint8, K / 2 bytes a row, in torch's order
    scale_and_zero_GN2: Tensor  # for each group of columns and row, in the type of the rows that it is multiplied with
    num_out: int  # rows before some were added

    @property
    def num_bytes(self) -> int:
        """What is held."""
        return self.packed_NB.nbytes + self.scale_and_zero_GN2.nbytes


def pack_int4(code_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, dtype: torch.dtype) -> Int4Weight:
    """Codes 0 ... 15 (of an integer type) with a scale and a zero, which is a code too, for each group of columns.

    Args:
        zero_NG: None where it is 8 everywhere.
        dtype: of the rows that will come: bfloat16, float16 or float32.

    Raises:
        ValueError: groups of a size that torch does not know.
    """
    num_out, num_columns = code_NK.shape
    group = num_columns // scale_NG.shape[1]
    if group not in GROUPS or group * scale_NG.shape[1] != num_columns:
        told = f"{num_columns} columns in {scale_NG.shape[1]} groups"
        raise ValueError(f"groups of 4-bit weights must have {', '.join(map(str, GROUPS))} columns, got {told}")
    num_added = -num_out % _MULTIPLE
    parts = [_pack(part_RK) for part_RK in code_NK.split(_PACKED_ROWS)]
    shift_NG = torch.zeros_like(scale_NG) if zero_NG is None else (_MIDDLE - zero_NG.float()) * scale_NG.float()
    both_NG2 = torch.stack((scale_NG.float(), shift_NG.float()), -1).to(dtype)
    both_NG2 = torch.nn.functional.pad(both_NG2, (0, 0, 0, 0, 0, num_added))
    return Int4Weight(torch.cat(parts), both_NG2.transpose(0, 1).contiguous(), num_out)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """What `torch.nn.functional.linear` gives with the weight; `x` has the type that it was packed for."""
    rows_MK = x.reshape(-1, x.shape[-1])
    group = x.shape[-1] // len(weight.scale_and_zero_GN2)
    parts = [
        torch.ops.aten._weight_int4pack_mm_for_cpu(part_RK, weight.packed_NB, group, weight.scale_and_zero_GN2)
        for part_RK in rows_MK.split(_MOST_ROWS)
    ]
    product_MN = (torch.cat(parts) if len(parts) > 1 else parts[0])[:, : weight.num_out]
    product_MN = product_MN if bias is None else product_MN + bias
    return product_MN.reshape(*x.shape[:-1], weight.num_out)


def int4_linear_reference(
    x: Tensor, code_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """The same in float32 from what was packed, in the type of `x`."""
    zero = _MIDDLE if zero_NG is None else zero_NG.float()[..., None]
    grouped_NGC = code_NK.float().unflatten(1, (scale_NG.shape[1], -1))
    weight_NK = ((grouped_NGC - zero) * scale_NG.float()[..., None]).flatten(1)
    return torch.nn.functional.linear(x.float(), weight_NK, None if bias is None else bias.float()).to(x.dtype)


def _pack(code_RK: Tensor) -> Tensor:
    """In torch's order, with rows added that stand for zero."""
    code_RK = torch.nn.functional.pad(code_RK.int(), (0, 0, 0, -len(code_RK) % _MULTIPLE), value=_MIDDLE)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(code_RK.contiguous(), 2)
