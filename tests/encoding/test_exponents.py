"""Lossless coding as a way of storing: what is recognised, what is refused, and how many bytes it takes."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

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
from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.expansion import REFERENCE

SHAPE = (130, 9, 70)
TYPES = {"BF16": (torch.bfloat16, 121), "F16": (torch.float16, 9)}  # and a usual top


class Told(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def headers(stem: str = ".weight", *, width: int = 4, **changed: Told | None) -> dict[str, Told]:
    told = [
        Told("U8", SHAPE),
        Told("U8", (distance_bytes(math.prod(SHAPE), width),)),
        Told("U8", (64,)),
        Told("I64", (3,)),
    ]
    named = {name.removeprefix("."): one for name, one in zip((*WORDS, CODE), told, strict=True)} | changed
    return {f"{stem}.{name}": one for name, one in named.items() if one is not None}


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
    told = headers(format.parameter, width=width, **sizes)
    found = format.recognise(told, {})
    assert isinstance(found, RecognisedWeight) and found.shape == SHAPE
    assert found.coding.stored_bytes(SHAPE) == len(stored_B)
    ready = found.coding.prepare({CODE: torch.cat((torch.tensor([top]), words.count_C))}, SHAPE)
    assert sum(tensor.nbytes for tensor in ready.values()) == found.coding.companion_bytes(SHAPE)
    out = torch.empty(SHAPE, dtype=getattr(torch, found.coding.dtype))
    found.coding.expand(stored_B, ready, out, REFERENCE)
    assert out.dtype == dtype and torch.equal(out.view(-1).view(torch.int16), weight_N.view(torch.int16))


def test_tensors_of_other_formats_are_left_alone() -> None:
    assert FORMATS[0].recognise({".weight": Told("BF16", SHAPE)}, {}) is None
    assert FORMATS[1].recognise(headers(".weight"), {}) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"code": None}, "without .weight.code"),
        ({"mantissas": None, "escapes": None}, "without .weight.mantissas, .weight.escapes"),
        ({"exponents": Told("U8", (7,))}, "7 bytes of exponents"),
        ({"mantissas": Told("BF16", SHAPE)}, "another version"),
        ({"code": Told("I32", (3,))}, "another version"),
    ],
)
def test_incomplete_weights_are_refused(changed: dict[str, Told | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FORMATS[0].recognise(headers(**changed), {})


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
    found = best_window(counts(weight_N, source))
    taken = {
        (top, width): 8 * sum(map(len, encode_exponents_reference(weight_N, top, width)[:3])) / len(weight_N)
        for top in range(usual - 9, usual + 9)
        for width in (3, 4)
    }
    assert found.bits == pytest.approx(taken[found.top, found.width]) == min(taken.values())
    assert found.width == 3, "a bell of one width has few exponents"


def test_wide_exponents_take_four_bits_and_all_of_them_none() -> None:
    assert best_window(np.bincount(np.repeat(np.arange(100, 115), 100), minlength=256))[:2] == (114, 4)
    assert best_window(np.ones(256)).bits > 16
    assert best_window(np.bincount([0], minlength=256))[1] == 3


@pytest.mark.parametrize("scale", [0.002, 0.01, 0.02, 0.1])
@pytest.mark.parametrize("freedom", [3, 100], ids=["heavy tails", "a bell"])
def test_float16_takes_twelve_bits_only_where_it_was_bfloat16(freedom: int, scale: float) -> None:
    """Of the small ones some are subnormal as float16: these are escapes."""
    drawn_N = torch.from_numpy(np.random.default_rng(0).standard_t(freedom, 1 << 18) * scale)
    assert best_window(counts(drawn_N.bfloat16().half(), "F16")).bits < 12.3
    assert best_window(counts(drawn_N.half(), "F16")).bits > 16
