"""Files of a model as a whole, with their checksums: the hub's, and what `offload verify` leaves.

Nothing has to be known of the model: tensors of unknown types are plain bytes. The manifest holds a
CRC-32 for every 8 MiB of each tensor. That detects any damage of up to 32 bits in a row for certain
and other damage except for one case in four billion, at the speed of a disk. It is no protection
against forgery; a sha256 of the hub is noted where it was seen to hold.

The CRC-32 equals zlib's but is computed at twice zlib's speed where zlib has no processor
instruction for it. x^91639 + x^41678 + 1 is a multiple of CRC-32's polynomial, and so are its
powers of two, whose exponents are that many times larger. So a byte can be dropped if it is xored
into two later ones: numpy does that at the speed of a cache, and zlib does the rest (Russell,
Chorba, arXiv 2412.16398).

The hub's library leaves checksums beside what it downloads: in its cache a file is a link to one
named by its sum; in a folder of its own each has a note in `.cache`. Large files have a sha256,
small ones the sum that git has for them.

Invariants: the spans of a file follow one another and cover all of it; a damaged manifest is
refused; a file in a folder of its own is not judged by the hub's sum once it was written to since.
"""

import hashlib
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, ValidationError, convert

from offload.checkpoint.download import in_cache
from offload.checkpoint.files import (
    MANIFEST,
    PART_BYTES,
    SUMS,
    Stamp,
    cache_folder,
    hub_id_of,
    open_regular,
    read_object,
    read_small,
    readable,
    require_visible,
    write_whole,
)
from offload.checkpoint.gguf_header import gguf_parts, read_gguf_header
from offload.checkpoint.numbers import Form, form_of, is_matrix
from offload.checkpoint.open import find_shards, gguf_file, is_from_hub, open_headers
from offload.checkpoint.safetensors import FileHeader, in_file_order, read_header
from offload.errors import UnreadError, UserError, ensure, reason

SUFFIX = ".sums.json"  # follows the name of a GGUF file; in a folder the manifest is `SUMS`
_FORMAT = "offload.sums"
_VERSION = 1
_UNREAD = ""  # name of the span that is all of a file whose header is not read
# The 32nd power of the multiple: its steps are long against a call of numpy, and fit a cache.
_POWER_BYTES = 32 // 8
_FAR = 91_639 * _POWER_BYTES
_NEAR = (91_639 - 41_678) * _POWER_BYTES
_BEGIN = 0xFF  # CRC-32 xors it into each of the first four bytes
_NOTES = Path(".cache", "huggingface", "download")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")
_SHORT_NS = 2 * 10**9  # from the last byte of a download to its note
_LARGEST_BYTES = 64 << 20  # of small files, which are read at once


class Damage(NamedTuple):
    """What is wrong with a file, or with a tensor in it."""

    file: str
    tensor: str  # "" where it concerns no single tensor
    fault: str


class Span(NamedTuple):
    """A tensor, or the header before all of them, with the padding up to the next one."""

    name: str | None  # None: the header
    lo: int
    hi: int
    end: int  # of the padding behind it
    form: Form | None = None  # of its numbers, where they are known
    is_matrix: bool = False

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield [lo, hi) of parts that end where numbers, or blocks of them, end."""
        item_bytes = self.form.item_bytes if self.form else 1
        step = PART_BYTES // item_bytes * item_bytes
        for at in range(self.lo, self.end, step):
            yield at, min(at + step, self.end)


class WholeFile(NamedTuple):
    """A file whose header makes sense, or is not read."""

    path: Path
    stamp: Stamp
    spans: tuple[Span, ...]
    unread: str = ""  # why its header is not read; then one span covers the file


class ModelSpans(NamedTuple):
    """A model's files."""

    path: Path  # folder, or first GGUF file
    files: tuple[WholeFile, ...]
    damage: tuple[Damage, ...]  # what names, sizes and headers show
    left_out: Mapping[str, int]  # bytes that no text needs, by kind

    @property
    def folder(self) -> Path:
        return self.path if os.path.isdir(self.path) else self.path.parent

    @property
    def is_packed(self) -> bool:
        """Return True if `offload pack` has made it."""
        return os.path.isfile(self.folder / MANIFEST)

    @property
    def num_bytes(self) -> int:
        return sum(file.stamp.num_bytes for file in self.files)


def open_whole(model: str) -> ModelSpans:
    """Read a model's headers; damage is recorded. Raises `UserError` for what is no model here."""
    file = gguf_file(model)
    places = dict[str, str]()
    if file is not None:
        path = file
        shards = gguf_parts(file)
    else:
        path = _local(model)
        shards, weight_map = find_shards(path)
        places = weight_map or {}
    read = read_header if file is None else read_gguf_header
    headers, unread, damage = _headers(shards, read)
    have = {shard.name: header.tensors for shard, header in headers.items()}
    for name, weights_file in places.items():
        if weights_file in have and name not in have[weights_file]:
            damage.append(Damage(weights_file, name, "is not in the file that the index names"))
    # where words of coded weights begin, with their types, and bytes that no text needs; both stay
    # empty for a model that cannot be run
    words = defaultdict[int, dict[int, str]](dict)
    left_out: Mapping[str, int] = {}
    with suppress(UserError):
        checkpoint = open_headers(path)
        left_out = checkpoint.left_out
        for entry in checkpoint.tensors.values():
            if entry.coded is not None:
                words[entry.shard][entry.lo] = entry.dtype
    files = list[WholeFile]()
    for weights_path, header in headers.items():
        spans = _spans(header, words[shards.index(weights_path)])
        files.append(WholeFile(weights_path, header.stamp, spans))
    for weights_path, why in unread.items():
        stamp = Stamp.from_file(weights_path)
        whole = Span(_UNREAD, 0, stamp.num_bytes, stamp.num_bytes)
        files.append(WholeFile(weights_path, stamp, (Span(None, 0, 0, 0), whole), why))
    return ModelSpans(path, tuple(files), tuple(damage), left_out)


def _local(model: str) -> Path:
    """Return the folder of a model, or the one in the hub's cache; nothing is downloaded."""
    path = Path(os.path.expanduser(model))
    require_visible(path)
    if os.path.isdir(path):
        return path
    if not is_from_hub(model):
        remedy = "give a folder, a GGUF file, or a hub id that was downloaded"
        raise UserError(f"no model at {path}: {remedy}")
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return in_cache(model)
    except (OSError, HFValidationError) as error:
        # the library's own words for what is not there tell of its settings
        why = "" if isinstance(error, LocalEntryNotFoundError) else f" ({reason(error)})"
        complaint = f"{model} is neither a folder nor in the hub's cache{why}"
        raise UserError(f"{complaint}: download it first") from None


def _headers(
    shards: tuple[Path, ...], read: Callable[[Path], FileHeader]
) -> tuple[dict[Path, FileHeader], dict[Path, str], list[Damage]]:
    """Return the headers, why others are not read, and the damage found."""
    headers = dict[Path, FileHeader]()
    unread = dict[Path, str]()
    damage = list[Damage]()
    for path in shards:
        if not os.path.isfile(path):
            fault = "is no regular file" if os.path.lexists(path) else "is missing"
            damage.append(Damage(path.name, "", fault))
            continue
        if not os.access(path, os.R_OK):
            raise UserError(f"cannot read {path}: check that it is yours to read")
        try:
            headers[path] = read(path)
        except UnreadError as error:
            # the remedy concerns running the model, not verifying it
            unread[path] = _without_name(error, path).rpartition(": ")[0]
        except UserError as error:
            damage.append(Damage(path.name, "", _without_name(error, path)))
    return headers, unread, damage


def _without_name(error: UserError, path: Path) -> str:
    return str(error).removeprefix(f"{path.name}: ").removeprefix(f"{path.name} ")


def _spans(header: FileHeader, words: Mapping[int, str]) -> tuple[Span, ...]:
    ordered = in_file_order(header.tensors)
    starts = [*(entry.lo for _, entry in ordered), header.stamp.num_bytes]
    spans = [Span(None, 0, starts[0], starts[0])]
    for (name, entry), (_, end) in zip(ordered, pairwise(starts), strict=True):
        form = form_of(words.get(entry.lo, entry.dtype), name)
        is_float = form is not None and form.endless is not None
        matters = entry.lo in words or (is_float and is_matrix(entry.shape))
        spans.append(Span(name, entry.lo, entry.hi, end, form, matters))
    return tuple(spans)


def hub_sum(path: Path) -> str | None:
    """Return the sum that a file should have, sha256 or git's; None where it is unknown."""
    real = path.resolve()
    name = real.name if real.parent.name == "blobs" else _noted(path)
    return name if name and (_SHA256.fullmatch(name) or _GIT.fullmatch(name)) else None


def is_as_downloaded(path: Path, stamp: Stamp) -> bool:
    """Return True if a file did not change since the hub's library linked to it or noted it."""
    note = path.parent / _NOTES / f"{path.name}.metadata"
    try:
        noted_ns = os.lstat(path if path.is_symlink() else note).st_ctime_ns
    except OSError:
        return False
    return stamp.changed_ns <= noted_ns + _SHORT_NS


def is_sha256(digest: str | None) -> bool:
    """Return True if a checksum is the sha256 of the file's bytes alone."""
    return digest is not None and len(digest) == 64


def small_file_notes(folder: Path, weights: set[str]) -> list[str]:
    """Return lines on configs, tokenizers and other small files that are not as the hub has them."""
    changed = list[str]()
    unread = list[str]()
    try:
        for path in (folder / name for name in sorted(os.listdir(folder)) if name not in weights):
            try:
                wanted = hub_sum(path) if os.path.isfile(path) else None
                if wanted is None or path.stat().st_size > _LARGEST_BYTES:
                    continue
                with open_regular(path) as file:
                    raw = file.read(_LARGEST_BYTES)
            except OSError as error:
                unread.append(f"{path.name} ({error.strerror})")
                continue
            blob = b"blob %d\0" % len(raw) + raw
            digest = hashlib.sha256(raw) if is_sha256(wanted) else hashlib.sha1(blob)
            if digest.hexdigest() != wanted:
                changed.append(path.name)
    except OSError as error:
        unread.append(f"{folder} ({error.strerror})")
    lines = [f"not as the hub has it: {', '.join(changed)}"] if changed else []
    if unread:
        lines.append(f"cannot be read and held against the hub's sum: {', '.join(unread)}")
    return lines


def _noted(path: Path) -> str | None:
    """Return the checksum in a download's note: the second of revision, checksum, time."""
    try:
        _, etag, then_s, *_ = read_small(path.parent / _NOTES / f"{path.name}.metadata").split("\n")
        return etag.strip().strip('"') if path.stat().st_mtime - 1 <= float(then_s) else None
    except (OSError, ValueError):
        return None


_Sums = Annotated[str, Meta(pattern=r"^([0-9a-f]{8})*\Z")]  # CRC-32 of parts, 8 characters each


@dataclass(frozen=True, slots=True)
class FileSums:
    """The checksums of one file."""

    num_bytes: int
    written_ns: int
    sha256: str | None  # the hub's, where it was seen to hold
    header: _Sums
    tensors: Mapping[str, _Sums]


def default_manifest(model: Path) -> Path:
    """Return where the manifest of a model lies.

    It lies beside the files of a folder or the first GGUF file. The hub's cache is not ours to
    write to, so for models there it lies in this program's own cache.
    """
    # links are not followed: files of the cache are links out of a commit
    path = Path(os.path.abspath(model))
    for commit in (path, *path.parents):
        if hub_id_of(commit) is not None:
            within = path.relative_to(commit).parts
            name = "-".join((commit.parent.parent.name, commit.name[:12], *within))
            return cache_folder() / "sums" / f"{name}.json"
    return model / SUMS if os.path.isdir(model) else model.with_name(model.name + SUFFIX)


def read_manifest(path: Path) -> dict[str, FileSums]:
    """Return checksums of files by name, empty without any. Raises `UserError` for damage."""
    remedy = "remove it to have it written anew"
    with readable(path):
        try:
            manifest = read_object(path, remedy)
        except FileNotFoundError:
            return {}
    if manifest.get("format") != _FORMAT or manifest.get("version") != _VERSION:
        other = "give another with `manifest`, or move it away"
        raise UserError(f"{path} is no manifest of offload verify: {other}")
    files = manifest.get("files")
    try:
        ensure(manifest.get("crc32") == _crc32(files), "it does not have its own checksum")
        return convert(files, dict[str, FileSums])
    except (ValidationError, ValueError) as error:
        raise UserError(f"{path} is damaged, {reason(error)}: {remedy}") from None


def write_manifest(path: Path, files: Mapping[str, FileSums]) -> None:
    """Write the manifest. Raises `OSError`."""
    saved = {name: asdict(sums) for name, sums in files.items()}
    whole = {"format": _FORMAT, "version": _VERSION, "crc32": _crc32(saved), "files": saved}
    write_whole(path, json.dumps(whole, indent=1) + "\n")


def have_same_bytes(sums: FileSums, other: FileSums) -> bool:
    """Return True if two files agree, whatever their times of writing and the hub's sums."""
    return replace(sums, written_ns=0, sha256=None) == replace(other, written_ns=0, sha256=None)


def differences(file: str, sums: FileSums, known: FileSums, manifest: Path) -> list[Damage]:
    """Return the changes since the manifest was written, by tensor."""
    fault = f"its bytes are not those of {manifest.name}"
    if sums.written_ns != known.written_ns:
        fault += ", and the file was written to since: where that was meant, remove the manifest"
    both = {**known.tensors, **sums.tensors}
    names = [name for name in both if known.tensors.get(name) != sums.tensors.get(name)]
    if sums.tensors.keys().isdisjoint(known.tensors):
        names = []  # the header changed, so tensors cannot be compared by name
    is_header = sums.header != known.header or (sums.num_bytes != known.num_bytes and not names)
    header = [Damage(file, "", f"in its header, {fault}")] if is_header else []
    return [*header, *(Damage(file, name, fault) for name in names)]


def _crc32(files: object) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def crc32_of_scratch(scratch: np.ndarray) -> int:
    """Return the CRC-32 of bytes (uint8), which are overwritten."""
    num_folded = len(scratch) - _FAR
    if num_folded <= 0:
        return zlib.crc32(scratch.data)
    scratch[:4] ^= _BEGIN
    for at in range(0, num_folded, _NEAR):
        folded = scratch[at : min(at + _NEAR, num_folded)]
        for step in (_NEAR, _FAR):
            scratch[at + step : at + step + len(folded)] ^= folded
    # This start value takes back what zlib would begin with.
    return zlib.crc32(scratch[num_folded:].data, 0xFFFF_FFFF)
