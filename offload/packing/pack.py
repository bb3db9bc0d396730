"""`offload pack` and `offload unpack`: a 16-bit model coded without loss, and its original bytes.

A source file becomes files of about a gibibyte each, so that an interrupted packing repeats at most
one. A folder is made in `NAME.unfinished` beside its destination and stays there when the work is
interrupted: its manifest says what it is made from, and each file that has its name is whole.
Invariant: the destination is whole from its first moment, and `unpack` gives back every file, byte
for byte.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import locked_anew, opened, replacing
from offload.checkpoint.gguf import gguf_file
from offload.checkpoint.gguf_header import read_gguf_header
from offload.checkpoint.safetensors import (
    MANIFEST,
    SUMS,
    Checkpoint,
    Stamp,
    open_checkpoint,
    parse_header,
    read_header,
    read_json,
    read_raw_header,
    stamp_of,
)
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.exponents import MANTISSAS, Exponents, ExponentWindow
from offload.errors import ReadError, RunError, UserError
from offload.packing.forecast import coded_bytes, forecast, is_packable, window_of
from offload.packing.format import (
    FORMAT,
    VERSION,
    Origin,
    PackedFile,
    is_plain_name,
    original_parts,
    read_packed,
    write_original,
)
from offload.packing.writing import Portion, write_packed
from offload.units import format_bytes, require

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
_MARGIN_BYTES = 64 << 20  # headers, the file system's own blocks
_INDEX = "model.safetensors.index.json"
_SOURCE_INDEX = "source.safetensors.index.json"
_PORTION_BYTES = 1 << 30
_RULE = "packing is for bfloat16, and for float16 that stems from it"
_NO_GAIN = f"{{}} is stored as {{}}, and {_RULE}: nothing to gain, run it as it is"
_LAYER = re.compile(r"\b(?:layers|block|h)\.(\d+)\.")
Progress = Callable[[int, int], None]


def made_from(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what identifies a packed model's source, and shows that it was written to."""
    files = {
        path.name: {"num_bytes": stamp.num_bytes, "written_ns": stamp.written_ns}
        for path, stamp in zip(checkpoint.shards, checkpoint.stamps, strict=True)
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": str(checkpoint.directory.resolve()),
        "files": files,
    }


def others(directory: Path) -> list[Path]:
    """Return the files beside the weights: config, tokenizer, licence.

    Hidden files, weights in other formats and checksums are left out.
    """
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and path.name != SUMS
        and path.stat().st_size <= _LARGEST_COPY_BYTES
    ]


def packed_files(folder: Path) -> list[Path]:
    """Return the packed files, sorted by name."""
    return sorted(folder.glob("*.safetensors"))


def by_source(folder: Path) -> dict[str, list[PackedFile]]:
    """Return the packed files in order, by source file.

    Raises `UserError` where one is missing, or belongs to another model.
    """
    files_of = read_manifest(folder)["files"]
    found = dict[str, list[PackedFile]]()
    for path in packed_files(folder):
        packed = read_packed(path)
        found.setdefault(packed.origin.file, []).append(packed)
    others = found.keys() - files_of.keys()
    if others:
        raise UserError(
            f"{folder}: its {MANIFEST} names no {min(others)}, packed files do: pack the model again"
        )
    for name, files in files_of.items():
        own = found.get(name, [])
        own.sort(key=lambda packed: packed.origin.portion)
        stamps = {packed.origin[:3] for packed in own}
        wanted = (name, files["num_bytes"], files["written_ns"])
        portions = [one.origin.portion for one in own]
        counts = {one.origin.num_portions for one in own}
        if stamps != {wanted} or counts != {len(own)} or portions != [*range(len(own))]:
            raise UserError(
                f"{folder}: of {name} it holds {len(own)} files, not the whole: pack the model again"
            )
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raises `UserError` where the folder is not a packed model."""
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} holds no packed model (no {MANIFEST}): give a folder that offload pack has made"
        )
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files")
    is_sound = (
        manifest.get("format") == FORMAT
        and isinstance(files, dict)
        and all(map(_is_file, files.items()))
    )
    if not is_sound or manifest.get("version") != VERSION:
        raise UserError(f"{folder / MANIFEST} is not of {FORMAT} {VERSION}: pack the model again")
    return manifest


def _is_file(item: tuple[str, Any]) -> bool:
    name, own = item
    has_numbers = isinstance(own, dict) and all(
        type(own.get(key)) is int for key in ("num_bytes", "written_ns")
    )
    return is_plain_name(name) and has_numbers


def is_finished(destination: Path, made_from: Mapping[str, Any]) -> bool:
    """Return whether the folder holds this very model, packed; False when it is empty.

    Raises `UserError` where it holds anything else.
    """
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    if not (destination / MANIFEST).is_file():
        raise UserError(f"{destination} holds something else: choose another folder")
    _require_same(destination, made_from)
    return True


def _require_same(folder: Path, made_from: Mapping[str, Any]) -> None:
    found = read_manifest(folder)
    if (
        found.get("unpacks") != made_from.get("unpacks")
        or found["files"].keys() != made_from["files"].keys()
    ):
        raise UserError(
            f"{folder} is made from {found.get('source')}: choose another folder, or remove it"
        )
    changed = next(
        (name for name, own in made_from["files"].items() if found["files"][name] != own), None
    )
    if changed is not None:
        raise UserError(
            f"{folder} was made from another {changed}, which changed since: remove the folder, or choose another"
        )


def require_apart(source: Path, destination: Path) -> None:
    """Raise `UserError` where a folder would be overwritten by what is made from it."""
    if source.resolve() == destination:
        raise UserError(
            f"`out` must be another folder than the model's own, got {destination}: choose another"
        )


@contextmanager
def unfinished(destination: Path, made_from: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a locked folder beside `destination` that becomes it when the body succeeds.

    It stays, to be continued, when the body fails.
    """
    folder = destination.with_name(f"{destination.name}.unfinished")
    with _refusing_os_errors(folder), locked_anew(folder) as lock:
        for leftover in folder.glob(".*"):
            leftover.unlink()
        if any(folder.iterdir()):
            is_finished(folder, made_from)
        else:
            write_json(folder / MANIFEST, made_from)
        yield folder
        os.fsync(lock)
        folder.replace(destination)


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise `UserError` where the disk has less than `needed_bytes` free."""
    needed_bytes = needed_bytes + _MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        sizes = f"needs {format_bytes(needed_bytes)} more of disk, {folder.parent} has {format_bytes(free_bytes)}"
        raise UserError(f"{folder.name} {sizes}: free some, the same command goes on from here")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all. Raises `OSError`."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _refusing_os_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of writing into a `UserError`; errors of reading pass unchanged."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        raise UserError(
            f"cannot write {folder} ({error.strerror}): mend that, the same command goes on"
        ) from None


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


def pack(model: str | os.PathLike[str], destination: Path, *, progress: Progress) -> PackResult:
    """Write the packed model, or continue an interrupted packing; a finished one is left as it is.

    Args:
        progress: is called with the bytes of the source that were coded and proved, each counted
            once, and all of them.

    Raises:
        UserError: the model is not safetensors in bfloat16, or in float16 that stems from it; the
            folder holds something else or is the model's own; the source changed since packing
            began; or the disk is full.
        ReadError: the source changes meanwhile, or cannot be read.
    """
    _refuse_gguf(model)
    checkpoint = open_checkpoint(model)
    destination = destination.expanduser().resolve()
    _require_gain(checkpoint)
    require_apart(checkpoint.directory, destination)
    source = made_from(checkpoint)
    beside = _stamps_beside(checkpoint.directory)
    if checkpoint.config_stamp is not None:
        beside[checkpoint.small_files / "config.json"] = checkpoint.config_stamp
    if is_finished(destination, source):
        return _result_of(destination, len(packed_files(destination)))._replace(was_there=True)
    with unfinished(destination, source) as folder:
        portions = _portions(checkpoint)
        kept = {name for name, portion in portions.items() if _is_done(folder / name, portion)}
        check_disk(
            folder,
            sum(_expected_bytes(portion) for name, portion in portions.items() if name not in kept),
        )
        all_bytes = sum(
            entry.num_bytes for portion in portions.values() for entry in portion.tensors.values()
        )
        count = _Counter(2 * all_bytes, progress)
        for name, portion in portions.items():
            if name in kept:
                count(2 * sum(entry.num_bytes for entry in portion.tensors.values()))
            else:
                write_packed(folder / name, portion, count)
                _require_unchanged(checkpoint, portion.path)
        for path, stamp in beside.items():
            _copy_unchanged(
                path, stamp, folder / (_SOURCE_INDEX if path.name == _INDEX else path.name)
            )
        _write_index(folder, portions)
    return _result_of(destination, len(kept))


def unpack(model: Path, destination: Path, *, progress: Progress) -> Path:
    """Write the files that `model` was packed from; return their folder.

    Raises `UserError` where that cannot be.
    """
    folder = model.expanduser().resolve()
    destination = destination.expanduser().resolve()
    manifest = read_manifest(folder)
    found = by_source(folder)
    require_apart(folder, destination)
    source = {**manifest, "unpacks": str(folder)}
    if not is_finished(destination, source):
        _write_originals(folder, found, destination, source, progress)
    # Last of all, since an unfinished folder without a manifest could not be continued.
    (destination / MANIFEST).unlink()
    return destination


def _write_originals(
    folder: Path,
    found: Mapping[str, list[PackedFile]],
    destination: Path,
    source: Mapping[str, Any],
    progress: Progress,
) -> None:
    with unfinished(destination, source) as scratch:
        needed_bytes = sum(own[0].origin.num_bytes for own in found.values())
        check_disk(
            scratch,
            needed_bytes - sum(path.stat().st_size for path in scratch.glob("*.safetensors")),
        )
        count = _Counter(needed_bytes, progress)
        beside = _stamps_beside(folder)
        for name, own in found.items():
            if (scratch / name).is_file():  # whole, since it has its name
                count(own[0].origin.num_bytes)
            else:
                with _naming_leftovers(scratch):
                    write_original(scratch / name, own, count)
        for path, stamp in beside.items():
            if path.name not in (MANIFEST, _INDEX):
                _copy_unchanged(
                    path, stamp, scratch / (_INDEX if path.name == _SOURCE_INDEX else path.name)
                )


def verify(model: Path, *, progress: Progress) -> PackResult:
    """Decode every weight of a packed folder and compare checksums.

    Raises `UserError` where one differs.
    """
    folder = model.expanduser().resolve()
    read_manifest(folder)
    found = by_source(folder)
    count = _Counter(sum(own[0].origin.num_bytes for own in found.values()), progress)
    for own in found.values():
        for packed in own:
            for _, _, raw in original_parts(packed):
                count(len(raw))
    return _result_of(folder, 0)


def _require_gain(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for a model that packing does not make smaller."""
    name = checkpoint.directory.name
    stored = checkpoint.tensors.values()
    coded = next((entry.coded.coding for entry in stored if entry.coded is not None), None)
    if isinstance(coded, Exponents):
        raise UserError(f"{name} is packed already: run it as it is, or give its source")
    if coded is not None:
        raise UserError(_NO_GAIN.format(name, coded.name))
    found = forecast(checkpoint)
    kinds = ", ".join(sorted({entry.dtype for entry in stored}))
    if found is None or not found.is_worth_it:
        share = "" if found is None else f", of which a sample would keep {found.share:.0%}"
        raise UserError(f"{name}: {_RULE}, its weights are {kinds}{share}: run it as it is")


def _refuse_gguf(model: str | os.PathLike[str]) -> None:
    file = gguf_file(model)
    if file is not None:
        stored = Counter[str]()
        for entry in read_gguf_header(file).tensors.values():
            stored[entry.dtype] += entry.num_bytes
        ((kind, _),) = stored.most_common(1) or [("nothing", 0)]
        if kind in MANTISSAS:
            raise UserError(
                f"{file.name} is GGUF, and packing is for safetensors: run it as it is, or give its source"
            )
        raise UserError(_NO_GAIN.format(file.name, kind))


@contextmanager
def _naming_leftovers(scratch: Path) -> Iterator[None]:
    """Add to an error of damage where the files unpacked before it are."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{error}; what was unpacked before is in {scratch}, which may be removed"
        ) from None


def _portions(checkpoint: Checkpoint) -> dict[str, Portion]:
    """Return all packed files to be written, by name, in order.

    Raises `UserError` where a source file could not be restored.
    """
    found = []
    for path, stamp in zip(checkpoint.shards, checkpoint.stamps, strict=True):
        raw, now = read_raw_header(path)
        entries = dict(
            sorted(parse_header(path, raw, now.num_bytes).items(), key=lambda item: item[1].lo)
        )
        held_bytes = 8 + len(raw) + sum(entry.num_bytes for entry in entries.values())
        rule = "must have its tensors one behind the other"
        require(
            held_bytes == stamp.num_bytes,
            f"{path.name} {rule}",
            f"{held_bytes} of {stamp.num_bytes} bytes",
            "write it anew with safetensors",
        )
        cut = list(_cut(entries))
        for number, tensors in enumerate(cut):
            origin = Origin(path.name, stamp.num_bytes, stamp.written_ns, number, len(cut))
            found.append(
                Portion(path, origin, b"" if number else raw, tensors, _windows(path, tensors))
            )
    if len(found) == 1:
        return {"model.safetensors": found[0]}
    return {
        f"model-{n:05d}-of-{len(found):05d}.safetensors": one
        for n, one in enumerate(found, start=1)
    }


def _cut(entries: Mapping[str, TensorEntry]) -> Iterator[dict[str, TensorEntry]]:
    """Yield consecutive tensors of about a portion's size.

    A layer is cut only where its tensors do not lie together.
    """
    own = dict[str, TensorEntry]()
    layer = ""
    for name, entry in entries.items():
        before = layer
        layer = (_LAYER.search(name) or [""])[0]
        if layer != before and sum(one.num_bytes for one in own.values()) >= _PORTION_BYTES:
            yield own
            own = {}
        own[name] = entry
    yield own


def _expected_bytes(portion: Portion) -> int:
    """Return the bytes that a packed file is expected to take."""
    taken = ((entry, portion.windows.get(name)) for name, entry in portion.tensors.items())
    return sum(
        entry.num_bytes if window is None else coded_bytes(entry, window) for entry, window in taken
    )


def _windows(path: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, ExponentWindow]:
    """Return the windows of the tensors that coding makes smaller."""
    with opened(path, os.O_RDONLY) as fd:
        found = {
            name: window_of(fd, entry) for name, entry in tensors.items() if is_packable(entry)
        }
    return {
        name: window
        for name, window in found.items()
        if coded_bytes(tensors[name], window) < tensors[name].num_bytes
    }


def _is_done(path: Path, portion: Portion) -> bool:
    """Return whether an earlier packing has finished this file.

    It then has its name, which it gets only after it was checked.
    """
    if not path.is_file():
        return False
    packed = read_packed(path)
    return packed.origin == portion.origin and packed.names == [*portion.tensors]


def _write_index(folder: Path, portions: Mapping[str, Portion]) -> None:
    headers = {name: read_header(folder / name)[0] for name in portions}
    if len(headers) > 1:
        total_bytes = sum(
            entry.num_bytes for entries in headers.values() for entry in entries.values()
        )
        weight_map = {tensor: name for name, entries in headers.items() for tensor in entries}
        write_json(
            folder / _INDEX,
            {"metadata": {"total_size": total_bytes, "format": FORMAT}, "weight_map": weight_map},
        )


def _result_of(folder: Path, num_kept: int) -> PackResult:
    paths = packed_files(folder)
    source_bytes = sum(own["num_bytes"] for own in read_manifest(folder)["files"].values())
    return PackResult(
        folder, source_bytes, sum(path.stat().st_size for path in paths), len(paths), num_kept
    )


def _require_unchanged(checkpoint: Checkpoint, path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd:
        if Stamp.of(fd) != checkpoint.stamps[checkpoint.shards.index(path)]:
            raise ReadError(f"{path.name} changed while it was packed: pack the model again")


def _stamps_beside(folder: Path) -> dict[Path, Stamp | None]:
    return {path: stamp_of(path) for path in others(folder)}


def _copy_unchanged(path: Path, stamp: Stamp | None, copy: Path) -> None:
    shutil.copyfile(path, copy)
    if stamp_of(path) != stamp:
        raise ReadError(
            f"{path.name} changed while it was to be copied: start again when nobody writes to it"
        )


class _Counter:
    """Adds up bytes and reports them to a progress bar."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._done_bytes = 0
        self._total_bytes = total_bytes
        self._progress = progress

    def __call__(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress(self._done_bytes, self._total_bytes)
