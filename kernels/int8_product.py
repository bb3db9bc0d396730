"""Products with weights of eight bits as they are, for few rows on a CPU: torch's own, which reads half of the bytes.

As `int4_product.py`, for a draft only. Each row of weights has one scale. More rows than it pays for are multiplied
with some weights at a time, taken to the type of the rows: all 8-bit numbers are exact in it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_TAKEN_ROWS = 256  # of weights at once: what is made of them stays in the cache


class Int8Weight(NamedTuple):
    """A matrix (N, K) as `int8_linear` takes it."""

    code_NK: Tensor  # int8
    scale_N: Tensor  # in the type of the rows that it is multiplied with


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None, *, num_few: int = 4) -> Tensor:
    """What `torch.nn.functional.linear` gives with code x scale; up to `num_few` rows go to torch's own product."""
    rows_MK = x.reshape(-1, x.shape[-1])
    if len(rows_MK) <= num_few:
        product_MN = torch.ops.aten._weight_int8pack_mm(rows_MK, weight.code_NK, weight.scale_N)
    else:
        taken = (torch.nn.functional.linear(rows_MK, part.to(x.dtype)) for part in weight.code_NK.split(_TAKEN_ROWS))
        product_MN = torch.cat(list(taken), 1) * weight.scale_N
    product_MN = product_MN if bias is None else product_MN + bias
    return product_MN.reshape(*x.shape[:-1], len(weight.scale_N))


def int8_linear_reference(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """The same in float32, in the type of `x`."""
    weight_NK = weight.code_NK.float() * weight.scale_N.float()[:, None]
    return torch.nn.functional.linear(x.float(), weight_NK, None if bias is None else bias.float()).to(x.dtype)
