"""Encodings: what they say a tensor takes is what safetensors writes, and decoding gives its numbers back."""

import pytest
import torch
from safetensors.torch import save_file

from offload.checkpoint.safetensors import read_header
from offload.encoding.base import ENCODINGS, PLAIN_OF, Encoding

SHAPES = [(3, 5), (7,), (), (2, 0, 3)]


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stored_bytes_are_those_of_the_file(encoding: Encoding, shape: tuple[int, ...], tmp_path) -> None:  # type: ignore[no-untyped-def]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, encoding.dtype))
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")[0]["x"]
    assert entry.dtype == encoding.name and entry.hi - entry.lo == encoding.stored_bytes(shape)
    stored_B = torch.frombuffer(
        bytearray((tmp_path / "x.safetensors").read_bytes()[entry.lo :] or b"\0"), dtype=torch.uint8
    )
    decoded = encoding.decode(stored_B[: encoding.stored_bytes(shape)], shape)
    assert decoded.dtype == tensor.dtype and torch.equal(decoded, tensor)


def test_decoding_copies_nothing() -> None:
    stored_B = torch.zeros(24, dtype=torch.uint8)
    assert ENCODINGS["BF16"].decode(stored_B, (3, 4)).data_ptr() == stored_B.data_ptr()


def test_both_tables_hold_the_same() -> None:
    assert {one.dtype: one for one in ENCODINGS.values()} == dict(PLAIN_OF)
