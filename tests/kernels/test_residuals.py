"""What a copy of 4 bits does not say of bfloat16 weights: any bits come back, within their bounds, in few bits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from coded_weights import are_equal, forbid_operators
from marks import needs_triton
from torch import Tensor
from torch.nn.functional import pad

from offload.kernels import residual_code
from offload.kernels.encode_residuals import ResidualWords, encode_residuals_compiled, encode_residuals_reference
from offload.kernels.expand_residuals import (
    expand_residuals_compiled,
    expand_residuals_kernel,
    expand_residuals_reference,
)
from offload.kernels.int4_blocks import FILE_LAYOUT, WordLayout, encode_int4
from offload.kernels.machine_code import compiled

ENCODERS = [encode_residuals_reference, encode_residuals_compiled]
DECODERS = [
    expand_residuals_reference,
    expand_residuals_compiled,
    pytest.param(expand_residuals_kernel, marks=needs_triton),
]
LAYOUTS = [FILE_LAYOUT, WordLayout(32, has_product=False)]
ALL_PATTERNS = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
# rows and columns; edges of tiles of 64 x 256, groups of 32, one row
SIZES = [(64, 64), (130, 96), (1, 32), (70, 320), (64, 512)]


def copied(weight_NK: Tensor, layout: WordLayout = FILE_LAYOUT) -> tuple[Tensor, Tensor]:
    num_columns = weight_NK.shape[1]
    finite_NK = torch.where(weight_NK.isfinite(), weight_NK, 0)
    words = encode_int4(finite_NK, 64 if num_columns % 64 == 0 else 32, layout)
    return words.word_NK.view(-1, num_columns, layout.block_rows // 2), words.scale_GN2


def expanded(decode, words: ResidualWords, copy: tuple[Tensor, Tensor], out_NK: Tensor) -> Tensor:
    stored_B = torch.cat([part.flatten() for part in words[:4]])
    decode(stored_B, *copy, pad(words.count_3T.cumsum(1), (1, 0)), out_NK)
    return out_NK


def drawn(*shape: int) -> Tensor:
    weight_NK = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    weight_NK[0, :7] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-40, -3e38])
    weight_NK[-1, 8:] = 0
    return weight_NK


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("decode", DECODERS)
def test_every_pattern_comes_back_beside_every_code(encode, decode) -> None:
    """Scales reach from subnormal numbers to infinity, with zero at either end and between."""
    weight_NK = ALL_PATTERNS.view(256, 256)
    group = torch.arange(256) // 64
    is_slow = decode is expand_residuals_kernel
    for code in range(0, 16, 15 if is_slow else 1):
        word_BKH = torch.full((4, 256, 32), code * 17, dtype=torch.uint8)
        for exponent in (0,) if is_slow else (-40, -30, -12, -6, 0, 30, 37):
            scale = torch.tensor(1.37 * 10.0**exponent).bfloat16().float()
            zero_G = torch.tensor([0.0, 5.0, 8.0, 15.0])
            scale_G2 = torch.stack((scale.expand(4), (8 - zero_G) * scale), 1).bfloat16()
            copy = (word_BKH, scale_G2[:, None].expand(4, 256, 2).contiguous())
            out_NK = expanded(decode, encode(weight_NK, *copy), copy, torch.empty_like(weight_NK))
            assert are_equal(out_NK, weight_NK), (code, exponent, group)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_both_encoders_write_the_same_and_all_decoders_read_it(size: tuple[int, int], layout: WordLayout) -> None:
    weight_NK, other_NK = drawn(*size), drawn(*size).roll(1, 0)
    copy = copied(weight_NK, layout)
    wanted, result = (encode(weight_NK, *copy) for encode in ENCODERS)
    for tensor, other in zip(wanted, result, strict=True):
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype
    for decode in (expand_residuals_reference, expand_residuals_compiled):
        around = torch.full((size[0] + 2, size[1]), 7.0).bfloat16()
        assert are_equal(expanded(decode, result, copy, around[1:-1]), weight_NK)
        assert (around[[0, -1]] == 7).all(), "written beside its place"
        if size[0] > 1:
            assert not are_equal(expanded(decode, result, copied(other_NK, layout), around[1:-1]), weight_NK)


def test_threads_that_begin_at_once_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache would keep one of two compilations, and the other's instructions would be freed under their thread."""
    made = []
    monkeypatch.setattr(residual_code, "compiled", lambda *given: made.append(given) or compiled(*given))
    residual_code._compiled.cache_clear()
    weight_NK = drawn(128, 256)
    copy = copied(weight_NK)
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(encode_residuals_compiled, weight_NK, *copy) for _ in range(8)]
    wanted = encode_residuals_reference(weight_NK, *copy)
    assert all(torch.equal(result.result().near_B, wanted.near_B) for result in results)
    assert len(made) == 1


@pytest.mark.parametrize("rows_of_zeros", [0.1, 0.9])
def test_processors_without_instructions_for_scattered_bits_write_and_read_the_same(
    rows_of_zeros: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few and with many weights at level zero, which are read otherwise."""
    monkeypatch.setattr(residual_code, "can_scatter", lambda: False)
    random = torch.Generator().manual_seed(1)
    weight_NK = drawn(130, 320)
    weight_NK[:, 64:] *= torch.rand(130, 256, generator=random) > rows_of_zeros
    copy = copied(weight_NK)
    wanted, made = (encode(weight_NK, *copy) for encode in ENCODERS)
    for left, right in zip(wanted, made, strict=True):
        assert torch.equal(left, right)
    assert are_equal(expanded(expand_residuals_compiled, made, copy, torch.empty_like(weight_NK)), weight_NK)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@needs_triton
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_reads_what_encoders_write(size: tuple[int, int]) -> None:
    weight_NK = drawn(*size)
    copy = copied(weight_NK)
    out_NK = torch.empty_like(weight_NK)
    assert are_equal(
        expanded(expand_residuals_kernel, encode_residuals_reference(weight_NK, *copy), copy, out_NK), weight_NK
    )


@pytest.mark.parametrize("decode", [expand_residuals_reference, expand_residuals_compiled])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types_are_rounded_once(decode, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_operators(monkeypatch)
    weight_NK = torch.cat((ALL_PATTERNS.view(256, 256), drawn(70, 256)))
    copy = copied(weight_NK)
    out_NK = expanded(
        decode, encode_residuals_reference(weight_NK, *copy), copy, torch.empty(weight_NK.shape, dtype=dtype)
    )
    torch.testing.assert_close(out_NK, weight_NK.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("decode", DECODERS)
def test_damaged_words_stay_within_their_bounds(decode) -> None:
    weight_NK = drawn(70, 320)
    copy = copied(weight_NK)
    words = encode_residuals_reference(weight_NK, *copy)
    for place, kept in ((0, 255), (1, 0b10101010), (2, 255), (3, 255)):
        damaged = [torch.full_like(word, kept) if at == place else word for at, word in enumerate(words[:4])]
        around = torch.full((270, 320), 7.0).bfloat16()
        out_NK = expanded(decode, ResidualWords(*damaged, words.count_3T), copy, around[100:170])
        assert (around[:100] == 7).all() and (around[170:] == 7).all()
        assert not are_equal(out_NK, weight_NK)


@pytest.mark.parametrize(
    "distribution",
    [
        torch.distributions.Normal(0, 0.02),
        torch.distributions.StudentT(4.0, 0, 0.014),
        torch.distributions.Laplace(0, 0.014),
    ],
    ids=lambda distribution: type(distribution).__name__,
)
def test_drawn_weights_take_at_most_nine_bits_less_a_fifth(distribution: torch.distributions.Distribution) -> None:
    torch.manual_seed(0)
    weight_NK = distribution.sample((512, 2048)).bfloat16()
    words = encode_residuals_compiled(weight_NK, *copied(weight_NK))
    assert 8 * sum(tensor.numel() for tensor in words[:4]) <= 8.8 * weight_NK.numel()
