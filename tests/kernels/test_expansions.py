"""Weights that are stored as something else, by every form that expands them.

Blocks of GGUF against gguf's own reading of them, rounded once; 8-bit floating-point numbers against a product in
float32 that is rounded once; and the lossless coding of 16 bits: whatever they are they come back.
"""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from coded_weights import DTYPES, EXPANSIONS, are_equal, forbid_operators
from gguf import GGMLQuantizationType, quants
from gguf_files import random_blocks
from marks import DEVICE, ON_DEVICE, needs_cpu, needs_triton
from torch import Tensor

from offload.encoding.gguf import BLOCKS
from offload.kernels import expand_blocks, expand_float8
from offload.kernels.encode_exponents import ExponentWords, encode_exponents_compiled, encode_exponents_reference
from offload.kernels.expand_exponents import (
    expand_exponents_compiled,
    expand_exponents_kernel,
    expand_exponents_reference,
)
from offload.kernels.expand_float8 import expand_float8_compiled, expand_float8_kernel, expand_float8_reference
from offload.kernels.expansion import COMPILED, EXPANSION_KERNELS, REFERENCE, Expansion
from offload.kernels.exponents_layout import CHUNK
from offload.kernels.jit import HAS_TRITON

pytestmark = ON_DEVICE


def blocks(kind: str, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Random ones, with zeros among the scales, and the float32 numbers that they hold."""
    raw_MB = random_blocks(kind, num_blocks, np.random.default_rng(num_blocks))
    raw_MB[0] = 0
    value_MW = quants.dequantize(raw_MB, GGMLQuantizationType[kind])
    return torch.from_numpy(raw_MB).to(DEVICE), torch.from_numpy(value_MW).to(DEVICE)


@pytest.mark.parametrize("kind", BLOCKS)
def test_pieces_meet_where_they_should(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw_MB, value_MW = blocks(kind, 67)
    monkeypatch.setattr(expand_blocks, "_CHUNK_NUMBERS", 8 * value_MW.shape[1])
    out_MW = torch.empty(value_MW.shape, device=DEVICE)
    REFERENCE.blocks(kind, raw_MB, out_MW)
    assert are_equal(out_MW, value_MW.to(out_MW.dtype))


@pytest.mark.parametrize("num_blocks", [1, 67])
@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_those_of_gguf(kind: str, num_blocks: int) -> None:
    raw_MB, value_MW = blocks(kind, num_blocks)
    for way in (REFERENCE, *[COMPILED] * (DEVICE == "cpu"), *[EXPANSION_KERNELS] * HAS_TRITON):
        for dtype in DTYPES:
            if way is EXPANSION_KERNELS and dtype == torch.bfloat16 and DEVICE == "cpu":
                continue  # the interpreter cuts where it should round
            out_MW = torch.full(value_MW.shape, torch.nan, dtype=dtype, device=DEVICE)
            way.blocks(kind, raw_MB, out_MW)
            assert are_equal(out_MW, value_MW.to(out_MW.dtype)), (way, dtype)


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_byte_of_a_block_matters(kind: str) -> None:
    """Or the comparison would not see a byte that is left out."""
    raw_MB, value_MW = blocks(kind, 3)
    for place in range(raw_MB.shape[1]):
        changed_MB, out_MW = raw_MB.clone(), torch.empty_like(value_MW)
        changed_MB[2, place] ^= 0x11
        REFERENCE.blocks(kind, changed_MB, out_MW)
        assert not are_equal(out_MW[2], value_MW[2]), f"byte {place}"


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_that_is_no_number_leaves_none(dtype: torch.dtype) -> None:
    """Whatever its bits: rounded to bfloat16, those of 0x7FFF would carry into the sign."""
    half_M = torch.tensor([0x7C01, 0x7E00, 0x7FFF, -1, -512]).short().view(torch.uint8).view(-1, 2)
    raw_MB = torch.cat([half_M, torch.full((len(half_M), 32), 3, dtype=torch.uint8)], 1)
    out_MW = torch.zeros(len(half_M), 32, dtype=dtype)
    COMPILED.blocks("Q8_0", raw_MB, out_MW)
    assert bool(out_MW.isnan().all())


def test_sizes_are_those_of_gguf() -> None:
    assert {kind: gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in BLOCKS} == BLOCKS


@needs_cpu
def test_threads_share_the_blocks() -> None:
    raw_MB, value_MW = blocks("Q4_K", 1000)
    torch.set_num_threads(3)
    out_MW = torch.empty_like(value_MW)
    COMPILED.blocks("Q4_K", raw_MB, out_MW)
    assert are_equal(out_MW, value_MW.to(out_MW.dtype))


@pytest.mark.parametrize("way", EXPANSIONS)
def test_one_word_a_row_is_read_as_it_lies(way: Expansion) -> None:
    """The mistake that was: rows of one word that lie across were taken for rows that lie in a run."""
    where = "cpu" if way is COMPILED else DEVICE
    words_N1 = torch.arange(24, device=where).int().view(1, 24).t()[::2]
    scale_N1, out_NK = torch.ones(12, 1, device=where), torch.empty(12, 8, device=where)
    way.integers(words_N1, 4, scale_N1, torch.zeros_like(words_N1, dtype=torch.int8), 8, out_NK)
    assert out_NK[:, :2].tolist() == [[word % 16, word // 16] for word in range(0, 24, 2)]


KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMS = [
    expand_float8_reference,
    expand_float8_compiled,
    pytest.param(expand_float8_kernel, marks=needs_triton),
]
SHAPES = [  # rows, columns and a block: ragged both ways, a scale a row, one for all, odd rows, one number
    (130, 140, (128, 128)),
    (20, 256, (16, 64)),
    (18, 96, (1, 96)),
    (17, 64, (17, 64)),
    (5, 77, (2, 3)),
    (1, 1, (128, 128)),
]


def codes(num_rows: int, num_columns: int, kind: torch.dtype) -> Tensor:
    """Every code there is, if they fit."""
    random = torch.Generator().manual_seed(num_rows)
    code = torch.randint(0, 256, (num_rows, num_columns), generator=random).to(torch.uint8)
    code.view(-1)[:256] = torch.arange(min(256, code.numel())).to(torch.uint8)
    return code.view(kind)


def scales(num_rows: int, num_columns: int, block: tuple[int, int]) -> Tensor:
    """Return scales of many sizes, so that results overflow and underflow in half precision."""
    shape = (-(-num_rows // block[0]), -(-num_columns // block[1]))
    random = torch.Generator().manual_seed(num_columns)
    return torch.randn(shape, generator=random) * torch.logspace(-6, 3, shape[0] * shape[1]).view(shape)


def product(weight_NK: Tensor, scale_AB: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    scale_NK = scale_AB.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight_NK.float() * scale_NK[: weight_NK.shape[0], : weight_NK.shape[1]]).to(dtype)


def are_equal_numbers(got: Tensor, wanted: Tensor) -> bool:
    """To the bit, except for those of NaN."""
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    got, wanted = (numbers.masked_fill(numbers.isnan(), 7.0).view(bits) for numbers in (got, wanted))
    return torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, in Triton's interpreter
def test_numbers_are_those_of_a_product_rounded_once(
    form: Callable[..., None], kind: torch.dtype, dtype: torch.dtype
) -> None:
    if form is expand_float8_kernel and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter cuts what it stores as bfloat16")
    where = "cpu" if form is expand_float8_compiled else DEVICE
    for num_rows, num_columns, block in SHAPES:
        weight_NK, scale_AB = codes(num_rows, num_columns, kind), scales(num_rows, num_columns, block)
        out_NK = torch.full((num_rows, num_columns), 7.0, dtype=dtype, device=where)
        form(weight_NK.to(where), scale_AB.to(where), block, out_NK)
        wanted_NK = product(weight_NK, scale_AB, block, dtype)
        assert are_equal_numbers(out_NK.cpu(), wanted_NK), (num_rows, num_columns, block)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_write_all_rows_and_no_other(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for num_rows in (1, 15, 16, 31, 47, 48, 100):
        weight_NK, scale_AB = codes(num_rows, 64, KINDS[0]), scales(num_rows, 64, (16, 16))
        around = torch.full((num_rows + 2, 64), 5.0, dtype=torch.bfloat16)
        expand_float8_compiled(weight_NK, scale_AB, (16, 16), around[1:-1])
        assert are_equal_numbers(around[1:-1], product(weight_NK, scale_AB, (16, 16), torch.bfloat16))
        assert bool((around[0] == 5).all() and (around[-1] == 5).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_looks_up_pairs_that_are_not_aligned(dtype: torch.dtype) -> None:
    flat = codes(9, 64, KINDS[0]).view(torch.uint8).view(-1)[1:].view(KINDS[0])
    for lo in (0, 1):
        weight_NK, out_NK = flat[lo : lo + 512].view(8, 64), torch.empty(8, 64, dtype=dtype)
        expand_float8_reference(weight_NK, torch.ones(1, 1), (8, 64), out_NK)
        assert are_equal_numbers(out_NK, weight_NK.to(dtype))


def test_both_layouts_say_what_torch_does() -> None:
    for kind, layout in expand_float8._LAYOUTS.items():
        value_C = torch.arange(128).to(torch.uint8).view(kind).float()
        assert float(value_C[1]) == layout.unit
        is_finite_C = value_C.isfinite()
        assert is_finite_C[: layout.first_special].all() and not is_finite_C[layout.first_special]


ENCODERS = [encode_exponents_reference, encode_exponents_compiled]
DECODERS = [
    expand_exponents_reference,
    expand_exponents_compiled,
    pytest.param(expand_exponents_kernel, marks=needs_triton),
]
ALL_PATTERNS = torch.arange(65536).to(torch.int16)  # NaNs, infinities, subnormal numbers, both zeros
TYPES = pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
TOPS = {torch.bfloat16: 121, torch.float16: 9}  # of weights
SIZES = (1, 127, 1024, 1025, 5000, CHUNK, 2 * CHUNK + 1300)


def weights(num: int, stored: torch.dtype = torch.bfloat16, scale: float = 0.02) -> Tensor:
    drawn = torch.randn(num, generator=torch.Generator().manual_seed(0)) * scale
    return drawn.bfloat16().to(stored)


def parts(words: ExponentWords, top: int) -> tuple[Tensor, ...]:
    start_C = torch.cat((torch.zeros(1, dtype=torch.int64), words.count_C.cumsum(0)))
    return words.mantissa_N, words.distance_B, words.escape_3E, start_C, torch.tensor([top])


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("width", [4, 3])
@TYPES
def test_every_pattern_comes_back(stored: torch.dtype, encode, decode, width: int) -> None:
    pattern_N = ALL_PATTERNS.view(stored)
    for top in (0, 34, 120, 255):  # float16 has exponents up to 31, where its lowest bits are zero
        out = torch.empty(65536, dtype=stored)
        decode(*parts(encode(pattern_N, top, width), top), out)
        assert are_equal(out, pattern_N)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("num", SIZES)
@TYPES
def test_weights_of_any_number_come_back(stored: torch.dtype, decode, width: int, num: int) -> None:
    weight_N, top = weights(num, stored), TOPS[stored]
    out = torch.full((num + 9,), 7, dtype=stored)  # what stands behind must stay
    decode(*parts(encode_exponents_reference(weight_N, top, width), top), out[:num])
    assert are_equal(out[:num], weight_N)
    assert (out[num:] == 7).all()


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("num", [0, *SIZES])
@TYPES
def test_encoders_write_the_same_words(stored: torch.dtype, width: int, num: int) -> None:
    weight_N = weights(num, stored, scale=1e-3) if num != CHUNK else ALL_PATTERNS.view(stored)
    for top in (0, 7, 119, 250):
        for tensor, other in zip(
            encode_exponents_reference(weight_N, top, width),
            encode_exponents_compiled(weight_N, top, width),
            strict=True,
        ):
            assert torch.equal(tensor, other) and tensor.dtype == other.dtype


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
    assert not are_equal(out[:num], weights(num, stored))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.filterwarnings("ignore:overflow")
def test_words_of_one_type_are_none_of_the_other(decode) -> None:
    """A decoder that forgets to turn them, or turns what is bfloat16, is found by the comparisons above."""
    weight_N, out = weights(5000, torch.float16), torch.empty(5000, dtype=torch.float16)
    words = encode_exponents_reference(weight_N, 9, 4)
    decode(*parts(words._replace(mantissa_N=words.mantissa_N.view(torch.uint8)), 9), out)
    assert not are_equal(out, weight_N)
