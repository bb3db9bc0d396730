"""One file of a packed model: safetensors whose 16-bit tensors are coded without loss.

The coding is that of `encoding/exponents.py`. A file holds consecutive tensors of one source file,
in its order; the `.code` tensors, which stay in memory, lie behind all others, so that a layer is
one run. `__metadata__` names the format and the source and holds a CRC-32 of every 8 MiB of the
original bytes; the first file for each source file also holds that file's header, so that `offload
unpack` restores the same bytes. Invariant: a file gets its name once it was read back, decoded, and
found to be what was packed.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.files import (
    PART_BYTES,
    in_order,
    opened,
    parts,
    read_part,
    replacing,
    write_part,
)
from offload.checkpoint.numbers import NOT_FINITE, form_of, is_finite, top_bits
from offload.checkpoint.safetensors import parse_header, read_header, read_metadata
from offload.checkpoint.tensors import TensorEntry
from offload.checkpoint.whole import Damage
from offload.encoding.exponents import CODE, DAMAGED, ESCAPE_BYTES, WORDS, Exponents, width_of
from offload.errors import ReadError, UserError
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expand_exponents import (
    TYPE_OF,
    expand_exponents_compiled,
    expand_exponents_reference,
)
from offload.kernels.exponents_layout import BLOCK, CHUNK, RUN
from offload.packing.folders import FORMAT, VERSION, is_plain_name
from offload.packing.forecast import by_expert

_PART_CHUNKS = PART_BYTES // 2 // CHUNK
OnBytes = Callable[[int], None]


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
    plain: Mapping[str, TensorEntry]
    coded: Mapping[str, tuple[TensorEntry, ...]]  # words and code
    sums: Mapping[str, tuple[int, ...]]  # CRC-32 of each original part

    @property
    def names(self) -> list[str]:
        """Return the source's names of all tensors, in their order."""
        starts = {
            **{name: own.lo for name, own in self.plain.items()},
            **{n: own[0].lo for n, own in self.coded.items()},
        }
        return sorted(starts, key=starts.__getitem__)


def read_packed(path: Path) -> PackedFile:
    """Read a file's header.

    Raises `UserError` where the file is not packed, or by another version.
    """
    notes = read_metadata(path)
    if notes.get("format") != FORMAT or notes.get("version") != VERSION:
        found = f"{notes.get('format', 'nothing')} {notes.get('version', '')}".strip()
        raise UserError(
            f"{path}: its header must name {FORMAT} {VERSION}, it names {found:.80}: pack the model again"
        )
    entries, _ = read_header(path)
    coded = {name.removesuffix(CODE): () for name in entries if name.endswith(CODE)}
    try:
        own = {
            name: tuple(entries.pop(name + suffix) for suffix in (*WORDS, CODE)) for name in coded
        }
        sums = {name: _numbers(text) for name, text in json.loads(notes["crc32"]).items()}
        origin = _origin(notes["origin"])
        header = notes.get("source_header", "").encode()
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: its header lacks what unpacking needs ({error}): {DAMAGED}"
        ) from None
    if sums.keys() != {*entries, *own}:
        raise UserError(f"{path}: its header has checksums of other tensors: {DAMAGED}")
    return PackedFile(path, origin, header, entries, own, sums)


def original_parts(packed: PackedFile) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield name, offset and original bytes of each part of each tensor, checksums compared.

    Raises `UserError` where a checksum differs.
    """
    with opened(packed.path, os.O_RDONLY) as fd:

        def jobs() -> Iterator[tuple[Any, ...]]:
            for name in packed.names:
                yield from (
                    _plain_jobs(packed, name)
                    if name in packed.plain
                    else _coded_jobs(packed, name, fd)
                )

        def work(
            name: str, index: int, take: Callable[[int], np.ndarray]
        ) -> tuple[str, int, np.ndarray]:
            raw = take(fd)
            if [zlib.crc32(raw.data)] != [*packed.sums[name][index : index + 1]]:
                raise UserError(
                    f"{packed.path}: {name} does not decode to what was packed: {DAMAGED}"
                )
            return name, index * PART_BYTES, raw

        yield from in_order(work, jobs())


def write_original(path: Path, packed: Iterable[PackedFile], on_bytes: OnBytes) -> None:
    """Restore the source file that these files, in order, were made from.

    Raises `OSError` and `UserError`.
    """
    first, *others = packed
    entries = parse_header(path, first.header, first.origin.num_bytes)
    names = {name for one in (first, *others) for name in one.names}
    # stacks came whole from earlier versions
    entries = entries if names == {*entries} else by_expert(entries)
    missing = {*entries} ^ names
    if missing:
        raise UserError(
            f"{path.name}: {min(missing)} is in its header or in its packed files, not in both: {DAMAGED}"
        )
    with replacing(path) as scratch, opened(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as out:
        write_part(out, len(first.header).to_bytes(8, "little") + first.header, 0)
        os.ftruncate(out, first.origin.num_bytes)
        for one in (first, *others):
            for name, at, raw in original_parts(one):
                write_part(out, raw[: max(0, entries[name].num_bytes - at)], entries[name].lo + at)
                on_bytes(len(raw))
        os.fsync(out)


def undecoded(path: Path) -> list[Damage]:
    """Return the tensors of a packed file that do not decode to the original finite numbers."""
    try:
        packed = read_packed(path)
    except UserError as error:
        return [Damage(path.name, "", str(error).removeprefix(f"{path}: "))]
    try:
        return _endless(packed)
    # the error names the first damaged tensor only
    except (UserError, ReadError):
        return [one for name in packed.names for one in _damage_of(packed, name)]


def _damage_of(packed: PackedFile, name: str) -> list[Damage]:
    plain = {own: entry for own, entry in packed.plain.items() if own == name}
    coded = {own: entries for own, entries in packed.coded.items() if own == name}
    try:
        return _endless(packed._replace(plain=plain, coded=coded))
    except (UserError, ReadError):
        return [Damage(packed.path.name, name, "does not decode to what was packed")]


def _endless(packed: PackedFile) -> list[Damage]:
    """Return the tensors with numbers that are not finite.

    Raises `UserError` where a checksum differs.
    """
    names = set[str]()
    for name, _, raw in original_parts(packed):
        if name in packed.coded:
            form = form_of("F16" if packed.coded[name][0].dtype == "I8" else "BF16")
            assert form is not None, "it is what can be packed"
            if not is_finite(top_bits(raw, form), form):
                names.add(name)
    return [Damage(packed.path.name, name, NOT_FINITE) for name in packed.names if name in names]


def _plain_jobs(packed: PackedFile, name: str) -> Iterator[tuple[Any, ...]]:
    entry = packed.plain[name]
    for index, (lo, hi) in enumerate(parts(entry.lo, entry.hi)):
        yield name, index, lambda fd, lo=lo, hi=hi: np.frombuffer(read_part(fd, lo, hi), np.uint8)


def _coded_jobs(packed: PackedFile, name: str, fd: int) -> Iterator[tuple[Any, ...]]:
    mantissas, exponents, escapes, code = packed.coded[name]
    num_weights = math.prod(mantissas.shape)
    width = width_of(num_weights, exponents.num_bytes)
    kind = torch.int8 if mantissas.dtype == "I8" else torch.uint8
    numbers = _tensor(read_part(fd, code.lo, code.hi), torch.int64)
    try:
        if width is None:
            raise ValueError(
                f"{num_weights} weights cannot have {exponents.num_bytes} bytes of exponents: {DAMAGED}"
            )
        ready = Exponents(width, escapes.num_bytes).prepare({CODE: numbers}, mantissas.shape)
    except ValueError as error:
        raise UserError(f"{packed.path}: {name}: {error}") from None
    start_C = ready["start"]
    listed = _tensor(read_part(fd, escapes.lo, escapes.hi), torch.uint8)
    list_3E = listed[: ESCAPE_BYTES * int(start_C[-1])].view(3, -1)
    for index, at in enumerate(range(0, num_weights, PART_BYTES // 2)):
        own_C = start_C[index * _PART_CHUNKS : (index + 1) * _PART_CHUNKS + 1]
        own_3E = list_3E[:, own_C[0] : own_C[-1]].flatten()
        places = _part_places(mantissas, exponents, at, width)
        lists = (own_3E, own_C - own_C[0], ready["top"])
        yield name, index, lambda fd, places=places, lists=lists: _decoded(fd, kind, places, lists)


def _part_places(
    mantissas: TensorEntry, exponents: TensorEntry, at: int, width: int
) -> tuple[int, int, int, int]:
    """Return where the mantissas and distances of the part lie whose first weight is `at`."""
    block = at // BLOCK
    after = (at + PART_BYTES // 2) // BLOCK
    lo, hi = (exponents.lo + one * RUN * width for one in (block, after))
    return (
        mantissas.lo + at,
        min(mantissas.lo + at + PART_BYTES // 2, mantissas.hi),
        lo,
        min(hi, exponents.hi),
    )


def _decoded(
    fd: int,
    kind: torch.dtype,
    places: tuple[int, int, int, int],
    lists: tuple[Tensor, Tensor, Tensor],
) -> np.ndarray:
    mantissa_N = _tensor(read_part(fd, *places[:2]), kind)
    distance_B = _tensor(read_part(fd, *places[2:]), torch.uint8)
    out_N = torch.empty(len(mantissa_N), dtype=TYPE_OF[kind])
    expand = expand_exponents_compiled if HAS_NUMBA else expand_exponents_reference
    expand(mantissa_N, distance_B, *lists, out_N)
    return out_N.view(torch.uint8).numpy()


def _origin(text: str) -> Origin:
    origin = Origin(**json.loads(text))
    are_numbers = all(type(number) is int for number in origin[1:])
    if (
        not is_plain_name(origin.file)
        or not are_numbers
        or not 0 <= origin.portion < origin.num_portions
    ):
        raise ValueError(f"its origin is {text[:120]!r}")
    return origin


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))


def _tensor(raw: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
