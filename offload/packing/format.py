"""One file of a packed model: safetensors whose 16-bit tensors are coded without loss.

The coding is that of `encoding/exponents.py`. A file holds consecutive tensors of one source file,
in its order; the `.code` tensors, which stay in memory, lie behind all others, so that a layer is
one run. `__metadata__` names the format and the source and holds a CRC-32 of every 8 MiB of the
original bytes; the first file for each source file also holds that file's header, so that `offload
unpack` restores the same bytes. Tensors are written part by part, several at once. Invariant: a
file gets its name once it was read back, decoded, and found to be what was packed.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.download import is_shard_name
from offload.checkpoint.files import (
    PART_BYTES,
    in_order,
    opened,
    parts,
    replacing,
    write_part,
)
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.safetensors import header_bytes, in_file_order, parse_header, read_header
from offload.checkpoint.tensors import TensorEntry, with_codings
from offload.checkpoint.whole import crc32_of_scratch
from offload.encoding.base import STORED
from offload.encoding.exponents import (
    ALIGN_BYTES,
    CODE,
    DAMAGED,
    MANTISSAS,
    WORDS,
    ExponentWindow,
    distance_bytes,
)
from offload.errors import UserError
from offload.kernels.encode_exponents import ExponentWords, encode_exponents
from offload.packing import beside
from offload.packing.folders import FORMAT, VERSION
from offload.packing.forecast import by_expert, stack_of
from offload.packing.reading import PartFile, Rooms, parts_of
from offload.packing.words import Part, decoded_parts, read_tensor

# name endings of the tensors that store one weight; the longest first, as some end alike
_SUFFIXES = (*beside.SUFFIXES, *WORDS, CODE)
OnBytes = Callable[[int], None]
_Decoded = TypeVar("_Decoded")

_ABOUT = "16 bits without loss: X.mantissas, X.exponents, X.escapes and X.code are one tensor; see offload unpack"
_KEPT_TYPES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.int64: "I64"}
# parts that are read while as many as there are cores are computed
_NUM_READING = 2
_LARGEST = 10**15  # an offset with the most digits that one can have


class Origin(NamedTuple):
    """The part of a source file that a packed file holds."""

    file: str
    num_bytes: int
    written_ns: int
    portion: int
    num_portions: int


class PackedFile(NamedTuple):
    """A packed file whose header was read."""

    path: Path
    origin: Origin
    header: bytes
    tensors: Mapping[str, TensorEntry]  # by the source's names, in their order
    sums: Mapping[str, tuple[int, ...]]  # CRC-32 of each original part


def read_packed(path: Path) -> PackedFile:
    """Read a file's header. Raises `UserError` where it is not packed, or by another version."""
    header = read_header(path)
    notes = header.metadata
    if notes.get("format") != FORMAT or notes.get("version") != VERSION:
        version = f"{notes.get('format', 'nothing')} {notes.get('version', '')}".strip()
        requirement = f"{path}: its header must name {FORMAT} {VERSION}"
        raise UserError(f"{requirement}, it names {version:.80}: pack the model again")
    stored = header.tensors.items()
    words = {name: entry for name, entry in stored if name.endswith(_SUFFIXES)}
    plain = {name: entry for name, entry in stored if name not in words}
    tensors = dict(in_file_order({**plain, **with_codings(str(path), {}, words)}))
    try:
        sums = {name: _numbers(text) for name, text in json.loads(notes["crc32"]).items()}
        origin = _origin(notes["origin"])
        source_header = notes.get("source_header", "").encode()
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        complaint = f"{path}: its header lacks what unpacking needs ({error})"
        raise UserError(f"{complaint}: {DAMAGED}") from None
    if sums.keys() != tensors.keys():
        raise UserError(f"{path}: its header has checksums of other tensors: {DAMAGED}")
    return PackedFile(path, origin, source_header, tensors, sums)


def source_name(stored: str) -> str:
    """Return the source's name of the tensor that one of a packed file is part of."""
    suffix = next((ending for ending in _SUFFIXES if stored.endswith(ending)), "")
    return stack_of(stored.removesuffix(suffix))


def original_parts(packed: PackedFile) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield name, offset and bytes of original parts. Raises `UserError` for a false sum."""

    def whole(part: Part) -> tuple[int, np.ndarray]:
        raw = np.empty(part.num_bytes, np.uint8)
        part.fill(raw)
        return zlib.crc32(raw.data), raw

    yield from _compared(packed, whole)


def proved_bytes(packed: PackedFile) -> Iterator[int]:
    """Decode all parts, and yield the bytes of each. Raises `UserError` for a false sum."""
    rooms = Rooms()

    def size(part: Part) -> tuple[int, int]:
        raw = rooms.take(part.num_bytes)[: part.num_bytes]
        part.fill(raw)
        return crc32_of_scratch(raw), part.num_bytes

    for _, _, num_bytes in _compared(packed, size):
        yield num_bytes


def _compared(
    packed: PackedFile, decode: Callable[[Part], tuple[int, _Decoded]]
) -> Iterator[tuple[str, int, _Decoded]]:
    """Yield name, offset and what `decode` makes of each part. Raises `UserError` for a false sum.

    `decode` returns the sum of a part's original bytes as well.
    """
    with parts_of(packed.path) as file:

        def jobs() -> Iterator[tuple[str, int, int, Part]]:
            for name, entry in packed.tensors.items():
                at = 0
                for index, part in enumerate(_parts_of(f"{packed.path}: {name}", entry, file)):
                    yield name, at, index, part
                    at += part.num_bytes

        def work(name: str, lo: int, index: int, part: Part) -> tuple[str, int, _Decoded]:
            own_sum, decoded = decode(part)
            if [own_sum] != [*packed.sums[name][index : index + 1]]:
                complaint = f"{packed.path}: {name} does not decode to what was packed"
                raise UserError(f"{complaint}: {DAMAGED}")
            return name, lo, decoded

        yield from in_order(work, jobs(), _NUM_READING)


def write_original(path: Path, packed: Iterable[PackedFile], on_bytes: OnBytes) -> None:
    """Restore the source that these files, in order, are of. Raises `OSError` and `UserError`."""
    first, *others = packed
    entries, _ = parse_header(path, first.header, first.origin.num_bytes)
    names = {name for file in (first, *others) for name in file.tensors}
    # stacks came whole from earlier versions
    entries = entries if names == {*entries} else by_expert(entries)
    missing = {*entries} ^ names
    if missing:
        complaint = f"{min(missing)} is in its header or in its packed files, not in both"
        raise UserError(f"{path.name}: {complaint}: {DAMAGED}")
    with replacing(path) as scratch, opened(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as out:
        write_part(out, len(first.header).to_bytes(8, "little") + first.header, 0)
        os.ftruncate(out, first.origin.num_bytes)
        for file in (first, *others):
            for name, at, raw in original_parts(file):
                write_part(out, raw[: max(0, entries[name].num_bytes - at)], entries[name].lo + at)
                on_bytes(len(raw))
        os.fsync(out)


def _parts_of(where: str, entry: TensorEntry, file: PartFile) -> Iterator[Part]:
    """Yield the parts of a tensor. Raises `UserError` where it cannot be decoded."""
    if entry.coded is None:
        return _plain_parts(entry, file)
    companions = [read_tensor(file, companion) for _, companion in entry.companions]
    decode = beside.decoded_parts if beside.is_residual(entry) else decoded_parts
    return decode(where, entry, companions, file)


def _plain_parts(entry: TensorEntry, file: PartFile) -> Iterator[Part]:
    """Yield the parts of a tensor that is stored as it was."""

    def fill(lo: int, hi: int, out: np.ndarray) -> None:
        (out[:],) = file.read((lo, hi))

    yield from (Part(hi - lo, partial(fill, lo, hi)) for lo, hi in parts(entry.lo, entry.hi))


def _origin(text: str) -> Origin:
    origin = Origin(**json.loads(text))
    is_sound = is_shard_name(origin.file) and all(type(number) is int for number in origin[1:])
    if not is_sound or not 0 <= origin.portion < origin.num_portions:
        raise ValueError(f"its origin is {text[:120]!r}")
    return origin


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))


class Portion(NamedTuple):
    """The content of one packed file."""

    path: Path  # of the source
    origin: Origin
    header: bytes  # of the source, in its first portion
    tensors: Mapping[str, TensorEntry]  # in their order
    windows: Mapping[str, ExponentWindow]  # of the tensors whose exponents are to be coded
    copied: frozenset[str] = frozenset()  # the matrices that get a copy of 4 bits

    def part_bytes(self, name: str) -> int:
        """Return the source's bytes of each part of a tensor but the last."""
        shape = self.tensors[name].shape
        return beside.part_bytes(shape) if name in self.copied else PART_BYTES

    def suffixes(self, name: str) -> tuple[str, ...]:
        """Return the suffixes of the tensors that may stand for one."""
        if name in self.copied:
            return beside.SUFFIXES
        return ("", *WORDS, CODE) if name in self.windows else ("",)


def write_packed(path: Path, portion: Portion, on_bytes: OnBytes, turn: Lock) -> None:
    """Pack, read back, compare, name the file; parts are told twice. Raises `OSError`.

    Of several files that are packed at once only the one that has its turn is coded: meanwhile
    the disk takes in the one before, which is then read back.
    """
    with replacing(path) as scratch:
        with (
            parts_of(portion.path) as source,
            opened(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as out,
        ):
            with turn:
                _Writing(out, source, portion).write(on_bytes)
            os.fsync(out)
            # what is read back shall come from the disk
            os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
        for num_bytes in proved_bytes(read_packed(scratch)):
            on_bytes(num_bytes)


class _Writing:
    """A packed file under way: data first, then the header into the room left for it."""

    def __init__(self, out: int, source: PartFile, portion: Portion) -> None:
        self._out = out
        self._source = source
        self._portion = portion
        self._entries = dict[str, TensorEntry]()
        self._kept = dict[str, Tensor]()  # what stays in memory, by name
        self._sums = dict[str, list[int]]()
        self._data_lo = _header_room(portion)
        self._end = 0  # of the data

    def write(self, on_bytes: OnBytes) -> None:
        """Write all tensors in order, coded where that pays, then the companions that stay."""
        tensors = self._portion.tensors
        windows = self._portion.windows
        copied = self._portion.copied
        size_of = self._portion.part_bytes
        jobs = (
            (entry, *part, name if name in copied else windows.get(name))
            for name, entry in tensors.items()
            for part in parts(entry.lo, entry.hi, size_of(name))
        )
        done = in_order(self._encode_part, jobs, _NUM_READING)
        for name, entry in tensors.items():
            coded = _counting_bytes(islice(done, -(-entry.num_bytes // size_of(name))), on_bytes)
            if name in copied:
                self._add_beside(name, entry, coded)
            elif name not in windows:
                self._add_plain(name, entry, coded)
            # its samples promised a smaller tensor
            elif not self._add_coded(name, entry, windows[name], coded):
                again = (self._encode_part(entry, *part) for part in parts(entry.lo, entry.hi))
                self._add_plain(name, entry, again)
        # the widest numbers first, so that all are aligned
        for name, tensor in sorted(self._kept.items(), key=lambda item: -item[1].itemsize):
            start = self._end
            self._end += tensor.nbytes
            write_part(self._out, tensor.view(torch.uint8).numpy(), self._data_lo + start)
            dtype = _KEPT_TYPES[tensor.dtype]
            self._entries[name] = TensorEntry(0, dtype, tuple(tensor.shape), start, self._end)
        header = _header(self._portion, self._entries, self._sums, self._data_lo)
        write_part(self._out, header, 0)
        os.ftruncate(self._out, self._data_lo + self._end)

    def _encode_part(
        self, entry: TensorEntry, lo: int, hi: int, way: ExponentWindow | str | None = None
    ) -> tuple[ExponentWords | beside.BesideWords | np.ndarray, int, int]:
        """Return a part of the source, coded or not, its checksum, and its number of bytes."""
        if way is None:
            raw = self._source.copy_of(lo, hi)
            return raw, zlib.crc32(raw.data), len(raw)
        (raw,) = self._source.read((lo, hi))
        # numbers that do not lie as processors load them
        even = raw if lo % 2 == 0 else raw.copy()
        weight_N = torch.from_numpy(even).view(getattr(torch, STORED[entry.dtype].dtype))
        words: ExponentWords | beside.BesideWords
        if isinstance(way, str):
            words = beside.encode_beside(weight_N.view(-1, entry.shape[1]))
        else:
            words = encode_exponents(weight_N, way.top, way.width)
        return words, crc32_of_scratch(even), len(even)

    def _add_plain(self, name: str, entry: TensorEntry, taken: Iterable[Any]) -> None:
        lo = self._end
        sums = self._sums.setdefault(name, [])
        sums.clear()
        for raw, own_sum, num_bytes in taken:
            write_part(self._out, raw, self._data_lo + self._end)
            sums.append(own_sum)
            self._end += num_bytes
        self._entries[name] = entry._replace(shard=0, lo=lo, hi=self._end)

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
            distances_lo = lo + num_weights + distance_bytes(done, window.width)
            write_part(self._out, words.distance_B.numpy(), distances_lo)
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
        shapes = (entry.shape, (sizes[1],), (sizes[2] + fill_bytes,))
        for suffix, dtype, shape in zip(WORDS, types, shapes, strict=True):
            start = self._end
            self._end = self._end + math.prod(shape)
            self._entries[name + suffix] = TensorEntry(0, dtype, shape, start, self._end)
        padded = torch.nn.functional.pad(escapes, (0, fill_bytes))
        write_part(self._out, padded.numpy(), self._data_lo + start)
        self._kept[name + CODE] = torch.tensor(counts)
        return True

    def _add_beside(self, name: str, entry: TensorEntry, taken: Iterable[Any]) -> None:
        """Write a matrix without its copy, which is kept."""
        kept = beside.BesideParts()
        start = self._end
        sums = self._sums.setdefault(name, [])
        for words, own_sum, _ in taken:
            low = kept.add(words)
            write_part(self._out, low, self._data_lo + self._end)
            self._end += low.nbytes
            sums.append(own_sum)
        low_suffix, *suffixes = beside.WORDS
        self._entries[name + low_suffix] = TensorEntry(0, "U8", entry.shape, start, self._end)
        for suffix, own_B in zip(suffixes, kept.symbols(self._end), strict=True):
            start = self._end
            self._end += len(own_B)
            write_part(self._out, own_B.numpy(), self._data_lo + start)
            self._entries[name + suffix] = TensorEntry(0, "U8", (len(own_B),), start, self._end)
        for suffix, tensor in zip(beside.COMPANIONS, kept.companions(), strict=True):
            self._kept[name + suffix] = tensor


def _counting_bytes(taken: Iterable[Any], on_bytes: OnBytes) -> Iterator[Any]:
    for part in taken:
        yield part
        on_bytes(part[2])


def _header(
    portion: Portion,
    entries: Mapping[str, TensorEntry],
    sums: Mapping[str, list[int]],
    align_bytes: int,
) -> bytes:
    """Return a packed file's header with its origin, its checksums and the source's header."""
    notes = {
        "format": FORMAT, "version": VERSION, "about": _ABOUT, "origin": json.dumps(portion.origin._asdict()),
        "crc32": json.dumps({name: "".join(f"{crc:08x}" for crc in crcs) for name, crcs in sums.items()}),
        "source_header": portion.header.decode(),
    }  # fmt: skip
    return header_bytes(entries, notes, align_bytes)


def _header_room(portion: Portion) -> int:
    """Return the bytes before the data: room for the longest header, in whole blocks."""
    entries = dict[str, TensorEntry]()
    sums = dict[str, list[int]]()
    for name, entry in portion.tensors.items():
        for suffix in portion.suffixes(name):
            shape = (*entry.shape, _LARGEST)
            entries[name + suffix] = TensorEntry(0, "F8_E4M3", shape, _LARGEST, _LARGEST)
        sums[name] = [0] * -(-entry.num_bytes // portion.part_bytes(name))
    return len(_header(portion, entries, sums, BLOCK_BYTES))
