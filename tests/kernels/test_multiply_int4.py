"""Products of few rows with 4-bit words on a GPU: near to the reference, and used by what holds a draft."""

from functools import partial

import pytest
import torch
from marks import DEVICE, ON_DEVICE, needs_triton
from torch import Tensor, nn

from offload.kernels.int4_blocks import WordLayout, pack_int4
from offload.kernels.multiply_int4 import JOINED, MOST_ROWS, multiply_int4_kernel, multiply_int4_reference
from offload.model.linear import Linear
from offload.model.quantised_draft import HeldWeights

TYPES = [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]  # the interpreter has no sums of bfloat16
pytestmark = ON_DEVICE


def drawn(num_columns: int, width: int, group: int, block_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = partial(torch.randn, generator=torch.Generator().manual_seed(num_columns))
    code_NK = random(num_columns, width).mul_(4).add_(8).clamp_(0, 15).to(torch.uint8)
    word_NK = pack_int4(code_NK, WordLayout(block_rows, has_product=False))
    return word_NK.to(DEVICE), random(width // group, num_columns, 2).to(DEVICE, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("block_rows", [64, 32])
@pytest.mark.parametrize(("num_columns", "width", "group"), [(64, 64, 64), (192, 576, 64), (128, 96, 32)])
def test_it_is_the_reference_and_a_row_has_the_bits_that_it_has_alone(
    num_columns: int, width: int, group: int, block_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as few programs as give parts of several groups, the last one of fewer
    monkeypatch.setattr("offload.kernels.multiply_int4._PROGRAMS", 5)
    words, layout = drawn(num_columns, width, group, block_rows, dtype), WordLayout(block_rows, has_product=False)
    row_MK = torch.randn(MOST_ROWS, width, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    whole_MN, wanted_MN = (
        multiply(row_MK, *words, layout) for multiply in (multiply_int4_kernel, multiply_int4_reference)
    )
    close = 2**-9 if dtype == torch.float16 else 2**-6
    assert whole_MN.dtype == dtype
    assert (whole_MN - wanted_MN).float().norm() < close * wanted_MN.float().norm()
    for rows in (slice(0, 1), slice(3, 10), slice(15, 16)):
        assert torch.equal(multiply_int4_kernel(row_MK[rows], *words, layout), whole_MN[rows])
    # planted: words in another layout, and scales of other groups
    wrong = WordLayout(96 - block_rows, has_product=False)
    for found_MN in (multiply_int4_kernel(row_MK, *words, wrong),
                     multiply_int4_kernel(row_MK, words[0], words[1].roll(1, 1), layout)):  # fmt: skip
        assert (found_MN - wanted_MN).float().norm() > 0.1 * wanted_MN.float().norm()


@pytest.mark.parametrize("dtype", JOINED, ids=str)
def test_codes_become_numbers_without_a_conversion(dtype: torch.dtype) -> None:
    joined, middle = JOINED[dtype]
    code_C = torch.arange(16, dtype=torch.int16)
    assert torch.equal((code_C | joined).view(dtype) - middle, (code_C - 8).to(dtype))


@needs_triton
def test_a_draft_multiplies_up_to_16_rows_by_the_kernel_and_expands_for_more() -> None:
    torch.manual_seed(0)
    linear, held, seen = Linear(nn.Linear(128, 70, dtype=torch.float16)).to(DEVICE), HeldWeights(4), list[int]()
    # not settled: no trial lets a CPU multiply 40 rows, which it would round
    held.take(linear)
    row_MK = torch.randn(40, 128, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.float16)
    expanded_MN = linear(row_MK)

    def multiply(row_MK: Tensor, word_NK: Tensor, scale_GN2: Tensor, layout: WordLayout) -> Tensor:
        seen.append(len(row_MK))
        return multiply_int4_kernel(row_MK, word_NK, scale_GN2, layout)

    assert [matrix.shape for matrix in held.for_kernel()] == [(70, 128)]
    held.set_kernel(multiply)
    for num_rows in (1, MOST_ROWS, MOST_ROWS + 1, 40):
        torch.testing.assert_close(linear(row_MK[:num_rows]), expanded_MN[:num_rows], rtol=1e-3, atol=1e-3)
    assert seen == [1, MOST_ROWS]
    held.set_kernel(None)
    linear(row_MK[:1])
    assert len(seen) == 2, "without a kernel it is expanded as ever"
