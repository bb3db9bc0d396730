"""Encodings: what they say a tensor takes, what is recognised, and that decoding gives the numbers back."""

import math
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_files import KINDS, interleaved, random_blocks
from safetensors.torch import save_file

from offload.checkpoint.safetensors import read_header
from offload.encoding.base import ENCODINGS, PLAIN_OF, StorageType
from offload.encoding.exponents import (
    CODE,
    FORMATS,
    MANTISSAS,
    WORDS,
    Exponents,
    RecognisedWeight,
    best_window,
    distance_bytes,
    histogram,
)
from offload.encoding.gguf import BLOCKS, GgufBlocks
from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.expansion import REFERENCE

PLAIN_SHAPES = [(3, 5), (7,), (), (2, 0, 3)]


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("shape", PLAIN_SHAPES, ids=str)
def test_stored_bytes_are_those_of_the_file(encoding: StorageType, shape: tuple[int, ...], tmp_path) -> None:  # type: ignore[no-untyped-def]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, encoding.dtype))
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors").tensors["x"]
    assert entry.dtype == encoding.name and entry.hi - entry.lo == encoding.stored_bytes(shape)
    stored_B = torch.frombuffer(
        bytearray((tmp_path / "x.safetensors").read_bytes()[entry.lo :] or b"\0"), dtype=torch.uint8
    )
    decoded = encoding.decode(stored_B[: encoding.stored_bytes(shape)], shape)
    assert decoded.dtype == tensor.dtype and torch.equal(decoded, tensor)


def test_decoding_copies_nothing_and_both_tables_hold_the_same() -> None:
    stored_B = torch.zeros(24, dtype=torch.uint8)
    assert ENCODINGS["BF16"].decode(stored_B, (3, 4)).data_ptr() == stored_B.data_ptr()
    assert {encoding.dtype: encoding for encoding in ENCODINGS.values()} == dict(PLAIN_OF)


SHAPE = (130, 9, 70)
TYPES = {"BF16": (torch.bfloat16, 121), "F16": (torch.float16, 9)}  # and a usual top


class Told(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def headers(stem: str = ".weight", *, width: int = 4, **changed: Told | None) -> dict[str, Told]:
    words = (SHAPE, (distance_bytes(math.prod(SHAPE), width),), (64,))
    entries = [*(Told("U8", shape) for shape in words), Told("I64", (3,))]
    named = {name.removeprefix("."): entry for name, entry in zip((*WORDS, CODE), entries, strict=True)} | changed
    return {f"{stem}.{name}": entry for name, entry in named.items() if entry is not None}


def weights(num: int, source: str = "BF16", scale: float = 0.02) -> torch.Tensor:
    """That were bfloat16 once."""
    drawn = torch.randn(num, generator=torch.Generator().manual_seed(0)) * scale
    return drawn.bfloat16().to(TYPES[source][0])


def counts(weight_N: torch.Tensor, source: str) -> np.ndarray:
    return histogram(weight_N.view(torch.int16).numpy(), source)


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("format", FORMATS, ids=["weight", "parameter"])
@pytest.mark.parametrize("source", TYPES)
def test_what_was_stored_is_what_is_expanded(source: str, format, width: int) -> None:
    weight_N, (dtype, top) = weights(math.prod(SHAPE), source), TYPES[source]
    words = encode_exponents_reference(weight_N, top, width)
    fill = torch.zeros(-sum(map(len, words[:3])) % 64, dtype=torch.uint8)
    stored_B = torch.cat([part.view(torch.uint8) for part in (*words[:3], fill)])
    sizes = {"mantissas": Told(MANTISSAS[source], SHAPE), "escapes": Told("U8", (len(words.escape_3E) + len(fill),))}
    entries = headers(format.parameter, width=width, **sizes)
    recognised = format.recognise(entries, {})
    assert isinstance(recognised, RecognisedWeight) and recognised.shape == SHAPE
    assert recognised.coding.stored_bytes(SHAPE) == len(stored_B)
    ready = recognised.coding.prepare({CODE: torch.cat((torch.tensor([top]), words.count_C))}, SHAPE)
    assert sum(tensor.nbytes for tensor in ready.values()) == recognised.coding.companion_bytes(SHAPE)
    out = torch.empty(SHAPE, dtype=getattr(torch, recognised.coding.dtype))
    recognised.coding.expand(stored_B, ready, out, REFERENCE)
    assert out.dtype == dtype and torch.equal(out.view(-1).view(torch.int16), weight_N.view(torch.int16))


INCOMPLETE: list[tuple[dict[str, Told | None], str]] = [
    ({"code": None}, "without .weight.code"),
    ({"mantissas": None, "escapes": None}, "without .weight.mantissas, .weight.escapes"),
    ({"exponents": Told("U8", (7,))}, "7 bytes of exponents"),
    ({"mantissas": Told("BF16", SHAPE)}, "another version"),
    ({"code": Told("I32", (3,))}, "another version"),
]


@pytest.mark.parametrize(("changed", "words"), INCOMPLETE)
def test_incomplete_weights_are_refused(changed: dict[str, Told | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FORMATS[0].recognise(headers(**changed), {})
    assert FORMATS[0].recognise({".weight": Told("BF16", SHAPE)}, {}) is None, "other formats are left alone"
    assert FORMATS[1].recognise(headers(".weight"), {}) is None


@pytest.mark.parametrize(
    "code", [[], [300, 0, 0], [-1, 0, 0], [120, 0], [120, -1, 1], [120, 65537, 0], [120, 30, 0], [120, 0, 1 << 62]]
)
def test_a_code_that_points_outside_is_refused(code: list[int]) -> None:
    coding = Exponents(4, 64)
    assert coding.prepare({CODE: torch.tensor([120, 1, 1])}, SHAPE)
    with pytest.raises(ValueError, match=r"escapes are not what 64 bytes hold|must be a top below 256"):
        coding.prepare({CODE: torch.tensor(code, dtype=torch.int64)}, SHAPE)


@pytest.mark.parametrize("source", TYPES)
def test_the_window_is_the_best_one(source: str) -> None:
    weight_N, usual = weights(1 << 16, source), TYPES[source][1]
    result, taken = best_window(counts(weight_N, source)), dict[tuple[int, int], float]()
    for top, width in product(range(usual - 9, usual + 9), (3, 4)):
        words = encode_exponents_reference(weight_N, top, width)[:3]
        taken[top, width] = 8 * sum(map(len, words)) / len(weight_N)
    assert result.bits == pytest.approx(taken[result.top, result.width]) == min(taken.values())
    assert result.width == 3, "a bell of one width has few exponents"
    # Wide exponents take four bits, and all of them none.
    assert best_window(np.bincount(np.repeat(np.arange(100, 115), 100), minlength=256))[:2] == (114, 4)
    assert best_window(np.ones(256)).bits > 16
    assert best_window(np.bincount([0], minlength=256))[1] == 3


@pytest.mark.parametrize("scale", [0.002, 0.01, 0.02, 0.1])
@pytest.mark.parametrize("freedom", [3, 100], ids=["heavy tails", "a bell"])
def test_float16_takes_twelve_bits_only_where_it_was_bfloat16(freedom: int, scale: float) -> None:
    """Some of the small ones are subnormal as float16: these are escapes."""
    drawn_N = torch.from_numpy(np.random.default_rng(0).standard_t(freedom, 1 << 18) * scale)
    assert best_window(counts(drawn_N.bfloat16().half(), "F16")).bits < 12.3
    assert best_window(counts(drawn_N.half(), "F16")).bits > 16


def stored(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(3)
    if kind in BLOCKS:
        return random_blocks(kind, math.prod(shape) // BLOCKS[kind][0], rng).reshape(*shape[:-1], -1)
    return quants.quantize(rng.standard_normal(shape).astype(np.float32), GGMLQuantizationType[kind])


def expand(
    coding: GgufBlocks, raw: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out, flat = torch.empty(shape, dtype=dtype), torch.from_numpy(raw.copy()).contiguous().view(torch.uint8).flatten()
    assert len(flat) == coding.stored_bytes(shape)
    coding.expand(flat, coding.prepare({}, shape), out, REFERENCE)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_heads_come_back_in_their_order(kind: str) -> None:
    raw = stored(kind, (24, 256))
    wanted = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]).astype(np.float32).reshape(24, 256))
    assert torch.equal(expand(GgufBlocks(kind, 3), interleaved(raw, 3), (24, 256)), wanted)
    assert torch.equal(expand(GgufBlocks(kind), raw, (24, 256)), wanted)
    assert not torch.equal(expand(GgufBlocks(kind), interleaved(raw, 3), (24, 256)), wanted), "the order must matter"


def test_biases_of_heads_come_back_in_their_order_and_norms_lose_what_was_added() -> None:
    bias = np.arange(16, dtype=np.float32)
    assert torch.equal(expand(GgufBlocks("F32", 2), interleaved(bias, 2), (16,)), torch.from_numpy(bias))
    norm = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    assert torch.equal(expand(GgufBlocks("F32", added=1), (norm + 1).numpy(), (64,)), norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_vectors_of_blocks_are_those_of_gguf(kind: str, dtype: torch.dtype) -> None:
    """Biases of heads change places number by number, norms lose what was added before they are rounded."""
    raw = stored(kind, (512,))
    number = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]).astype(np.float32).reshape(512))
    in_order = torch.from_numpy(interleaved(np.arange(512), 4)).argsort()
    for coding, wanted in (
        (GgufBlocks(kind), number),
        (GgufBlocks(kind, num_heads=4), number[in_order]),
        (GgufBlocks(kind, added=1), number - 1),
    ):
        assert torch.equal(expand(coding, raw, (512,), dtype), wanted.to(dtype)), coding
    assert not torch.equal(number[in_order], number), "the order must matter"
