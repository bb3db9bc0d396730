"""Checksums of a model's files, by tensor, that `offload verify` leaves for the next time: checked as a stranger's.

A CRC-32 of every 8 MiB: it tells any damage of up to 32 bits in a row for certain and other damage but for one in four
billion, on any processor at the speed of a disk. It is no proof against people, who could write another manifest; the
hub's own sha256 is noted where it was seen to hold. Invariant: a manifest that is damaged itself is refused.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.safetensors import unreadable
from offload.checkpoint.small_files import read_object, replacing
from offload.checkpoint.whole import Damage
from offload.errors import UserError

SUFFIX = ".sums.json"  # behind the name of a GGUF file; in a folder it is `SUMS`
_FORMAT, _VERSION = "offload.sums", 1
_HEX = re.compile(r"(?:[0-9a-f]{8})*")


class Sums(NamedTuple):
    """What is known of a file."""

    num_bytes: int
    written_ns: int
    sha256: str | None  # as the hub has it, and as it was seen to be
    header: str  # CRC-32 of its parts, 8 characters each
    tensors: Mapping[str, str]


def read_manifest(path: Path) -> dict[str, Sums]:
    """Files by name; none where there is no manifest. Raises `UserError` for what is none, or is damaged."""
    remedy = "remove it to have it written anew"
    try:
        found = read_object(path, remedy)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from None
    if found.get("format") != _FORMAT or found.get("version") != _VERSION:
        raise UserError(f"{path} is no manifest of offload verify: give another with `manifest`, or move it away")
    files = found.get("files")
    if not isinstance(files, dict) or found.get("crc32") != _crc32(files) or not all(map(_is_sound, files.values())):
        raise UserError(f"{path} is damaged, it does not have its own checksum: {remedy}")
    return {name: Sums(**own) for name, own in files.items()}


def write_manifest(path: Path, files: Mapping[str, Sums]) -> None:
    """All or nothing. Raises `OSError`."""
    told = {name: own._asdict() for name, own in files.items()}
    with replacing(path) as scratch:
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "crc32": _crc32(told), "files": told}, indent=1)
        scratch.write_text(text + "\n", encoding="utf-8")


def have_same_bytes(one: Sums, other: Sums) -> bool:
    """Whether two files agree, whenever they were written, and whatever the hub says of them."""
    return one._replace(written_ns=0, sha256=None) == other._replace(written_ns=0, sha256=None)


def differences(file: str, found: Sums, known: Sums, manifest: Path) -> list[Damage]:
    """What is not as it was, by tensor."""
    what = f"its bytes are not those of {manifest.name}"
    if found.written_ns != known.written_ns:
        what += ", and the file was written to since: where that was meant, remove the manifest"
    names = [name for name in {**known.tensors, **found.tensors} if known.tensors.get(name) != found.tensors.get(name)]
    if found.tensors.keys().isdisjoint(known.tensors):
        names = []  # it is the header that is another
    is_header = found.header != known.header or (found.num_bytes != known.num_bytes and not names)
    header = [Damage(file, "", f"in its header, {what}")] if is_header else []
    return [*header, *(Damage(file, name, what) for name in names)]


def _crc32(files: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def _is_sound(own: Any) -> bool:
    if not isinstance(own, dict) or own.keys() != set(Sums._fields) or not isinstance(own["tensors"], dict):
        return False
    are_sums = all(isinstance(one, str) and _HEX.fullmatch(one) for one in (own["header"], *own["tensors"].values()))
    are_numbers = all(type(own[name]) is int for name in ("num_bytes", "written_ns"))
    return are_sums and are_numbers and isinstance(own["sha256"], str | None)
