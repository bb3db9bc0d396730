"""Root-mean-square norms in one launch, each row by its own program.

transformers writes them as eight operations, whose sum torch adds up in an order that depends on
how many rows there are. Here a row's sum depends on the row alone, by construction, and numbers are
rounded where the family rounds them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from offload.kernels.jit import jit, tl, triton

_MOST_COLUMNS = 1 << 15  # that a program holds at once


class NormForm(NamedTuple):
    """What a model family does with the normed numbers, which are float32."""

    is_rounded: bool = True  # rounded to the input's type before the product with the weight
    offset: float = 0.0  # added to the weight


FORMS = (NormForm(), NormForm(is_rounded=False), NormForm(is_rounded=False, offset=1.0))


def rms_norm_reference(rows: Tensor, weight_D: Tensor | None, eps: float, form: NormForm) -> Tensor:
    """Return the norm over the last dimension, in plain torch; a weight is of the rows' type."""
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_D is None:
        return normed.to(rows.dtype)
    if form.is_rounded:
        return normed.to(rows.dtype) * weight_D
    return (normed * (weight_D.float() + form.offset)).to(rows.dtype)


def rms_norm_kernel(rows: Tensor, weight_D: Tensor | None, eps: float, form: NormForm) -> Tensor:
    """Do what the reference does, in Triton; too wide rows go to the reference."""
    width = rows.shape[-1]
    if width > _MOST_COLUMNS or rows.numel() == 0:
        return rms_norm_reference(rows, weight_D, eps, form)
    rows_RD = rows.reshape(-1, width).contiguous()
    out_RD = torch.empty_like(rows_RD)
    block = triton.next_power_of_2(width)
    _normalize[(len(rows_RD),)](
        out_RD,
        rows_RD,
        rows_RD if weight_D is None else weight_D,
        float(eps),
        WIDTH=width,
        HAS_WEIGHT=weight_D is not None,
        IS_ROUNDED=form.is_rounded,
        OFFSET=form.offset,
        BLOCK_D=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return out_RD.view(rows.shape)


# Not specialised on alignment: a weight may lie anywhere in its layer.
@jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["weight"])
def _normalize(
    out: tl.tensor,
    rows: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Norm one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    is_column = column < WIDTH
    numbers = tl.load(rows + row * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    result = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / WIDTH + eps)
    if HAS_WEIGHT:
        if IS_ROUNDED:
            result = result.to(out.dtype.element_ty).to(tl.float32)
        result = result * (
            tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32) + OFFSET
        )
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=is_column)
