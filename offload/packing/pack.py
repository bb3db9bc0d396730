"""`offload pack` and `offload unpack`: a 16-bit model coded without loss, and its original bytes.

A source file becomes files of about half a gibibyte each, so that an interrupted packing repeats at most
one. Of a folder that was interrupted, see `folders`, each file that has its name is whole.
Invariant: the destination is whole from its first moment, and `unpack` gives back every file, byte
for byte.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.download import INDEX
from offload.checkpoint.files import (
    MANIFEST,
    SUMS,
    Progress,
    Stamp,
    counter,
    in_order,
    opened,
    stamp_of,
    write_json,
)
from offload.checkpoint.held import copied_matrix
from offload.checkpoint.open import find_shards, shard_name
from offload.checkpoint.safetensors import in_file_order, parse_header, read_header, read_raw_header
from offload.checkpoint.small_files import MORE_TEMPLATES
from offload.checkpoint.tensors import TensorEntry, layer_name
from offload.encoding.exponents import ExponentWindow
from offload.encoding.residuals import held_bytes
from offload.errors import ReadError, UserError
from offload.packing.folders import (
    FORMAT,
    check_disk,
    check_pack,
    check_unpack,
    is_finished,
    made_from,
    read_manifest,
    unfinished,
)
from offload.packing.forecast import (
    by_expert,
    coded_bytes,
    is_packable,
    residual_bytes,
    stack_of,
    window_of,
)
from offload.packing.format import (
    OnBytes,
    Origin,
    PackedFile,
    Portion,
    proved_bytes,
    read_packed,
    source_name,
    write_original,
    write_packed,
)

_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
)
_LARGEST_COPY_BYTES = 256 << 20  # of tokenizers, configs, licences
_SOURCE_INDEX = "source.safetensors.index.json"
_PORTION_BYTES = 1 << 29
_AT_ONCE = 2


def _stamps_beside(directory: Path) -> dict[Path, Stamp | None]:
    """Return the visible files beside the weights: config, tokenizer, licence, chat templates."""
    stamps = dict[Path, Stamp | None]()
    for path in sorted((*directory.iterdir(), *(directory / MORE_TEMPLATES).glob("*"))):
        is_other = path.name.startswith(".") or path.suffix in _WEIGHTS or path.name == SUMS
        if path.is_file() and not is_other and path.stat().st_size <= _LARGEST_COPY_BYTES:
            stamps[path] = stamp_of(path)
    return stamps


def packed_files(folder: Path) -> list[Path]:
    """Return the packed files, sorted by name."""
    return sorted(folder.glob("*.safetensors"))


def by_source(folder: Path) -> dict[str, list[PackedFile]]:
    """Return packed files in order, by source file. Raises `UserError` for one missing."""
    files_of = read_manifest(folder)["files"]
    by_name = dict[str, list[PackedFile]]()
    for path in packed_files(folder):
        packed = read_packed(path)
        by_name.setdefault(packed.origin.file, []).append(packed)
    others = by_name.keys() - files_of.keys()
    if others:
        complaint = f"{folder}: its {MANIFEST} names no {min(others)}, packed files do"
        raise UserError(f"{complaint}: pack the model again")
    for name, files in files_of.items():
        portions = by_name.get(name, [])
        portions.sort(key=lambda packed: packed.origin.portion)
        stamp = (name, files["num_bytes"], files["written_ns"])
        wanted = [Origin(*stamp, portion, len(portions)) for portion in range(len(portions))]
        if not portions or [packed.origin for packed in portions] != wanted:
            complaint = f"{folder}: of {name} it holds {len(portions)} files, not the whole"
            raise UserError(f"{complaint}: pack the model again")
    return by_name


class PackResult(NamedTuple):
    """The result of packing, or of verifying a packed folder."""

    folder: Path
    source_bytes: int
    packed_bytes: int
    num_files: int
    num_kept: int  # files that an earlier packing had finished, not checked again
    was_there: bool = False  # whether all of it was there, so nothing was packed

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return {
            **self._asdict(),
            "folder": str(self.folder),
            "share": self.packed_bytes / max(1, self.source_bytes),
        }


def pack(
    model: str | os.PathLike[str],
    destination: Path,
    *,
    beside: str | None = None,
    progress: Progress,
) -> PackResult:
    """Write the packed model, or continue an interrupted packing; a finished one is left as it is.

    Matrices get a copy of 4 bits where `beside` is "int4". `progress` is called with the bytes of
    the source that were coded and proved, and all of them. Raises `UserError` for what is not 16
    bits in safetensors, another's folder, a source that changed or a full disk, and `ReadError`
    where the source changes meanwhile.
    """
    checkpoint = check_pack(model, destination, beside)
    destination = destination.expanduser().resolve()
    source = made_from(checkpoint, beside)
    others = _stamps_beside(checkpoint.directory)
    if checkpoint.config_stamp is not None:
        others[checkpoint.directory / "config.json"] = checkpoint.config_stamp
    if is_finished(destination, source):
        return _result_of(destination, len(packed_files(destination)))._replace(was_there=True)
    with unfinished(destination, source) as folder:
        portions = _portions(checkpoint, has_copy=beside is not None)
        # files of another version, which cut the source elsewhere
        for path in packed_files(folder):
            if path.name not in portions:
                path.unlink()
        kept = {name for name, portion in portions.items() if _is_done(folder / name, portion)}
        left = [portion for name, portion in portions.items() if name not in kept]
        check_disk(folder, sum(map(_expected_bytes, left)))
        source_bytes = {
            name: sum(entry.num_bytes for entry in portion.tensors.values())
            for name, portion in portions.items()
        }
        count = counter(2 * sum(source_bytes.values()), progress)
        for name in kept:
            count(2 * source_bytes[name])
        left_to_write = {name: portions[name] for name in portions if name not in kept}
        _write_in_turns(folder, left_to_write, checkpoint, count)
        for path, stamp in others.items():
            relative = path.relative_to(checkpoint.directory)
            _copy_unchanged(
                path, stamp, folder / (_SOURCE_INDEX if path.name == INDEX else relative)
            )
        _write_index(folder, portions, find_shards(checkpoint.directory)[1])
    return _result_of(destination, len(kept))


def _write_in_turns(
    folder: Path, portions: Mapping[str, Portion], checkpoint: Checkpoint, count: OnBytes
) -> None:
    """Write packed files, two at once: while one is coded, the one before is read back.

    Raises as `write_packed` does, and `ReadError` for a source that changed.
    """
    # threads are not imported for `--help`
    from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait

    turn = Lock()
    counting = Lock()
    is_over = Event()

    def progressed(num_bytes: int) -> None:
        if is_over.is_set():
            raise CancelledError
        with counting:
            count(num_bytes)

    def write(name: str, portion: Portion) -> None:
        write_packed(folder / name, portion, progressed, turn)
        path = portion.path
        if Stamp.from_file(path) != checkpoint.stamps[checkpoint.shards.index(path)]:
            raise _changed(path)

    pending = set[Future[None]]()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="offload-files") as pool:
        try:
            for name, portion in portions.items():
                pending.add(pool.submit(write, name, portion))
                while len(pending) == _AT_ONCE:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            for future in pending:
                future.result()
        except BaseException:
            # running workers stop at their next part
            is_over.set()
            raise


def unpack(model: Path, destination: Path, *, progress: Progress) -> Path:
    """Write the files that `model` was packed from; return their folder. Raises `UserError`."""
    folder = model.expanduser().resolve()
    destination = destination.expanduser().resolve()
    source = check_unpack(folder, destination)
    files = by_source(folder)
    if not is_finished(destination, source):
        with unfinished(destination, source) as scratch:
            _write_originals(folder, files, scratch, progress)
    # Last of all, since an unfinished folder without a manifest could not be continued.
    (destination / MANIFEST).unlink()
    return destination


def _write_originals(
    folder: Path, files: Mapping[str, list[PackedFile]], scratch: Path, progress: Progress
) -> None:
    """Write the unpacked files that are not there yet, and copy the small ones."""
    needed_bytes = sum(portions[0].origin.num_bytes for portions in files.values())
    there_bytes = sum(path.stat().st_size for path in scratch.glob("*.safetensors"))
    check_disk(scratch, needed_bytes - there_bytes)
    count = counter(needed_bytes, progress)
    beside = _stamps_beside(folder)
    for name, portions in files.items():
        if (scratch / name).is_file():  # whole, since it has its name
            count(portions[0].origin.num_bytes)
            continue
        try:
            write_original(scratch / name, portions, count)
        except UserError as error:
            before = f"what was unpacked before is in {scratch}, which may be removed"
            raise UserError(f"{error}; {before}") from None
    for path, stamp in beside.items():
        if path.name not in (MANIFEST, INDEX):
            name = INDEX if path.name == _SOURCE_INDEX else str(path.relative_to(folder))
            _copy_unchanged(path, stamp, scratch / name)


def verify(model: Path, *, progress: Progress) -> PackResult:
    """Decode every weight of a packed folder. Raises `UserError` where a checksum differs."""
    folder = model.expanduser().resolve()
    files = by_source(folder)
    count = counter(sum(portions[0].origin.num_bytes for portions in files.values()), progress)
    for portions in files.values():
        for packed in portions:
            for num_bytes in proved_bytes(packed):
                count(num_bytes)
    return _result_of(folder, 0)


def _changed(path: Path) -> ReadError:
    return ReadError(f"{path.name} changed while it was packed: pack the model again")


def _portions(checkpoint: Checkpoint, *, has_copy: bool) -> dict[str, Portion]:
    """Return packed files to write, by name. Raises `ReadError` for a source that changed."""
    portions = []
    for path, stamp in zip(checkpoint.shards, checkpoint.stamps, strict=True):
        raw, now = read_raw_header(path)
        if now != stamp:
            raise _changed(path)
        entries = dict(in_file_order(parse_header(path, raw, now.num_bytes)[0]))
        cut = list(_cut(by_expert(entries)))
        for number, tensors in enumerate(cut):
            origin = Origin(path.name, stamp.num_bytes, stamp.written_ns, number, len(cut))
            header = b"" if number else raw
            copied = frozenset(
                name for name, entry in tensors.items() if copied_matrix(name, entry)
            )
            copied = copied if has_copy else frozenset()
            windows = _windows(path, {n: entry for n, entry in tensors.items() if n not in copied})
            portions.append(Portion(path, origin, header, tensors, windows, copied))
    return {shard_name(index, len(portions)): portion for index, portion in enumerate(portions)}


def _cut(entries: Mapping[str, TensorEntry]) -> Iterator[dict[str, TensorEntry]]:
    """Yield consecutive tensors of about a portion's size; layers that lie together stay whole."""
    piece = dict[str, TensorEntry]()
    num_bytes = 0
    for _, layer in groupby(entries.items(), lambda item: (layer_name(item[0]) or item)[:2]):
        if num_bytes >= _PORTION_BYTES:
            yield piece
            piece = {}
            num_bytes = 0
        for name, entry in layer:
            piece[name] = entry
            num_bytes += entry.num_bytes
    yield piece


def _expected_bytes(portion: Portion) -> int:
    windows = portion.windows
    expected_bytes = 0
    for name, entry in portion.tensors.items():
        if name in portion.copied:
            expected_bytes += residual_bytes(entry) + held_bytes(entry.shape, 4, 2)
        else:
            is_coded = name in windows
            expected_bytes += coded_bytes(entry, windows[name]) if is_coded else entry.num_bytes
    return expected_bytes


def _windows(path: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, ExponentWindow]:
    """Return the windows of the tensors that coding makes smaller."""
    packable = {name: entry for name, entry in tensors.items() if is_packable(name, entry)}
    # the window of a stack's first expert serves all of them
    stacks = dict[str, TensorEntry]()
    for name, entry in packable.items():
        stacks.setdefault(stack_of(name), entry)
    with opened(path, os.O_RDONLY) as fd:
        sampled = in_order(window_of, ((fd, entry) for entry in stacks.values()), _AT_ONCE)
        of_stacks = dict(zip(stacks, sampled, strict=True))
    windows = {name: of_stacks[stack_of(name)] for name in packable}
    return {
        name: window
        for name, window in windows.items()
        if coded_bytes(packable[name], window) < packable[name].num_bytes
    }


def _is_done(path: Path, portion: Portion) -> bool:
    """Return True if an earlier packing has finished this file, which then was checked."""
    if not path.is_file():
        return False
    packed = read_packed(path)
    return packed.origin == portion.origin and [*packed.tensors] == [*portion.tensors]


def _write_index(
    folder: Path, portions: Mapping[str, Portion], placed: Mapping[str, str] | None
) -> None:
    """Write which packed file has which tensor: of two with one name, that which `placed` means.

    `placed` is the source's own index, if it has one.
    """
    headers = {file: read_header(folder / file).tensors for file in portions}
    weight_map = {
        stored: file
        for file, entries in headers.items()
        for stored in entries
        if placed is None or placed.get(source_name(stored)) == portions[file].path.name
    }
    if len(headers) < 2 and len(weight_map) == sum(map(len, headers.values())):
        return
    total_bytes = sum(entry.num_bytes for entries in headers.values() for entry in entries.values())
    metadata = {"total_size": total_bytes, "format": FORMAT}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _result_of(folder: Path, num_kept: int) -> PackResult:
    paths = packed_files(folder)
    source_bytes = sum(file["num_bytes"] for file in read_manifest(folder)["files"].values())
    packed_bytes = sum(path.stat().st_size for path in paths)
    return PackResult(folder, source_bytes, packed_bytes, len(paths), num_kept)


def _copy_unchanged(path: Path, stamp: Stamp | None, copy: Path) -> None:
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, copy)
    if stamp_of(path) != stamp:
        complaint = f"{path.name} changed while it was to be copied"
        raise ReadError(f"{complaint}: start again when no program writes to it")
