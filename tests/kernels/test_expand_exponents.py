"""Lossless coding of bfloat16: any bits come back, by every form of the decoder, from every form of the encoder."""

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
SIZES = (1, 127, 1024, 1025, 5000, CHUNK, 2 * CHUNK + 1300)


def weights(num: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    drawn = torch.randn(num, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.bfloat16().view(torch.int16)


def parts(words: ExponentWords, top: int) -> tuple[Tensor, ...]:
    start_C = torch.cat((torch.zeros(1, dtype=torch.int64), words.count_C.cumsum(0)))
    return words.mantissa_N, words.distance_B, words.escape_3E, start_C, torch.tensor([top])


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("width", [4, 3])
def test_every_pattern_comes_back(encode, decode, width: int) -> None:
    for top in (0, 120, 255):
        out = torch.empty(65536, dtype=torch.bfloat16)
        decode(*parts(encode(ALL_PATTERNS, top, width), top), out)
        assert torch.equal(out.view(torch.int16), ALL_PATTERNS)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("num", SIZES)
def test_weights_of_any_number_come_back(decode, width: int, num: int) -> None:
    bits = weights(num)
    out = torch.full((num + 9,), 7, dtype=torch.bfloat16)  # what stands behind must stay
    decode(*parts(encode_exponents_reference(bits, 121, width), 121), out[:num])
    assert torch.equal(out[:num].view(torch.int16), bits)
    assert (out[num:] == 7).all()


@needs_numba
@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("num", [0, *SIZES])
def test_encoders_write_the_same_words(width: int, num: int) -> None:
    bits = weights(num, scale=1e-3) if num != CHUNK else ALL_PATTERNS
    for top in (0, 119, 250):
        for one, other in zip(
            encode_exponents_reference(bits, top, width), encode_exponents_compiled(bits, top, width), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, where a float16 becomes infinite
def test_other_types_are_rounded_once(decode, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_operators(monkeypatch)
    bits = torch.cat((ALL_PATTERNS, weights(CHUNK)))
    out = torch.empty(len(bits), dtype=dtype)
    decode(*parts(encode_exponents_reference(bits, 121, 4), 121), out)
    torch.testing.assert_close(out, bits.view(torch.bfloat16).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("width", [4, 3])
def test_damaged_words_stay_within_their_bounds(decode, width: int) -> None:
    """And are not what they were: so the comparisons above can fail."""
    num, random = CHUNK + 700, np.random.default_rng(0)
    words = encode_exponents_reference(weights(num), 121, width)
    damaged = [torch.from_numpy(random.integers(0, 256, len(part), dtype=np.uint8)) for part in words[:3]]
    damaged[2][len(damaged[2]) // 3 : 2 * len(damaged[2]) // 3] = 255  # all places of the last chunk lie behind its end
    out = torch.full((num + 2 * CHUNK,), 7, dtype=torch.bfloat16)
    decode(*parts(ExponentWords(*damaged, words.count_C), 121), out[:num])
    assert (out[num:] == 7).all()
    assert not torch.equal(out[:num].view(torch.int16), weights(num))
