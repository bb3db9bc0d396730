"""Weights of 4 bits in blocks: what is expanded is what was packed, and torch's product means the same numbers."""

from collections.abc import Callable

import pytest
import torch
from rounding import sums

from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.int4_blocks import (
    WordLayout,
    expand_int4_compiled,
    expand_int4_reference,
    int4_product,
    layout_for,
    pack_int4,
)

HERE = layout_for(torch.device("cpu"))
LAYOUTS = (WordLayout(64, has_product=False), WordLayout(32, has_product=False))
FORMS = [
    expand_int4_reference,
    pytest.param(expand_int4_compiled, marks=pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")),
]
TYPES = (torch.float32, torch.bfloat16, torch.float16)
N, K, GROUP = 128, 192, 64


def stored(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales with offsets, and the weights that they stand for."""
    torch.manual_seed(0)
    code_NK, scale_GN2 = torch.randint(0, 16, (N, K), dtype=torch.uint8), torch.randn(K // GROUP, N, 2).to(dtype)
    scale_NG1, offset_NG1 = scale_GN2.float().permute(2, 1, 0)[..., None]
    weight_NK = ((code_NK.float() - 8).view(N, -1, GROUP) * scale_NG1 + offset_NG1).view(N, K).to(dtype)
    return code_NK, scale_GN2, weight_NK


@pytest.mark.parametrize("expand", FORMS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_was_packed_is_expanded_to_the_bit(
    layout: WordLayout, dtype: torch.dtype, expand: Callable[..., None]
) -> None:
    code_NK, scale_GN2, weight_NK = stored(dtype)
    out_KN = torch.empty(K, N, dtype=dtype)
    expand(pack_int4(code_NK, layout), scale_GN2, layout, out_KN)
    assert torch.equal(out_KN.t(), weight_NK)
    expand(pack_int4(code_NK, layout), scale_GN2.flip(0), layout, out_KN)
    assert not torch.equal(out_KN.t(), weight_NK), "the scales of other groups are not noticed"


@pytest.mark.skipif(not HERE.has_product, reason="this torch has no int4 product for CPUs")
def test_the_product_means_the_same_weights() -> None:
    code_NK, scale_GN2, weight_NK = stored(torch.float32)
    row_MK = torch.randn(5, K)
    product_MN, wanted_MN = int4_product(row_MK, pack_int4(code_NK, HERE), scale_GN2), row_MK @ weight_NK.t()
    torch.testing.assert_close(product_MN, wanted_MN, **sums(wanted_MN, K))
    other = int4_product(row_MK, pack_int4(15 - code_NK, HERE), scale_GN2)
    assert (other - wanted_MN).abs().max() > 1, "other codes are not noticed"


def test_there_is_a_layout_for_any_device() -> None:
    assert layout_for(torch.device("meta")).block_rows == 64
    assert HERE.block_rows in (32, 64)
