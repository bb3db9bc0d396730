"""Lossless coding as a way of storing: what is recognised, what is refused, and how many bytes it takes."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from offload.encoding.exponents import CODE, FORMATS, WORDS, Exponents, Found, best_window, distance_bytes, histogram
from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.expansion import REFERENCE

SHAPE = (130, 9, 70)


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


def weights(num: int) -> np.ndarray:
    return (torch.randn(num, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().view(torch.int16).numpy()


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("format", FORMATS, ids=["weight", "parameter"])
def test_what_was_stored_is_what_is_expanded(format, width: int) -> None:
    bits = torch.from_numpy(weights(math.prod(SHAPE)))
    words = encode_exponents_reference(bits, 121, width)
    fill = torch.zeros(-sum(map(len, words[:3])) % 64, dtype=torch.uint8)
    stored_B = torch.cat((*words[:3], fill))
    told = headers(format.parameter, width=width, escapes=Told("U8", (len(words.escape_3E) + len(fill),)))
    found = format.recognise(told, {})
    assert isinstance(found, Found) and found.shape == SHAPE
    assert found.coding.stored_bytes(SHAPE) == len(stored_B)
    ready = found.coding.prepare({CODE: torch.cat((torch.tensor([121]), words.count_C))}, SHAPE)
    assert sum(tensor.nbytes for tensor in ready.values()) == found.coding.companion_bytes(SHAPE)
    out = torch.empty(SHAPE, dtype=torch.bfloat16)
    found.coding.expand(stored_B, ready, out, REFERENCE)
    assert torch.equal(out.view(torch.int16).view(-1), bits)


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


def test_the_window_is_the_best_one() -> None:
    bits = weights(1 << 16)
    found = best_window(histogram(bits.view(np.uint16)))
    taken = {
        (top, width): 8 * sum(map(len, encode_exponents_reference(torch.from_numpy(bits), top, width)[:3])) / len(bits)
        for top in range(110, 130)
        for width in (3, 4)
    }
    assert found.bits == pytest.approx(taken[found.top, found.width]) == min(taken.values())
    assert found.width == 3, "a bell of one width has few exponents"


def test_wide_exponents_take_four_bits_and_all_of_them_none() -> None:
    assert best_window(np.bincount(np.repeat(np.arange(100, 115), 100), minlength=256))[:2] == (114, 4)
    assert best_window(np.ones(256)).bits > 16
    assert best_window(np.bincount([0], minlength=256))[1] == 3
