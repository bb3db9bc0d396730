"""Products of a few rows that widen weights as they go: chains of fused operations, and the library's own bits."""

import numpy as np
import pytest
import torch
from rounding import Promise, assert_same_bits
from torch import Tensor

from offload.kernels import few_rows
from offload.kernels.few_rows import COLUMNS, can_multiply, columns_of, find_length
from offload.model import wide_products

CHANCE = torch.Generator().manual_seed(7)
TYPES = (torch.bfloat16, torch.float16)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=CHANCE)


@pytest.fixture(autouse=True)
def _where_it_can() -> None:
    if not can_multiply(numbers(COLUMNS, 16).bfloat16()):
        pytest.skip("this processor: no registers of eight float32, or no llvmlite")


def chained(row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, length: int) -> Tensor:
    """Add up as the kernel promises: a product is exact in float64, so each step rounds once."""
    sums = None if bias_N is None else np.broadcast_to(bias_N.numpy(), (len(row_TK), len(weight_NK)))
    for start in range(0, row_TK.shape[1], length):
        chain = np.zeros((len(row_TK), len(weight_NK)), np.float32)
        for at in range(start, min(start + length, row_TK.shape[1])):
            products = row_TK[:, at, None].double() * weight_NK[:, at].double()
            chain = (products.numpy() + chain).astype(np.float32)
        sums = chain if sums is None else sums + chain
    return torch.from_numpy(sums)


def multiplied(row_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, length: int) -> Tensor:
    out_TN = weight_NK.new_full((len(row_TK), len(weight_NK)), torch.nan)
    multiply = columns_of(row_TK, weight_NK, bias_N, length, out_TN)
    for lo in range(0, len(weight_NK), 2 * COLUMNS):
        multiply(lo, min(lo + 2 * COLUMNS, len(weight_NK)))
    return out_TN


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 6])
@pytest.mark.parametrize(("width", "length"), [(64, 64), (80, 16), (208, 96)])
def test_chains_are_added_as_promised(num_rows: int, width: int, length: int, dtype: torch.dtype) -> None:
    row_TK, weight_NK, bias_N = numbers(num_rows, width), numbers(40, width).to(dtype), numbers(40)
    weight_NK[3, :4] = torch.tensor([6e-8, -6e-8, 0.0, -0.0])  # the least float16 there are
    for bias in (None, bias_N):
        wanted_TN = chained(row_TK, weight_NK, bias, length)
        assert_same_bits(multiplied(row_TK, weight_NK, bias, length), wanted_TN.to(dtype), Promise.SAME_PRODUCTS)


def test_zeros_keep_their_sign() -> None:
    row_TK, weight_NK = torch.zeros(1, 32), -torch.ones(COLUMNS, 32).bfloat16()
    assert not multiplied(row_TK, weight_NK, None, 16).signbit().any(), "0.0 + -0.0 is 0.0"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_library_is_matched_or_left(dtype: torch.dtype, has_bias: bool) -> None:
    """Either way the bits of a product are those of the blocks; the speed alone depends on it."""
    weight_NK = numbers(512, 448).to(dtype)
    row_TK = numbers(5, 448).to(dtype)
    bias_N = numbers(512).to(dtype) if has_bias else None
    found = [wide_products.linear(row_TK[:num], weight_NK, bias_N, [8]) for num in (1, 5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_products, "_MOST_FEW", 0)
        for some in found:
            blocks = wide_products.linear(row_TK[: len(some)], weight_NK, bias_N, [8])
            assert_same_bits(some, blocks, Promise.SAME_PRODUCTS)


def test_another_order_of_the_library_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: libraries that add up in chains of 48, and in no chain at all."""
    weight_NK = numbers(24, 160).bfloat16()
    monkeypatch.setattr(torch, "mm", lambda rows, block: chained(rows, block.t(), None, 48))
    assert find_length(weight_NK, has_bias=False) == 48
    monkeypatch.setattr(torch, "mm", lambda rows, block: (rows.double() @ block.double()).float())
    assert find_length(weight_NK, has_bias=False) == 0
    monkeypatch.setattr(torch, "addmm", lambda bias, rows, block: bias + chained(rows, block.t(), None, 48))
    assert find_length(weight_NK, has_bias=True) == 0, "the bias comes last there"


@pytest.mark.parametrize("shape", [(COLUMNS + 1, 32), (COLUMNS, 40)])
def test_weights_of_other_shapes_are_left_to_the_library(shape: tuple[int, int]) -> None:
    assert not can_multiply(numbers(*shape).bfloat16())
    assert not can_multiply(numbers(32, 32).bfloat16().t()[:COLUMNS])
    assert not can_multiply(numbers(COLUMNS, 32))


def test_without_llvmlite_the_library_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "HAS_LLVM", False)
    assert not can_multiply(numbers(COLUMNS, 32).bfloat16())
