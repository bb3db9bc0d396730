"""Parts of large files come back whole, past the page cache or through it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import ReadError
from offload.packing.reading import PartFile, parts_of

RAW = np.random.default_rng(0).integers(0, 256, 50_001, np.uint8)


@contextmanager
def written(folder: Path) -> Iterator[PartFile]:
    path = folder / "weights"
    path.write_bytes(RAW.tobytes())
    with parts_of(path) as file:
        yield file


@pytest.fixture(params=["direct", "cached"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "cached" a file system refuses what bypasses its cache, in the first read as in some of them."""
    read = os.preadv

    def refuse(fd: int, *given: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return read(fd, *given)

    if request.param == "cached":
        monkeypatch.setattr("offload.packing.reading.os.preadv", refuse)


def test_spans_come_back_wherever_they_begin_and_end(tmp_path: Path) -> None:
    spans = [(0, 1), (4095, 4097), (8192, 12_288), (5, 50_001), (50_001, 50_001), (49_999, 50_001), (7, 7)]
    behind = np.arange(5000).astype(np.uint8)
    with written(tmp_path) as file:
        for lo, hi in spans:
            assert np.array_equal(file.copy_of(lo, hi), RAW[lo:hi])
        for part, (lo, hi) in zip(file.read(*spans), spans, strict=True):
            assert np.array_equal(part, RAW[lo:hi])
        for lo, hi in spans:
            first, last = file.read((1, 9), (lo, hi), behind=behind)
            assert np.array_equal(first, RAW[1:9])
            assert np.array_equal(last, np.concatenate((RAW[lo:hi], behind)))


def test_what_is_copied_outlasts_the_next_read(tmp_path: Path) -> None:
    with written(tmp_path) as file:
        kept = file.copy_of(10, 20)
        file.read((30, 40))
        assert np.array_equal(kept, RAW[10:20])


def test_a_file_that_is_cut_short_is_noticed(tmp_path: Path) -> None:
    with written(tmp_path) as file:
        os.truncate(tmp_path / "weights", 9000)
        assert np.array_equal(file.copy_of(8000, 9000), RAW[8000:9000])
        with pytest.raises(ReadError, match="cut short"):
            file.read((8000, 9001))
