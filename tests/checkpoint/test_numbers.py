"""What bits say of numbers, against torch's own idea of them; and a CRC-32 that is zlib's, only faster."""

import zlib

import numpy as np
import pytest
import torch
from gguf_files import random_blocks

from offload.checkpoint.numbers import Form, TensorMaximum, form_of, is_finite, magnitude, remarks, top_bits
from offload.checkpoint.whole import crc32_of_scratch

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}  # fmt: skip
WIDE = [name for name in FLOATS if not name.startswith("F8")]


def the_form(dtype: str) -> Form:
    form = form_of(dtype)
    assert form is not None
    return form


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_is_finite_where_torch_says_so(dtype: str) -> None:
    form = the_form(dtype)
    size = FLOATS[dtype].itemsize
    rng = np.random.default_rng(0)
    patterns = np.arange(1 << 8 * size) if size < 3 else rng.integers(0, 1 << 63, 4000)
    ends = [0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0xFFFF_FFFF] if size == 4 else []
    ends += [0x7FEF << 48 | (1 << 48) - 1, 0x7FF0 << 48, 0xFFF0 << 48] if size == 8 else []
    raw = np.concatenate([patterns.astype(f"<u{size}"), np.array(ends, f"<u{size}")])
    wanted = torch.from_numpy(raw.view(np.uint8)).view(FLOATS[dtype]).double().isfinite().tolist()
    results = [is_finite(top_bits(tensor.view(np.uint8), form), form) for tensor in raw.reshape(-1, 1)]
    assert results == wanted and not all(wanted)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", WIDE)
def test_the_largest_number_is_found_whatever_its_sign(dtype: str, sign: int) -> None:
    form, tensor = the_form(dtype), torch.randn(4099, generator=torch.Generator().manual_seed(1)).to(FLOATS[dtype])
    tensor[1234] = sign * 77
    stored = tensor.view(torch.uint8).numpy()
    assert magnitude(top_bits(stored, form), form) == tensor.double().abs().max().item() == 77
    odd = np.concatenate([[1], stored]).astype(np.uint8)[1:]
    assert top_bits(odd, form) == top_bits(stored, form), "wherever it lies in memory"
    assert top_bits(np.zeros(64, np.uint8), form) == top_bits(stored[:0], form) == 0
    minus = torch.full((5,), -0.0, dtype=FLOATS[dtype]).view(torch.uint8).numpy()
    assert top_bits(minus, form) == 0, "minus zero is zero"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_scales_of_blocks_are_looked_at_and_nothing_else(kind: str) -> None:
    form, block_MB = the_form(kind), random_blocks(kind, 50, np.random.default_rng(0))
    assert is_finite(top_bits(block_MB.ravel(), form), form)
    scales = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(kind, [0])
    for at in scales:
        broken = block_MB.copy()
        broken[31, at : at + 2] = np.array([0xFC00], "<u2").view(np.uint8)
        assert not is_finite(top_bits(broken.ravel(), form), form), f"{kind}: scale at byte {at}"


def top(name: str, number: float, *, matrix: bool = True) -> TensorMaximum:
    bits = int(torch.tensor([number]).view(torch.int32).item())
    return TensorMaximum(name, "a.safetensors", matrix, the_form("F32"), bits)


SOUND = [top("model.layers.0.up.weight", 0.3), top("model.layers.0.input_layernorm.weight", 2.0, matrix=False)]
NORM = top("model.norm.weight", 0.0, matrix=False)
UPS = [top(f"model.layers.{n}.up.weight", 0.0) for n in range(3)]
REMARKS: dict[str, tuple[list[TensorMaximum], bool, list[str]]] = {
    "sound": (SOUND, False, []),
    "zeros": (SOUND + UPS, False, ["all zero: model.layers.0.up.weight in a.safetensors and 2 more"]),
    "zeros that others have, too": (SOUND + UPS, True, []),
    "biases that were never trained": ([*SOUND, top("model.layers.0.o_proj.bias", 0.0, matrix=False)], False, []),
    "and those of norms": ([*SOUND, top("model.layers.0.input_layernorm.bias", 0.0, matrix=False)], False, []),
    "a norm": ([*SOUND, NORM], False, ["all zero: model.norm.weight in a.safetensors"]),
    "norms to which 1 is added may all be zero": ([SOUND[0], NORM], False, []),
    "large": ([*SOUND, top("x", 3e30)], False,
              ["numbers as large as 3.0e+30, as no model has: x in a.safetensors"]),
    "small": ([*SOUND, top("x", 1e-30), top("bias", 1e-30, matrix=False)], False,
              ["no number above 1.0e-30, as in no model: x in a.safetensors"]),
}  # fmt: skip


@pytest.mark.parametrize(("tops", "has_zeros", "lines"), REMARKS.values(), ids=REMARKS)
def test_what_is_odd_is_told_in_a_line_for_each_kind(
    tops: list[TensorMaximum], has_zeros: bool, lines: list[str]
) -> None:
    assert remarks(tops, has_zeros=has_zeros) == lines


FAR = 91_639 * 4
LENGTHS = [0, 1, 5, FAR - 1, FAR, FAR + 1, FAR + 3, FAR + 4, 2 * FAR, 1_000_003, (8 << 20) - 7, 8 << 20]


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_the_number_of_zlib(length: int) -> None:
    raw = np.random.default_rng(length).integers(0, 256, length + 3, dtype=np.uint8)
    for at in (0, 3):
        scratch = raw[at : at + length].copy()
        assert crc32_of_scratch(scratch) == zlib.crc32(raw[at : at + length].data)
    for byte in (0, 255):
        same = np.full(length, byte, np.uint8)
        assert crc32_of_scratch(same.copy()) == zlib.crc32(same.data)
