"""Sums of bytes are those of zlib, with and without a processor's instructions."""

import zlib

import numpy as np
import pytest

from offload.kernels import crc32 as module
from offload.kernels.crc32 import crc32

# around one, two and three blocks, and a part of a file
SIZES = (0, 1, 63, 64, 127, 128, 129, 191, 192, 193, 1_000_003)


@pytest.mark.parametrize("can_fold", [True, False])
def test_any_run_of_bytes_has_the_sum_of_zlib(can_fold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_fold:
        monkeypatch.setattr(module, "can_fold", lambda: False)
    raw = np.random.default_rng(0).integers(0, 256, max(SIZES) + 7, np.uint8)
    kept = raw.copy()
    for size in SIZES:
        for at in (0, 1, 7):
            part = raw[at : at + size]
            for before in (0, 1, 0x1234_5678, 0xFFFF_FFFF):
                assert crc32(part, before) == zlib.crc32(part, before), (size, at, before)
    assert np.array_equal(raw, kept), "bytes were written to"


@pytest.mark.parametrize("value", [0, 255])
def test_equal_bytes_are_told_apart_by_their_number(value: int) -> None:
    sums = [crc32(np.full(size, value, np.uint8)) for size in range(126, 200)]
    assert sums == [zlib.crc32(bytes([value]) * size) for size in range(126, 200)]
    assert len({*sums}) == len(sums)
