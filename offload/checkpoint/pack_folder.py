"""Folders of packed models: what they were made from, what is in them, and how one comes to be.

A folder is made in `NAME.unfinished` beside it, which stays where the work is interrupted: its manifest says what it is
made from, and what has its name there is whole. Invariant: the folder itself is whole from its first moment.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.checkpoint.folder_lock import locked_anew
from offload.checkpoint.packed_file import FORMAT, VERSION, Packed, is_plain_name, read_packed
from offload.checkpoint.safetensors import MANIFEST, SUMS, Checkpoint, read_json
from offload.checkpoint.small_files import replacing
from offload.config import format_bytes
from offload.errors import RunError, UserError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".onnx", ".h5", ".msgpack")
_LARGEST_COPY_BYTES = 256 << 20  # of what is no weights: tokenizers, configs, licences
_MARGIN_BYTES = 64 << 20  # headers, the file system's own blocks


def made_from(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tells a packed model's source from others, and from itself once it is written to."""
    files = {
        path.name: {"num_bytes": stamp.num_bytes, "written_ns": stamp.written_ns}
        for path, stamp in zip(checkpoint.shards, checkpoint.stamps, strict=True)
    }
    return {"format": FORMAT, "version": VERSION, "source": str(checkpoint.directory.resolve()), "files": files}


def others(directory: Path) -> list[Path]:
    """What lies beside the weights: config, tokenizer, licence; nothing hidden, no other weights, no checksums."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHTS and path.name != SUMS
        and path.stat().st_size <= _LARGEST_COPY_BYTES
    ]  # fmt: skip


def packed_files(folder: Path) -> list[Path]:
    """By name."""
    return sorted(folder.glob("*.safetensors"))


def by_source(folder: Path) -> dict[str, list[Packed]]:
    """Packed files in order, by the file of the source. Raises `UserError` where one lacks, or is another's."""
    files_of, found = read_manifest(folder)["files"], dict[str, list[Packed]]()
    for path in packed_files(folder):
        packed = read_packed(path)
        found.setdefault(packed.origin.file, []).append(packed)
    others = found.keys() - files_of.keys()
    if others:
        raise UserError(f"{folder}: its {MANIFEST} names no {min(others)}, packed files do: pack the model again")
    for name, files in files_of.items():
        own = found.get(name, [])
        own.sort(key=lambda packed: packed.origin.portion)
        stamps = {packed.origin[:3] for packed in own}
        wanted = (name, files["num_bytes"], files["written_ns"])
        portions, counts = [one.origin.portion for one in own], {one.origin.num_portions for one in own}
        if stamps != {wanted} or counts != {len(own)} or portions != [*range(len(own))]:
            raise UserError(f"{folder}: of {name} it holds {len(own)} files, not the whole: pack the model again")
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises `UserError` where the folder is of no packed model."""
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} holds no packed model (no {MANIFEST}): give a folder that offload pack has made")
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files")
    is_sound = manifest.get("format") == FORMAT and isinstance(files, dict) and all(map(_is_file, files.items()))
    if not is_sound or manifest.get("version") != VERSION:
        raise UserError(f"{folder / MANIFEST} is not of {FORMAT} {VERSION}: pack the model again")
    return manifest


def _is_file(item: tuple[str, Any]) -> bool:
    name, own = item
    has_numbers = isinstance(own, dict) and all(type(own.get(key)) is int for key in ("num_bytes", "written_ns"))
    return is_plain_name(name) and has_numbers


def is_finished(destination: Path, made_from: Mapping[str, Any]) -> bool:
    """Whether the folder holds this very model, packed. Raises `UserError` where it holds anything else."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    if not (destination / MANIFEST).is_file():
        raise UserError(f"{destination} holds something else: choose another folder")
    _require_same(destination, made_from)
    return True


def _require_same(folder: Path, made_from: Mapping[str, Any]) -> None:
    found = read_manifest(folder)
    if found.get("unpacks") != made_from.get("unpacks") or found["files"].keys() != made_from["files"].keys():
        raise UserError(f"{folder} is made from {found.get('source')}: choose another folder, or remove it")
    changed = next((name for name, own in made_from["files"].items() if found["files"][name] != own), None)
    if changed is not None:
        raise UserError(
            f"{folder} was made from another {changed}, which changed since: remove the folder, or choose another"
        )


def require_apart(source: Path, destination: Path) -> None:
    """Raises `UserError` where a folder would be written over by what is made of it."""
    if source.resolve() == destination:
        raise UserError(f"`out` must be another folder than the model's own, got {destination}: choose another")


@contextmanager
def unfinished(destination: Path, made_from: Mapping[str, Any]) -> Iterator[Path]:
    """A folder beside `destination`, locked, that becomes it when the body ends well; it stays where it does not."""
    folder = destination.with_name(f"{destination.name}.unfinished")
    with _told(folder), locked_anew(folder) as lock:
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
    """Raises `UserError` where the disk has less free."""
    needed_bytes, free_bytes = needed_bytes + _MARGIN_BYTES, shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        sizes = f"needs {format_bytes(needed_bytes)} more of disk, {folder.parent} has {format_bytes(free_bytes)}"
        raise UserError(f"{folder.name} {sizes}: free some, the same command goes on from here")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """All or nothing. Raises `OSError`."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What the system refuses is told in a line; what reading has told stays."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): mend that, the same command goes on") from None
