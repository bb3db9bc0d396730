"""Products of 16-bit numbers in float32, for processors without instructions for them.

oneDNN multiplies bfloat16 on processors with AVX-512, at half the rate of the code here where these
have no instructions for it, and float16 on fewer still. Elsewhere torch adds up number after
number, at 3 to 7 GFLOP/s a core where float32 gives 60 to 80: a pass over a tree would take ten
times as long. So weights are widened as they are multiplied, by machine code
(`kernels/widened_products.py`). Where that cannot be made (old processors), a block of the
weight is widened at a time, and multiplied by the library. Sums are in float32 and rounded once, as where the
library does it. What is held and read stays 16 bits wide.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional

from offload.kernels.machine_code import emulates_bfloat16, fused_lanes
from offload.kernels.widened_products import can_multiply, product_of
from offload.memory.sizes import INNER_ROWS, PATH_SCRATCH_BYTES
from offload.model.linear import Products
from offload.model.thread_team import TEAM, compute

MULTIPLY = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
)
_ROWS_BYTES = PATH_SCRATCH_BYTES // 4  # of rows in float32: the plan keeps room for a scratch free
# Up to this many rows one thread does what lies between products sooner than others would wake up.
_TEAM_ROWS = 256
_MASK_BYTES = PATH_SCRATCH_BYTES // 2  # of a mask in float32, in the same room
_STEP_ROWS = 16
# bytes of a weight that are widened to float32 at once for the library's product
_BLOCK_BYTES = 1 << 20
# products of numbers: those of fewer take less than calling code of our own does
_LEAST_WIDENED = 1 << 21
_LEAST_COLUMNS = 48  # of a result at once: products of fewer are slow
_IS_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def lacks_products(dtype: torch.dtype) -> bool:
    """Return True if the library of this processor has no product for numbers of this type, or a slow one."""
    if dtype not in _IS_SUPPORTED:
        return False
    is_supported = _is_supported(dtype)
    if is_supported is None:
        return False
    is_slow = dtype == torch.bfloat16 and emulates_bfloat16()
    return is_slow or not (is_supported and mkldnn.enabled)


def widens_products(dtype: torch.dtype) -> bool:
    """Return True if weights of this type are multiplied by machine code of our own on this processor.

    A row's bits then depend on nothing beside it, and that takes no time.
    """
    return lacks_products(dtype) and fused_lanes() > 0


def is_widened(rows: Tensor, weight: Tensor) -> bool:
    """Return True if a product is made by machine code, so that bits of a row depend on it alone."""
    is_wide = rows.device.type == "cpu" and lacks_products(rows.dtype)
    return is_wide and _are_alike(rows, weight) and can_multiply(weight)


def _are_alike(rows: Tensor, weight: Tensor) -> bool:
    """Return True if widths and types agree; otherwise the library raises its own error."""
    return rows.dtype == weight.dtype and rows.shape[-1] == weight.shape[1]


@cache
def _is_supported(dtype: torch.dtype) -> bool | None:
    """Return True if oneDNN has such products, None if torch was built without it."""
    ask = getattr(torch.ops.mkldnn, _IS_SUPPORTED[dtype], None)
    return None if ask is None or not mkldnn.is_available() else ask()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `functional.linear` with sums in float32; a few rows and a block are wide at once."""
    num_columns, width = weight.shape
    num_rows = math.prod(input.shape[:-1])
    # there may be no rows for an expert
    is_ours = num_rows > 0 and _are_alike(input, weight) and can_multiply(weight)
    multiply = _multiply_widening if is_ours else _multiply_blocks
    most_rows = max(_STEP_ROWS, _ROWS_BYTES // (4 * width) // _STEP_ROWS * _STEP_ROWS)
    most_rows = min(INNER_ROWS, most_rows)
    if num_rows <= most_rows:
        return multiply(input, weight, bias)
    parts_TK = input.reshape(-1, input.shape[-1]).split(most_rows)
    out_TN = torch.cat([multiply(some_TK, weight, bias) for some_TK in parts_TK])
    return out_TN.reshape(*input.shape[:-1], num_columns)


def _multiply_widening(rows: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    # a slice where columns were made up
    return compute(product_of(rows, weight_NK, bias_N)).contiguous()


def _multiply_blocks(rows: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply by the library, some columns of the weight at a time."""
    wide = rows.float()
    at_once = max(_LEAST_COLUMNS, _BLOCK_BYTES // (4 * weight_NK.shape[1]))
    blocks = weight_NK.split(at_once)
    biases: Sequence[Tensor | None] = [None] * len(blocks)
    if bias_N is not None:
        biases = bias_N.float().expand(weight_NK.shape[0]).split(at_once)
    parts = [
        functional.linear(wide, block.float(), bias).to(rows.dtype)
        for block, bias in zip(blocks, biases, strict=True)
    ]
    return torch.cat(parts, -1)


def product_for(product: Callable[..., Tensor], numbers: Tensor) -> Callable[..., Tensor]:
    """Return the product itself, or the wide one where the processor has none for these numbers."""
    if numbers.device.type != "cpu" or not lacks_products(numbers.dtype):
        return product
    return _WIDE[product]


def _widened(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return product(left.float(), right.float()).to(left.dtype)

    return multiply


_WIDE: dict[Any, Callable[..., Tensor]] = {product: _widened(product) for product in MULTIPLY}
_WIDE[functional.linear] = linear


class WideProducts(Products):
    """Products of several rows in float32."""

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Products`; for one row torch has a quick way, and oneDNN for a small product."""
        if rows.dtype == torch.bfloat16 and emulates_bfloat16():
            is_quick = rows.numel() * weight.shape[0] < _LEAST_WIDENED
        else:
            is_quick = rows.numel() == rows.shape[-1]
        product = functional.linear if is_quick else product_for(functional.linear, rows)
        return product(rows, weight, bias)

    def multiply(self, product: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
        """See `Products`."""
        return product_for(product, left)(left, right)

    def during(self, num_rows: int) -> AbstractContextManager[Any]:
        """See `Products`."""
        return TEAM.in_place_of_torch() if num_rows <= _TEAM_ROWS else nullcontext()


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **settings: Any
) -> Tensor:
    """Compute torch's `scaled_dot_product_attention`, in float32 where products are wide."""
    attention = functional.scaled_dot_product_attention
    dtype = query.dtype
    mask = attn_mask
    if query.device.type != "cpu" or not lacks_products(dtype):
        return attention(query, key, value, attn_mask=mask, **settings)
    query = query.float()
    key = key.float()
    value = value.float()
    if mask is None or not mask.is_floating_point() or mask.shape[-2] != query.shape[-2]:
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        return attention(query, key, value, attn_mask=mask, **settings).to(dtype)
    num_rows = query.shape[-2]
    at_once = max(1, _MASK_BYTES // (4 * max(1, mask.numel() // max(1, num_rows))))
    parts = [
        attention(rows, key, value, attn_mask=seen.float(), **settings).to(dtype)
        for rows, seen in zip(query.split(at_once, -2), mask.split(at_once, -2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
