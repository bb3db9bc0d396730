"""Codings of GGUF: rows that llama.cpp has put into another order, norms that it has added one to, plain numbers."""

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_files import KINDS, interleaved, random_blocks

from offload.encoding.gguf import BLOCKS, GgufBlocks
from offload.kernels.expansion import REFERENCE


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


def test_biases_of_heads_come_back_in_their_order() -> None:
    bias = np.arange(16, dtype=np.float32)
    assert torch.equal(expand(GgufBlocks("F32", 2), interleaved(bias, 2), (16,)), torch.from_numpy(bias))


def test_what_was_added_is_taken_away() -> None:
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
