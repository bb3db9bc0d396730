"""The header of one safetensors file; every tensor's place is checked first.

The files may be hostile, so sizes, offsets and names are checked here, once; all other code works
with `TensorEntry` values that are known to lie inside their file. In a file that passes, every byte
belongs to its header or to one tensor. The parts that headers of GGUF files share are here, too.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import MANIFEST, Stamp, open_regular, readable
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import AGAIN, ANOTHER, STORED
from offload.errors import UnreadError, UserError, ensure, reason

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# larger than any tensor in a file; arithmetic on them stays cheap
_MAX_DIMS = 8
_MAX_SIZE = 2**63
# Kimi K2 with four tensors for each matrix has 280,000, and a million take a minute.
_MAX_TENSORS = 1 << 19
# Matching a name against patterns may take the square of its length.
_MAX_NAME_CHARS = 1024
_LFS = b"version https://git-lfs"


class FileHeader(NamedTuple):
    """The header of one weight file, found sound."""

    tensors: dict[str, TensorEntry]  # by the names in the file; `coded` is not set yet
    stamp: Stamp
    metadata: Mapping[str, Any]  # texts that safetensors allows


def damaged(complaint: str, directory: Path | None = None) -> UserError:
    """Return the error for a file that contradicts itself; its folder shows how it was made."""
    is_packed = directory is not None and os.path.isfile(directory / MANIFEST)
    return UserError(f"{complaint}: {'pack the model again' if is_packed else AGAIN}")


def damaged_file(path: Path, complaint: str) -> UserError:
    """Return the error for a file that contradicts itself, by its name."""
    return damaged(f"{path.name}: {complaint}", path.parent)


def lfs_pointer(path: Path) -> UserError:
    """Return the error for a Git LFS pointer, whose file was not fetched."""
    complaint = f"{path.name} is a pointer of Git LFS, not the weights"
    return UserError(f"{complaint}: run git lfs pull in its folder")


def check_extents(path: Path, entries: dict[str, TensorEntry], file_bytes: int) -> None:
    """Raise `UserError` where tensors leave the file or overlap."""
    end = 0
    before = ""
    for name, entry in in_file_order(entries):
        if entry.hi > file_bytes:
            fault = f"{name} ends at byte {entry.hi}, the file at {file_bytes}: truncated"
            raise damaged_file(path, fault)
        if entry.lo < end:
            raise damaged_file(path, f"{name} and {before} overlap")
        end = entry.hi
        before = name


def in_file_order(entries: Mapping[str, TensorEntry]) -> list[tuple[str, TensorEntry]]:
    """Return the tensors of one file in the order of their bytes."""
    return sorted(entries.items(), key=lambda item: (item[1].lo, item[1].hi))


def read_header(path: Path, shard: int = 0) -> FileHeader:
    """Read one file's header. Raises `UserError` if it is damaged."""
    raw, stamp = read_raw_header(path)
    tensors, metadata = parse_header(path, raw, stamp.num_bytes, shard)
    return FileHeader(tensors, stamp, metadata)


def read_raw_header(path: Path) -> tuple[bytes, Stamp]:
    """Return the JSON at the start of a file, and its stamp. Raises `UserError` without JSON."""
    with readable(path), open_regular(path) as file:
        stamp = Stamp.from_file(file.fileno())
        start = file.read(len(_LFS))
        file.seek(8)
        header_bytes = int.from_bytes(start[:8], "little")
        is_inside = stamp.num_bytes >= 8 and header_bytes <= stamp.num_bytes - 8
        is_sound = start != _LFS and is_inside and header_bytes <= _MAX_HEADER_BYTES
        raw = file.read(header_bytes) if is_sound else b""
    if start == _LFS:
        raise lfs_pointer(path)
    if not is_sound:
        raise damaged_file(path, f"header of {header_bytes} bytes in a file of {stamp.num_bytes}")
    return raw, stamp


def parse_header(
    path: Path, raw: bytes, file_bytes: int, shard: int = 0
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the entries, and the metadata.

    Raises `UserError` where the header contradicts itself or the file.
    """
    data_lo = 8 + len(raw)
    header, metadata = _parse_json(path, raw)
    require_few(path.name, len(header))
    entries = {
        name: checked_entry(path, name, meta, shard, data_lo) for name, meta in header.items()
    }
    check_extents(path, entries, file_bytes)
    # other programs may read another file out of bytes between tensors
    end = data_lo
    places = [(entry.lo, entry.hi) for _, entry in in_file_order(entries)]
    for lo, hi in (*places, (file_bytes, file_bytes)):
        if lo != end:
            raise damaged_file(path, f"bytes {end} to {lo} belong to no tensor")
        end = hi
    return entries, metadata


def header_bytes(
    entries: Mapping[str, TensorEntry], notes: Mapping[str, str], align_bytes: int
) -> bytes:
    """Return the beginning of a file: the length of its JSON, and the JSON, padded with blanks.

    Offsets of entries count from its end, which is a multiple of `align_bytes`.
    """
    described = {
        name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.lo, entry.hi)}
        for name, entry in entries.items()
    }
    text = json.dumps({"__metadata__": notes, **described}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align_bytes)
    return len(text).to_bytes(8, "little") + text


def require_few(where: str, num_tensors: int) -> None:
    """Raise `UserError` for a file, or a model, with more tensors than any real one."""
    if num_tensors > _MAX_TENSORS:
        requirement = f"{where} must have at most {_MAX_TENSORS} tensors"
        raise UnreadError(f"{requirement}, got {num_tensors}: {ANOTHER}")


def _parse_json(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the header's tensors, and the file's metadata."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise damaged_file(path, f"its header is not valid JSON ({reason(error)})") from None
    if not isinstance(header, dict):
        raise damaged_file(path, f"its header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", None) or {}
    are_texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not are_texts:
        raise damaged_file(path, "__metadata__ in its header must be texts by name")
    return header, metadata


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    ensure(len(unique) == len(pairs), "a name occurs twice")
    return unique


def checked_entry(path: Path, name: str, meta: Any, shard: int, data_lo: int) -> TensorEntry:
    """Return one tensor's entry, checked; tensors begin at `data_lo`. Raises `UserError`."""
    if len(name) > _MAX_NAME_CHARS:
        raise damaged_file(path, f"its header has {name:.80} with a name of {len(name)} characters")
    try:
        dtype = meta["dtype"]
        shape = meta["shape"]
        lo, hi = meta["data_offsets"]
        is_known = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= _MAX_DIMS
        numbers = (*shape, lo, hi) if is_known else (-1,)
        sound = all(type(n) is int and 0 <= n < _MAX_SIZE for n in numbers) and lo <= hi
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise damaged_file(path, f"{name} has a malformed header entry {json.dumps(meta)[:80]}")
    wanted = STORED[dtype].stored_bytes(shape) if dtype in STORED else hi - lo
    if wanted != hi - lo:
        where = f"{name} of shape {shape} and {dtype}"
        raise damaged_file(path, f"{where} needs {wanted} bytes, has {hi - lo}")
    return TensorEntry(shard, dtype, tuple(shape), data_lo + lo, data_lo + hi)
