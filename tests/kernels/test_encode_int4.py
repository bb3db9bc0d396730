"""Matrices of 4 bits: rounded as by torch, to the bit, and expanded as they were packed."""

from collections.abc import Callable

import pytest
import torch
from rounding import sums

from offload.kernels import int4_blocks as encode_int4
from offload.kernels.int4_blocks import (
    WordLayout,
    encode_int4_compiled,
    encode_int4_reference,
    expand_int4_compiled,
    expand_int4_reference,
    int4_product,
    layout_for,
    pack_int4,
)

LAYOUTS = (WordLayout(64, has_product=False), WordLayout(32, has_product=False))
TYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64, 64), (70, 1120, 32), (130, 2112, 64))  # rows, columns, group: parts of blocks and of panels


def all_kinds(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers at random; in the first columns halves (ties), constant groups, zeros of both signs, tiny and huge."""
    torch.manual_seed(0)
    weight_NK = torch.randn(num_rows, num_columns) * torch.rand(num_rows, 1)
    weight_NK[0:8, :64] = torch.arange(64) % 31 / 2 - 8
    weight_NK[8:10, :64], weight_NK[10, :64], weight_NK[11, :64] = 0.3, 0.0, -0.0
    weight_NK[12, :64] = torch.tensor([0.0, -0.0]).repeat(32)
    weight_NK[13, :64] *= 1e-7
    weight_NK[14, :64] *= 1e4
    weight_NK[15, :64] = -0.7
    return weight_NK.to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_it_has_the_same_bits(shape: tuple[int, int, int], layout: WordLayout, dtype: torch.dtype) -> None:
    num_rows, num_columns, group = shape
    weight_NK = all_kinds(num_rows, num_columns, dtype)
    wanted, compiled = (encode(weight_NK, group, layout) for encode in (encode_int4_reference, encode_int4_compiled))
    assert torch.equal(compiled.word_NK, wanted.word_NK)
    assert torch.equal(compiled.scale_GN2, wanted.scale_GN2)
    other = encode_int4_compiled(weight_NK.roll(1, 1), group, layout)
    assert not torch.equal(other.word_NK, wanted.word_NK), "other columns are not noticed"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_halves_go_to_the_even_code_and_what_is_constant_stays(dtype: torch.dtype) -> None:
    """Numbers from -8 to 7 in halves have a step of 1 and an offset of 0."""
    weight_NK, layout, out_KN = all_kinds(70, 64, dtype), LAYOUTS[0], torch.empty(64, 128, dtype=dtype)
    expand_int4_reference(*encode_int4_reference(weight_NK, 64, layout), layout, out_KN)
    assert torch.equal(out_KN.t()[:8], weight_NK[:8].round())
    torch.testing.assert_close(out_KN.t()[8:12], weight_NK[8:12], rtol=1e-6, atol=1e-6)
    assert not out_KN.t()[70:].any(), "rows that make up a block stand for something"


def test_chunks_do_not_show_and_there_is_a_layout_for_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = all_kinds(200, 64, torch.float32)
    whole = encode_int4_reference(weight_NK, 64, LAYOUTS[0])
    monkeypatch.setattr(encode_int4, "_CHUNK_NUMBERS", 1)
    for left, other in zip(whole, encode_int4_reference(weight_NK, 64, LAYOUTS[0]), strict=True):
        assert torch.equal(left, other)
    # There is a layout for any device.
    assert layout_for(torch.device("meta")).block_rows == 64
    assert HERE.block_rows in (32, 64)


@pytest.mark.parametrize("encode", [encode_int4_reference, encode_int4_compiled])
def test_what_is_no_number_spoils_its_own_group_alone(encode) -> None:
    weight_NK = all_kinds(64, 128, torch.float32)
    good = encode(weight_NK, 64, LAYOUTS[0])
    weight_NK[3, 5], weight_NK[4, 6] = torch.nan, torch.inf
    spoilt = encode(weight_NK, 64, LAYOUTS[0])
    differs_K = (spoilt.word_NK != good.word_NK).view(128, 32).any(1)
    assert not differs_K[64:].any()
    words = (spoilt.word_NK.view(128, 32), good.word_NK.view(128, 32))
    assert torch.equal(*(word[:, 5:] for word in words))
    assert torch.equal(*(word >> 4 for word in words)), "rows of the upper half are other ones"
    scale_GN = spoilt.scale_GN2[..., 0]
    assert (~scale_GN.isfinite()).nonzero().tolist() == [[0, 3], [0, 4]], "what is no number does not show"


HERE = layout_for(torch.device("cpu"))

FORMS = [expand_int4_reference, expand_int4_compiled]

N, K, GROUP = 128, 192, 64


def stored(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
