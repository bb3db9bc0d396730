"""Write one file of a packed model in the format of `packing/format.py`.

Its tensors are taken part by part, several at once. Invariant: a file gets its name once it was
read back, decoded, and found to be what was packed.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.checkpoint.files import (
    PART_BYTES,
    in_order,
    opened,
    parts,
    read_part,
    replacing,
    write_part,
)
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import STORED
from offload.encoding.exponents import (
    ALIGN_BYTES,
    CODE,
    MANTISSAS,
    WORDS,
    ExponentWindow,
    distance_bytes,
)
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.encode_exponents import (
    ExponentWords,
    encode_exponents_compiled,
    encode_exponents_reference,
)
from offload.kernels.exponents_layout import BLOCK, RUN
from offload.packing.folders import FORMAT, VERSION
from offload.packing.format import OnBytes, Origin, original_parts, read_packed

_ABOUT = "16 bits without loss: X.mantissas, X.exponents, X.escapes and X.code are one tensor; see offload unpack"
_LARGEST = 10**15  # an offset with the most digits that one can have


class Portion(NamedTuple):
    """The content of one packed file."""

    path: Path  # of the source
    origin: Origin
    header: bytes  # of the source, in its first portion
    tensors: Mapping[str, TensorEntry]  # in their order
    windows: Mapping[str, ExponentWindow]  # of the tensors that are to be coded


def write_packed(path: Path, portion: Portion, on_bytes: OnBytes) -> None:
    """Pack, read back and compare, then give the file its name. Raises `OSError`.

    `on_bytes` hears of each part of the source twice: once coded, once compared.
    """
    with replacing(path) as scratch:
        with (
            opened(portion.path, os.O_RDONLY) as source,
            opened(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as out,
        ):
            _Writing(out, source, portion).write(on_bytes)
        for _, _, raw in original_parts(read_packed(scratch)):
            on_bytes(len(raw))


class _Writing:
    """A packed file under way: data first, then the header into the room left for it."""

    def __init__(self, out: int, source: int, portion: Portion) -> None:
        self._out = out
        self._source = source
        self._portion = portion
        self._places = dict[str, tuple[str, list[int], int, int]]()
        self._codes = dict[str, np.ndarray]()
        self._sums = dict[str, list[int]]()
        self._data_lo = _header_room(portion)
        self._end = 0  # of the data

    def write(self, on_bytes: OnBytes) -> None:
        tensors = self._portion.tensors
        windows = self._portion.windows
        jobs = (
            (own, *part, windows.get(name))
            for name, own in tensors.items()
            for part in parts(own.lo, own.hi)
        )
        done = in_order(self._taken, jobs)
        for name, entry in tensors.items():
            own = self._counted(islice(done, -(-entry.num_bytes // PART_BYTES)), on_bytes)
            if name not in windows:
                self._add_plain(name, entry, own)
            # its samples promised a smaller tensor
            elif not self._add_coded(name, entry, windows[name], own):
                self._add_plain(
                    name, entry, (self._taken(entry, *part) for part in parts(entry.lo, entry.hi))
                )
        for name, code in self._codes.items():
            self._put(name + CODE, "I64", [len(code)], code)
        header = _header(self._portion, self._places, self._sums)
        text = header + b" " * (self._data_lo - 8 - len(header))
        write_part(self._out, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._out, self._data_lo + self._end)
        os.fsync(self._out)
        # what is read back shall come from the disk
        os.posix_fadvise(self._out, 0, 0, os.POSIX_FADV_DONTNEED)

    def _taken(
        self, entry: TensorEntry, lo: int, hi: int, window: ExponentWindow | None = None
    ) -> tuple[ExponentWords | bytearray, int, int]:
        """Return a part of the source, coded or not, its checksum, and its number of bytes."""
        raw = read_part(self._source, lo, hi)
        if window is None:
            return raw, zlib.crc32(raw), len(raw)
        encode = encode_exponents_compiled if HAS_NUMBA else encode_exponents_reference
        weight_N = torch.frombuffer(raw, dtype=getattr(torch, STORED[entry.dtype].dtype))
        words = encode(weight_N, window.top, window.width)
        return words, zlib.crc32(raw), len(raw)

    def _counted(self, taken: Iterable[Any], on_bytes: OnBytes) -> Iterator[Any]:
        for one in taken:
            yield one
            on_bytes(one[2])

    def _add_plain(self, name: str, entry: TensorEntry, taken: Iterable[Any]) -> None:
        lo = self._end
        sums = self._sums.setdefault(name, [])
        sums.clear()
        for raw, own_sum, num_bytes in taken:
            write_part(self._out, raw, self._data_lo + self._end)
            sums.append(own_sum)
            self._end += num_bytes
        self._places[name] = (entry.dtype, [*entry.shape], lo, self._end)

    def _add_coded(
        self, name: str, entry: TensorEntry, window: ExponentWindow, taken: Iterable[Any]
    ) -> bool:
        """Write a coded tensor; return False, without a trace, where it is no smaller."""
        num_weights = math.prod(entry.shape)
        done = 0
        lists = [torch.empty(3, 0, dtype=torch.uint8)]
        counts = [window.top]
        lo = self._data_lo + self._end
        sums = self._sums.setdefault(name, [])
        for words, own_sum, num_bytes in taken:
            write_part(self._out, words.mantissa_N.numpy(), lo + done)
            write_part(
                self._out,
                words.distance_B.numpy(),
                lo + num_weights + done // BLOCK * RUN * window.width,
            )
            lists.append(words.escape_3E.view(3, -1))
            counts += words.count_C.tolist()
            sums.append(own_sum)
            done += num_bytes // 2
        escapes = torch.cat(lists, 1).flatten()
        sizes = (num_weights, distance_bytes(num_weights, window.width), len(escapes))
        fill_bytes = -(self._end + sum(sizes)) % ALIGN_BYTES
        if sum(sizes) + fill_bytes + 8 * len(counts) >= entry.num_bytes:
            return False
        types = (MANTISSAS[entry.dtype], "U8", "U8")
        shapes = ([*entry.shape], [sizes[1]], [sizes[2] + fill_bytes])
        for suffix, dtype, shape in zip(WORDS, types, shapes, strict=True):
            start = self._end
            self._end = self._end + math.prod(shape)
            self._places[name + suffix] = (dtype, shape, start, self._end)
        write_part(
            self._out,
            torch.nn.functional.pad(escapes, (0, fill_bytes)).numpy(),
            self._data_lo + start,
        )
        self._codes[name] = np.array(counts, np.int64)
        return True

    def _put(self, name: str, dtype: str, shape: list[int], data: np.ndarray) -> None:
        start = self._end
        self._end = self._end + data.nbytes
        write_part(self._out, data, self._data_lo + start)
        self._places[name] = (dtype, shape, start, self._end)


def _header(
    portion: Portion,
    places: Mapping[str, tuple[str, list[int], int, int]],
    sums: Mapping[str, list[int]],
) -> bytes:
    notes = {
        "format": FORMAT, "version": VERSION, "about": _ABOUT, "origin": json.dumps(portion.origin._asdict()),
        "crc32": json.dumps({name: "".join(f"{one:08x}" for one in own) for name, own in sums.items()}),
        "source_header": portion.header.decode(),
    }  # fmt: skip
    tensors = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [lo, hi]}
        for name, (dtype, shape, lo, hi) in places.items()
    }
    return json.dumps({"__metadata__": notes, **tensors}).encode()


def _header_room(portion: Portion) -> int:
    """Return the bytes before the data: room for the longest header, in whole blocks."""
    places = dict[str, tuple[str, list[int], int, int]]()
    sums = dict[str, list[int]]()
    for name, entry in portion.tensors.items():
        for suffix in ("", *WORDS, CODE) if name in portion.windows else ("",):
            places[name + suffix] = ("F8_E4M3", [*entry.shape, _LARGEST], _LARGEST, _LARGEST)
        sums[name] = [0] * -(-entry.num_bytes // PART_BYTES)
    return -(-(8 + len(_header(portion, places, sums))) // BLOCK_BYTES) * BLOCK_BYTES
