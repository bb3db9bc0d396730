"""Headers of GGUF files: metadata and the place of every tensor, checked before any byte is used.

The files may be hostile. Invariant: no number in a file decides how much is read, kept or repeated
before it was compared with the bytes that are left, and every entry lies inside the file without
overlapping another.
"""

import math
import re
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from offload.checkpoint.files import Stamp, open_regular, readable
from offload.checkpoint.safetensors import (
    FileHeader,
    check_extents,
    damaged,
    in_file_order,
    lfs_pointer,
    require_few,
)
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import ENCODINGS
from offload.encoding.gguf import BLOCKS, GgufBlocks
from offload.errors import UnreadError, UserError, reason
from offload.units import rounded_up

# numbers, strings, booleans and short lists of numbers; longer lists are left out
Metadata = Mapping[str, Any]
_MAX_HEADER_BYTES = 1 << 28  # the largest vocabularies have about 10 MB
_MAX_LIST = 1024
_MAX_NOTES = 1 << 16
_MAX_DIMS = 4
_MAX_SIZE = 1 << 62
_MAX_NAME_BYTES = 1024
_LAST_NUMBER = 255  # a version or type above this is damage, not something newer
_ALIGNMENTS = [1 << power for power in range(3, 21)]
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
            12: "<d"}  # fmt: skip
_TEXT = 8
_LIST = 9
# ggml's type numbers; types that cannot be read have names for the error message
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
          12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
          20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
          29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}  # fmt: skip
# the name of one part of a split file
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
READ_TYPES = f"{', '.join(sorted(BLOCKS))}, F16, BF16 and F32"


def gguf_parts(file: Path) -> tuple[Path, ...]:
    """Return the paths of a split model's files, existing or not. Raises `UserError`."""
    match = SPLIT.fullmatch(file.name)
    if match is None:
        return (file,)
    stem, part, count, suffix = match.groups()
    if not 0 < int(part) <= int(count):
        raise UserError(f"{file.name}: part {int(part)} of {int(count)}: give it another name")
    return tuple(
        file.with_name(f"{stem}-{n:05}-of-{count}{suffix}") for n in range(1, int(count) + 1)
    )


def read_gguf_header(path: Path, shard: int = 0) -> FileHeader:
    """Read one file's header. Raises `UserError` for damage, or types that cannot be read."""
    with readable(path), open_regular(path) as file:
        stamp = Stamp.from_file(file.fileno())
        reader = _HeaderReader(path, file, min(stamp.num_bytes, _MAX_HEADER_BYTES))
        metadata, tensors = _read(reader, shard)
    check_extents(path, tensors, stamp.num_bytes)
    _require_no_holes(path, tensors, metadata.get("general.alignment", 32))
    end = max((entry.hi for entry in tensors.values()), default=stamp.num_bytes)
    # padding is no longer than the largest alignment
    if stamp.num_bytes - end > _ALIGNMENTS[-1]:
        raise damaged(f"{path.name}: bytes {end} to {stamp.num_bytes} belong to no tensor")
    return FileHeader(tensors, stamp, metadata)


def _require_no_holes(path: Path, entries: Mapping[str, TensorEntry], alignment: int) -> None:
    """Raise `UserError` unless each tensor begins where the one before ends, except for padding.

    A tensor with a wrong type would have another size than was written.
    """
    for (before, entry), (_, following) in pairwise(in_file_order(entries)):
        if following.lo - entry.hi >= alignment:
            complaint = f"bytes {entry.hi} to {following.lo}, behind {before}, belong to no tensor"
            raise damaged(f"{path.name}: {complaint}")


class _HeaderReader:
    """A cursor over the bytes of a header that never leaves the file."""

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self.path = path
        self.at = 0
        self._file = file
        self._end = num_bytes

    def take(self, num_bytes: int) -> bytes:
        self.require(num_bytes)
        self.at += num_bytes
        taken = self._file.read(num_bytes)
        if len(taken) != num_bytes:
            raise damaged(f"{self.path.name}: the file ends in its header")
        return taken

    def require(self, num_bytes: int) -> None:
        """Raise `UserError` unless this many bytes are left."""
        if num_bytes > self._end - self.at:
            where = f"needs {num_bytes} bytes at byte {self.at}, of {self._end}"
            raise damaged(f"{self.path.name}: its header {where}")

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least_bytes: int) -> int:
        """Read a count of items that take at least `least_bytes` each."""
        count: int = self.number("<Q")
        self.require(count * least_bytes)
        return count

    def text(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise damaged(f"{self.path.name}: its header is not UTF-8 ({reason(error)})") from None


def _read(header: _HeaderReader, shard: int) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Return metadata and entries of a header. Raises `UserError` for damage or unknown types."""
    name = header.path.name
    magic = header.take(4)
    if magic == b"vers":
        raise lfs_pointer(header.path)
    if magic != b"GGUF":
        complaint = f"{name} does not begin as a GGUF file does"
        raise UserError(f"{complaint}: check the file, or download it again")
    version = header.number("<I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian GGUF files are" if swapped in (1, 2, 3) else f"GGUF version {version} is"
        complaint = (
            f"{name}: {kind} not read: take a file of version 2 or 3, or convert the model again"
        )
        raise _not_read(min(version, swapped), complaint)
    num_tensors = header.number("<Q")
    num_notes = header.number("<Q")
    header.require(24 * num_tensors + 13 * num_notes)
    require_few(name, num_tensors)
    if num_notes > _MAX_NOTES:
        raise damaged(f"{name}: its header has {num_notes} notes, of {_MAX_NOTES} at most")
    metadata = dict[str, Any]()
    for _ in range(num_notes):
        key = header.text()
        if key in metadata:
            raise damaged(f"{name}: its header says {key:.80} twice")
        metadata[key] = _value(header, header.number("<I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in _ALIGNMENTS:
        requirement = f"{name}: general.alignment must be a power of two of 8 or more"
        raise damaged(f"{requirement}, got {alignment!r:.80}")
    return metadata, _entries(header, num_tensors, alignment, shard)


def _value(header: _HeaderReader, kind: int) -> Any:
    """Read a value; a vocabulary (a list that is long or not of numbers) becomes None."""
    if kind == _TEXT:
        return header.text()
    if kind in _FORMATS:
        return header.number(_FORMATS[kind])
    if kind != _LIST:
        raise damaged(f"{header.path.name}: its header has a value of type {kind}")
    kind = header.number("<I")
    if kind == _TEXT:
        for _ in range(header.count(8)):
            header.take(header.number("<Q"))
        return None
    if kind not in _FORMATS:
        raise damaged(f"{header.path.name}: its header has a list of type {kind}")
    item_bytes = struct.calcsize(_FORMATS[kind])
    count = header.count(item_bytes)
    raw = header.take(count * item_bytes)
    return None if count > _MAX_LIST else list(struct.unpack(f"<{count}{_FORMATS[kind][1]}", raw))


def _entries(
    header: _HeaderReader, num_tensors: int, alignment: int, shard: int
) -> dict[str, TensorEntry]:
    """Return a file's tensors by name, with absolute offsets. Raises `UserError` for damage."""
    places = dict[str, tuple[str, tuple[int, ...], int]]()
    for _ in range(num_tensors):
        name = header.text()
        if name in places or len(name) > _MAX_NAME_BYTES:
            fault = "twice" if name in places else f"with a name of {len(name)} characters"
            raise damaged(f"{header.path.name}: its header has {name:.80} {fault}")
        places[name] = _entry(header, name, alignment)
    first = rounded_up(header.at, alignment)
    entries = {}
    for name, (kind, shape, at) in places.items():
        lo = first + at
        hi = lo + GgufBlocks(kind).stored_bytes(shape)
        entries[name] = TensorEntry(shard, kind, shape, lo, hi)
    return entries


def _entry(header: _HeaderReader, name: str, alignment: int) -> tuple[str, tuple[int, ...], int]:
    """Return type, shape and offset in the data of one tensor. Raises `UserError` for damage."""
    where = f"{header.path.name}: {name:.80}"
    num_dims = header.number("<I")
    if not 0 < num_dims <= _MAX_DIMS:
        raise damaged(f"{where} has {num_dims} dimensions")
    shape = tuple(reversed([header.number("<Q") for _ in range(num_dims)]))
    number = header.number("<I")
    lo = header.number("<Q")
    kind = _TYPES.get(number, f"of type {number}")
    if kind not in BLOCKS and kind not in ENCODINGS:
        remedy = f"take a file of {READ_TYPES}, such as Q4_K_M or Q8_0"
        raise _not_read(number, f"{where} is {kind}, which is not read: {remedy}")
    if not all(0 < size < _MAX_SIZE for size in shape) or math.prod(shape) >= _MAX_SIZE:
        raise damaged(f"{where} has shape {list(shape)}")
    if shape[-1] % BLOCKS.get(kind, (1, 0))[0]:
        raise damaged(f"{where} has rows of {shape[-1]}, which are no whole blocks of {kind}")
    if lo % alignment or lo >= _MAX_SIZE:
        raise damaged(f"{where} begins at {lo}, no multiple of {alignment}")
    return kind, shape, lo


def _not_read(number: int, complaint: str) -> UserError:
    """Return the error for a version or type; a number that may come into use is not called damage."""
    return UnreadError(complaint) if number <= _LAST_NUMBER else UserError(complaint)
