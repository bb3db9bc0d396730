"""Matrices that are rounded to 4 bits: compiled as by torch, to the bit, and no code beyond the levels."""

import pytest
import torch

from offload.kernels import int4_blocks as encode_int4
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.int4_blocks import WordLayout, encode_int4_compiled, encode_int4_reference, expand_int4_reference

LAYOUTS = (WordLayout(64, has_product=False), WordLayout(32, has_product=False))
TYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64, 64), (70, 1120, 32), (130, 2112, 64))  # rows, columns, group: parts of blocks and of panels
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")


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


@needs_numba
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_it_has_the_same_bits(shape: tuple[int, int, int], layout: WordLayout, dtype: torch.dtype) -> None:
    num_rows, num_columns, group = shape
    weight_NK = all_kinds(num_rows, num_columns, dtype)
    wanted, found = (encode(weight_NK, group, layout) for encode in (encode_int4_reference, encode_int4_compiled))
    assert torch.equal(found.word_NK, wanted.word_NK)
    assert torch.equal(found.scale_GN2, wanted.scale_GN2)
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


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = all_kinds(200, 64, torch.float32)
    whole = encode_int4_reference(weight_NK, 64, LAYOUTS[0])
    monkeypatch.setattr(encode_int4, "_CHUNK_NUMBERS", 1)
    for one, other in zip(whole, encode_int4_reference(weight_NK, 64, LAYOUTS[0]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("encode", [encode_int4_reference, pytest.param(encode_int4_compiled, marks=needs_numba)])
def test_what_is_no_number_spoils_its_own_group_alone(encode) -> None:
    weight_NK = all_kinds(64, 128, torch.float32)
    good = encode(weight_NK, 64, LAYOUTS[0])
    weight_NK[3, 5], weight_NK[4, 6] = torch.nan, torch.inf
    spoilt = encode(weight_NK, 64, LAYOUTS[0])
    differs_K = (spoilt.word_NK != good.word_NK).view(128, 32).any(1)
    assert not differs_K[64:].any()
    words = (spoilt.word_NK.view(128, 32), good.word_NK.view(128, 32))
    assert torch.equal(*(one[:, 5:] for one in words))
    assert torch.equal(*(one >> 4 for one in words)), "rows of the upper half are other ones"
