"""A faster CRC-32 is zlib's own, whatever is summed and however long it is."""

import zlib

import numpy as np
import pytest

from offload.checkpoint.whole import crc32_of_scratch

FAR = 91_639 * 4
LENGTHS = [0, 1, 5, FAR - 1, FAR, FAR + 1, FAR + 3, FAR + 4, 2 * FAR, 1_000_003, (8 << 20) - 7, 8 << 20]


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_the_number_of_zlib(length: int) -> None:
    raw = np.random.default_rng(length).integers(0, 256, length + 3, dtype=np.uint8)
    for at in (0, 3):
        own = raw[at : at + length].copy()
        assert crc32_of_scratch(own) == zlib.crc32(raw[at : at + length].data)
    for byte in (0, 255):
        same = np.full(length, byte, np.uint8)
        assert crc32_of_scratch(same.copy()) == zlib.crc32(same.data)


def test_wherever_in_memory_it_lies_its_neighbours_stay() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 2_000_000, dtype=np.uint8)
    before, found = raw.copy(), crc32_of_scratch(raw[1001:-999])
    assert found == zlib.crc32(before[1001:-999].data)
    assert (raw[:1001] == before[:1001]).all() and (raw[-999:] == before[-999:]).all()
