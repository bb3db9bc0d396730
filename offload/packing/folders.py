"""Folders of packed models: what may be packed, from where to where, and what lies there already.

Nothing here needs torch, so that a name that is taken is refused before torch is imported. A folder
is made in `NAME.unfinished` beside its destination and stays there when the work is interrupted: its
manifest says what it is made from. Invariant: what holds something else is never written to.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.download import is_shard_name
from offload.checkpoint.files import (
    MANIFEST,
    is_free,
    is_scratch,
    locked_anew,
    read_object,
    readable,
    require_disk,
    write_json,
)
from offload.checkpoint.gguf_header import read_gguf_header
from offload.checkpoint.held import copied_matrix
from offload.checkpoint.open import gguf_file, open_checkpoint
from offload.checkpoint.sizes import copy_obstacle
from offload.encoding.exponents import MANTISSAS, Exponents
from offload.encoding.residuals import Residual
from offload.errors import UserError, os_errors_as_user_error, require
from offload.packing.forecast import WORTH_PACKING, expected_share

FORMAT = "offload.packed"
VERSION = "1"
# the copy of 4 bits that a draft of the target itself guesses with
BESIDE = "int4"
_REQUIREMENT = "packing is for bfloat16, and for float16 that stems from it"
_NO_GAIN = f"{{}} is stored as {{}}, and {_REQUIREMENT}: nothing to gain, run it as it is"


def check_pack(
    model: str | os.PathLike[str], destination: Path, beside: str | None = None
) -> Checkpoint:
    """Return the headers of a model to pack. Raises `UserError` for it, or for the folder."""
    is_known = beside in (None, BESIDE)
    require(is_known, f"`beside` must be {BESIDE}", repr(beside), f"give {BESIDE} or leave it out")
    refuse_gguf(model)
    checkpoint = open_checkpoint(model)
    destination = destination.expanduser().resolve()
    require_gain(checkpoint)
    if beside is not None:
        obstacle = copy_obstacle(checkpoint)
        requirement = f"{checkpoint.name}: `beside` needs a draft that is a copy of all layers"
        require(obstacle is None, requirement, obstacle, "leave it out")
        is_bfloat16 = any(copied_matrix(*named) for named in checkpoint.tensors.items())
        requirement = f"{checkpoint.name}: `beside` needs matrices in bfloat16"
        require(is_bfloat16, requirement, "none", "leave it out")
    require_apart(checkpoint.directory, destination)
    is_finished(destination, made_from(checkpoint, beside))
    return checkpoint


def check_unpack(model: Path, destination: Path) -> dict[str, Any]:
    """Return the origin of an unpacked folder. Raises `UserError`."""
    folder = model.expanduser().resolve()
    destination = destination.expanduser().resolve()
    source = {**read_manifest(folder), "unpacks": str(folder)}
    require_apart(folder, destination)
    is_finished(destination, source)
    return source


def made_from(checkpoint: Checkpoint, beside: str | None = None) -> dict[str, Any]:
    """Return the identity of a packed model's source, which shows that it was written to."""
    files = {
        path.name: {
            "num_bytes": stamp.num_bytes,
            "written_ns": stamp.written_ns,
            "changed_ns": stamp.changed_ns,
        }
        for path, stamp in zip(checkpoint.shards, checkpoint.stamps, strict=True)
    }
    source = str(checkpoint.directory.resolve())
    form = {} if beside is None else {"beside": beside}
    return {"format": FORMAT, "version": VERSION, "source": source, **form, "files": files}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raises `UserError` where the folder is not a packed model."""
    path = folder / MANIFEST
    if not path.is_file():
        complaint = f"{folder} holds no packed model (no {MANIFEST})"
        raise UserError(f"{complaint}: give a folder that offload pack has made")
    with readable(path):
        manifest = read_object(path, "pack the model again")
    files = manifest.get("files")
    is_sound = isinstance(files, dict) and all(map(is_shard_name, files))
    for entry in files.values() if isinstance(files, dict) else ():
        numbers = (
            (entry.get("num_bytes"), entry.get("written_ns")) if isinstance(entry, dict) else ()
        )
        is_sound = is_sound and [*map(type, numbers)] == [int, int]
    if not is_sound or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise UserError(f"{path} is not of {FORMAT} {VERSION}: pack the model again")
    return manifest


def is_finished(destination: Path, made_from: Mapping[str, Any]) -> bool:
    """Return True if the folder holds this model; False if empty. Raises `UserError` otherwise."""
    if is_free(destination):
        return False
    if not (destination / MANIFEST).is_file():
        held = "holds files already" if destination.is_dir() else "is a file"
        complaint = f"{destination} {held}, which nothing is written over"
        raise UserError(f"{complaint}: choose another folder")
    manifest = read_manifest(destination)
    files = manifest["files"]
    is_same = manifest.get("unpacks") == made_from.get("unpacks")
    if not is_same or files.keys() != made_from["files"].keys():
        complaint = f"{destination} is made from {manifest.get('source')}"
        raise UserError(f"{complaint}: choose another folder, or remove it")
    if manifest.get("beside") != made_from.get("beside"):
        complaint = f"{destination} was packed {_form_of(manifest)}, not {_form_of(made_from)}"
        raise UserError(f"{complaint}: choose another folder, or remove it")
    for name, stamp in made_from["files"].items():
        if files[name] != stamp:
            complaint = f"{destination} was made from another {name}, which changed since"
            raise UserError(f"{complaint}: remove the folder, or choose another")
    return True


def _form_of(made_from: Mapping[str, Any]) -> str:
    return f"beside {made_from['beside']}" if "beside" in made_from else "by itself"


def require_apart(source: Path, destination: Path) -> None:
    """Raise `UserError` where a folder would be overwritten by what is made from it."""
    if source.resolve() == destination:
        requirement = "`out` must be another folder than the model's own"
        raise UserError(f"{requirement}, got {destination}: choose another")


@contextmanager
def unfinished(destination: Path, made_from: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a locked folder, renamed to `destination` if the body succeeds, else kept for later."""
    folder = destination.with_name(f"{destination.name}.unfinished")
    remedy = "mend that, the same command goes on"
    with os_errors_as_user_error(f"cannot write {folder}", remedy), locked_anew(folder) as lock:
        # an unfinished file, of a process that was killed
        for leftover in filter(is_scratch, folder.glob(".*")):
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
    remedy = "free some, the same command goes on from here"
    require_disk(folder, needed_bytes, f"{folder.name} needs", remedy)


def require_gain(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for a model that packing does not make smaller."""
    name = checkpoint.name
    stored = checkpoint.tensors.values()
    coded = next(iter(checkpoint.codings), None)
    if isinstance(coded, Exponents | Residual):
        raise UserError(f"{name} is packed already: run it as it is, or give its source")
    if coded is not None:
        raise UserError(_NO_GAIN.format(name, coded.name))
    share = expected_share(checkpoint)
    if share is None or share > WORTH_PACKING:
        kinds = ", ".join(sorted({entry.dtype for entry in stored}))
        kept = "" if share is None else f", of which a sample would keep {share:.0%}"
        raise UserError(f"{name}: {_REQUIREMENT}, its weights are {kinds}{kept}: run it as it is")


def refuse_gguf(model: str | os.PathLike[str]) -> None:
    """Raise `UserError` for a model in a GGUF file, which is not packed."""
    file = gguf_file(model)
    if file is None:
        return
    stored = Counter[str]()
    for entry in read_gguf_header(file).tensors.values():
        stored[entry.dtype] += entry.num_bytes
    ((kind, _),) = stored.most_common(1) or [("nothing", 0)]
    if kind in MANTISSAS:
        complaint = f"{file.name} is GGUF, and packing is for safetensors"
        raise UserError(f"{complaint}: run it as it is, or give its source")
    raise UserError(_NO_GAIN.format(file.name, kind))
