"""Lossless coding of 16 bits: whatever they are they come back, by every form of the decoder and of the encoder."""

import numpy as np
import pytest
import torch
from coded_weights import forbid_operators
from torch import Tensor

from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.encode_exponents import ExponentWords, encode_exponents_compiled, encode_exponents_reference
from offload.kernels.expand_exponents import (
    expand_exponents_compiled,
    expand_exponents_kernel,
    expand_exponents_reference,
)
from offload.kernels.exponents_layout import CHUNK
from offload.kernels.jit import HAS_TRITON

needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
ENCODERS = [encode_exponents_reference, pytest.param(encode_exponents_compiled, marks=needs_numba)]
DECODERS = [
    expand_exponents_reference,
    pytest.param(expand_exponents_compiled, marks=needs_numba),
    pytest.param(expand_exponents_kernel, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]
ALL_PATTERNS = torch.arange(65536).to(torch.int16)  # NaNs, infinities, subnormal numbers, both zeros
TYPES = pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
TOPS = {torch.bfloat16: 121, torch.float16: 9}  # of weights
SIZES = (1, 127, 1024, 1025, 5000, CHUNK, 2 * CHUNK + 1300)


def weights(num: int, stored: torch.dtype = torch.bfloat16, scale: float = 0.02) -> Tensor:
    """That were bfloat16 once; of float16 some are subnormal."""
    drawn = torch.randn(num, generator=torch.Generator().manual_seed(0)) * scale
    return drawn.bfloat16().to(stored)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


def parts(words: ExponentWords, top: int) -> tuple[Tensor, ...]:
    start_C = torch.cat((torch.zeros(1, dtype=torch.int64), words.count_C.cumsum(0)))
    return words.mantissa_N, words.distance_B, words.escape_3E, start_C, torch.tensor([top])


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("width", [4, 3])
@TYPES
def test_every_pattern_comes_back(stored: torch.dtype, encode, decode, width: int) -> None:
    pattern_N = ALL_PATTERNS.view(stored)
    for top in (0, 34, 120, 255):  # float16 has exponents up to 31, but for lowest bits that are not zero
        out = torch.empty(65536, dtype=stored)
        decode(*parts(encode(pattern_N, top, width), top), out)
        assert same(out, pattern_N)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("num", SIZES)
@TYPES
def test_weights_of_any_number_come_back(stored: torch.dtype, decode, width: int, num: int) -> None:
    weight_N, top = weights(num, stored), TOPS[stored]
    out = torch.full((num + 9,), 7, dtype=stored)  # what stands behind must stay
    decode(*parts(encode_exponents_reference(weight_N, top, width), top), out[:num])
    assert same(out[:num], weight_N)
    assert (out[num:] == 7).all()


@needs_numba
@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("num", [0, *SIZES])
@TYPES
def test_encoders_write_the_same_words(stored: torch.dtype, width: int, num: int) -> None:
    weight_N = weights(num, stored, scale=1e-3) if num != CHUNK else ALL_PATTERNS.view(stored)
    for top in (0, 7, 119, 250):
        for one, other in zip(
            encode_exponents_reference(weight_N, top, width),
            encode_exponents_compiled(weight_N, top, width),
            strict=True,
        ):
            assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16), (torch.float16, torch.float32),
     (torch.float16, torch.bfloat16)],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, where a float16 becomes infinite
def test_other_types_are_rounded_once(
    decode, stored: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_operators(monkeypatch)
    weight_N, top = torch.cat((ALL_PATTERNS.view(stored), weights(CHUNK, stored))), TOPS[stored]
    if decode is expand_exponents_kernel and dtype == torch.bfloat16:  # which the interpreter cuts instead
        weight_N = weight_N.bfloat16().half()
        weight_N = weight_N[weight_N.bfloat16().half() == weight_N]
    out = torch.empty(len(weight_N), dtype=dtype)
    decode(*parts(encode_exponents_reference(weight_N, top, 4), top), out)
    torch.testing.assert_close(out, weight_N.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("width", [4, 3])
@TYPES
def test_damaged_words_stay_within_their_bounds(stored: torch.dtype, decode, width: int) -> None:
    """And are not what they were: so the comparisons above can fail."""
    num, random = CHUNK + 700, np.random.default_rng(0)
    words = encode_exponents_reference(weights(num, stored), TOPS[stored], width)
    damaged = [torch.from_numpy(random.integers(0, 256, len(part), dtype=np.uint8)) for part in words[:3]]
    damaged[0] = damaged[0].view(words.mantissa_N.dtype)
    damaged[2][len(damaged[2]) // 3 : 2 * len(damaged[2]) // 3] = 255  # all places of the last chunk lie behind its end
    out = torch.full((num + 2 * CHUNK,), 7, dtype=stored)
    decode(*parts(ExponentWords(*damaged, words.count_C), TOPS[stored]), out[:num])
    assert (out[num:] == 7).all()
    assert not same(out[:num], weights(num, stored))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.filterwarnings("ignore:overflow")
def test_words_of_one_type_are_none_of_the_other(decode) -> None:
    """A decoder that forgets to turn them, or turns what is bfloat16, is found by the comparisons above."""
    weight_N, out = weights(5000, torch.float16), torch.empty(5000, dtype=torch.float16)
    words = encode_exponents_reference(weight_N, 9, 4)
    decode(*parts(words._replace(mantissa_N=words.mantissa_N.view(torch.uint8)), 9), out)
    assert not same(out, weight_N)
