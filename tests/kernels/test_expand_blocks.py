"""Blocks of GGUF against gguf's own reading of them, rounded once: every kind, three ways, all types, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_files import random_blocks
from torch import Tensor

from offload.encoding.gguf import BLOCKS
from offload.kernels import expand_blocks
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, EXPANSION_KERNELS, REFERENCE
from offload.kernels.jit import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def blocks(kind: str, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Random ones, with zeros among the scales, and the float32 numbers that they hold."""
    raw_MB = random_blocks(kind, num_blocks, np.random.default_rng(num_blocks))
    raw_MB[0] = 0
    value_MW = quants.dequantize(raw_MB, GGMLQuantizationType[kind])
    return torch.from_numpy(raw_MB).to(DEVICE), torch.from_numpy(value_MW).to(DEVICE)


def is_equal(got: Tensor, wanted: Tensor) -> bool:
    """Signs of zeros included."""
    return torch.equal(got.view(BITS[got.dtype]), wanted.to(got.dtype).view(BITS[got.dtype]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_pieces_meet_where_they_should(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw_MB, value_MW = blocks(kind, 67)
    monkeypatch.setattr(expand_blocks, "_CHUNK_NUMBERS", 8 * value_MW.shape[1])
    out_MW = torch.empty(value_MW.shape, device=DEVICE)
    REFERENCE.blocks(kind, raw_MB, out_MW)
    assert is_equal(out_MW, value_MW)


@pytest.mark.parametrize("num_blocks", [1, 67])
@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_those_of_gguf(kind: str, num_blocks: int) -> None:
    raw_MB, value_MW = blocks(kind, num_blocks)
    ways = [
        REFERENCE,
        *([COMPILED] if HAS_NUMBA and DEVICE == "cpu" else []),
        *([EXPANSION_KERNELS] if HAS_TRITON else []),
    ]
    for way in ways:
        for dtype in BITS:
            if way is EXPANSION_KERNELS and dtype == torch.bfloat16 and DEVICE == "cpu":
                continue  # the interpreter cuts where it should round
            out_MW = torch.full(value_MW.shape, torch.nan, dtype=dtype, device=DEVICE)
            way.blocks(kind, raw_MB, out_MW)
            assert is_equal(out_MW, value_MW), (way, dtype)


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_byte_of_a_block_matters(kind: str) -> None:
    """Or the comparison would not see a byte that is left out."""
    raw_MB, value_MW = blocks(kind, 3)
    for place in range(raw_MB.shape[1]):
        changed_MB, out_MW = raw_MB.clone(), torch.empty_like(value_MW)
        changed_MB[2, place] ^= 0x11
        REFERENCE.blocks(kind, changed_MB, out_MW)
        assert not is_equal(out_MW[2], value_MW[2]), f"byte {place}"


@pytest.mark.skipif(not HAS_NUMBA or DEVICE != "cpu", reason="needs numba")
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_a_scale_that_is_no_number_leaves_none(dtype: torch.dtype) -> None:
    """Whatever its bits: rounded to bfloat16, those of 0x7FFF would carry into the sign."""
    half_M = torch.tensor([0x7C01, 0x7E00, 0x7FFF, -1, -512]).short().view(torch.uint8).view(-1, 2)
    raw_MB = torch.cat([half_M, torch.full((len(half_M), 32), 3, dtype=torch.uint8)], 1)
    out_MW = torch.zeros(len(half_M), 32, dtype=dtype)
    COMPILED.blocks("Q8_0", raw_MB, out_MW)
    assert bool(out_MW.isnan().all())


def test_sizes_are_those_of_gguf() -> None:
    assert {kind: gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in BLOCKS} == BLOCKS


@pytest.mark.skipif(not HAS_NUMBA or DEVICE != "cpu", reason="needs numba")
def test_threads_share_the_blocks() -> None:
    raw_MB, value_MW = blocks("Q4_K", 1000)
    torch.set_num_threads(3)
    out_MW = torch.empty_like(value_MW)
    COMPILED.blocks("Q4_K", raw_MB, out_MW)
    assert is_equal(out_MW, value_MW)
