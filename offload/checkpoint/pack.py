"""`offload pack` and `offload unpack`: a model in 16 bits, coded without loss, and back to the same bytes.

A source file becomes files of about a gibibyte each, so that an interrupted packing has at most that to do again: it
goes on in `NAME.unfinished`, beside the folder to be, with the files that are there. Invariant: the folder itself is
whole from its first moment, and `unpack` gives back every file, byte for byte.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.gguf import gguf_file
from offload.checkpoint.gguf_header import read_gguf_header
from offload.checkpoint.pack_folder import (
    by_source,
    check_disk,
    is_finished,
    made_from,
    others,
    packed_files,
    read_manifest,
    require_apart,
    unfinished,
    write_json,
)
from offload.checkpoint.packed_file import FORMAT, Origin, Packed, original_parts, read_packed, write_original
from offload.checkpoint.packed_writing import Portion, write_packed
from offload.checkpoint.packing_forecast import coded_bytes, forecast, is_packable, window_of
from offload.checkpoint.parts import opened
from offload.checkpoint.safetensors import (
    MANIFEST,
    Checkpoint,
    Stamp,
    open_checkpoint,
    parse_header,
    read_header,
    read_raw_header,
    stamp_of,
)
from offload.checkpoint.tensors import TensorEntry
from offload.config import require
from offload.encoding.exponents import MANTISSAS, Exponents, Window
from offload.errors import ReadError, UserError

_INDEX, _SOURCE_INDEX = "model.safetensors.index.json", "source.safetensors.index.json"
_PORTION_BYTES = 1 << 30
_RULE = "packing is for bfloat16, and for float16 that stems from it"
_NO_GAIN = f"{{}} is stored as {{}}, and {_RULE}: nothing to gain, run it as it is"
_LAYER = re.compile(r"\b(?:layers|block|h)\.(\d+)\.")
Progress = Callable[[int, int], None]


class Outcome(NamedTuple):
    """What came of packing."""

    folder: Path
    source_bytes: int
    packed_bytes: int
    num_files: int
    num_kept: int  # of these, files that an earlier packing had finished, and nobody has looked at since
    was_there: bool = False  # all of it: nothing was packed

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {**self._asdict(), "folder": str(self.folder), "share": self.packed_bytes / max(1, self.source_bytes)}


def pack(model: str | os.PathLike[str], destination: Path, *, progress: Progress) -> Outcome:
    """Write the packed model; at once where the folder holds it already, and on from where it was interrupted.

    Args:
        progress: is called with the bytes of the source that were coded and proved, each counted once, and all of them.

    Raises:
        UserError: the model is none of bfloat16, or of float16 that stems from it, in safetensors, the folder holds
            something else or is the model's own, the source changed since the packing was begun, or the disk is full.
        ReadError: the source changes meanwhile, or cannot be read.
    """
    _refuse_gguf(model)
    checkpoint, destination = open_checkpoint(model), destination.expanduser().resolve()
    _require_gain(checkpoint)
    require_apart(checkpoint.directory, destination)
    source, beside = made_from(checkpoint), _stamps_beside(checkpoint.directory)
    if checkpoint.config_stamp is not None:
        beside[checkpoint.small_files / "config.json"] = checkpoint.config_stamp
    if is_finished(destination, source):
        return _outcome(destination, len(packed_files(destination)))._replace(was_there=True)
    with unfinished(destination, source) as folder:
        portions = _portions(checkpoint)
        kept = {name for name, portion in portions.items() if _is_done(folder / name, portion)}
        check_disk(folder, sum(_expected_bytes(portion) for name, portion in portions.items() if name not in kept))
        all_bytes = sum(entry.num_bytes for portion in portions.values() for entry in portion.tensors.values())
        count = _Counter(2 * all_bytes, progress)
        for name, portion in portions.items():
            if name in kept:
                count(2 * sum(entry.num_bytes for entry in portion.tensors.values()))
            else:
                write_packed(folder / name, portion, count)
                _require_unchanged(checkpoint, portion.path)
        for path, stamp in beside.items():
            _copy_unchanged(path, stamp, folder / (_SOURCE_INDEX if path.name == _INDEX else path.name))
        _write_index(folder, portions)
    return _outcome(destination, len(kept))


def unpack(model: Path, destination: Path, *, progress: Progress) -> Path:
    """Write the files that `model` was packed from; returns their folder. Raises `UserError` where that cannot be."""
    folder, destination = model.expanduser().resolve(), destination.expanduser().resolve()
    manifest, found = read_manifest(folder), by_source(folder)
    require_apart(folder, destination)
    source = {**manifest, "unpacks": str(folder)}
    if not is_finished(destination, source):
        _write_originals(folder, found, destination, source, progress)
    (destination / MANIFEST).unlink()  # at last: what has none, and is not finished, could not be gone on with
    return destination


def _write_originals(
    folder: Path, found: Mapping[str, list[Packed]], destination: Path, source: Mapping[str, Any], progress: Progress
) -> None:
    with unfinished(destination, source) as scratch:
        needed_bytes = sum(own[0].origin.num_bytes for own in found.values())
        check_disk(scratch, needed_bytes - sum(path.stat().st_size for path in scratch.glob("*.safetensors")))
        count, beside = _Counter(needed_bytes, progress), _stamps_beside(folder)
        for name, own in found.items():
            if (scratch / name).is_file():  # whole, since it has its name
                count(own[0].origin.num_bytes)
            else:
                with _leaving(scratch):
                    write_original(scratch / name, own, count)
        for path, stamp in beside.items():
            if path.name not in (MANIFEST, _INDEX):
                _copy_unchanged(path, stamp, scratch / (_INDEX if path.name == _SOURCE_INDEX else path.name))


def verify(model: Path, *, progress: Progress) -> Outcome:
    """Decode every weight of a packed folder and compare checksums. Raises `UserError` where one differs."""
    folder = model.expanduser().resolve()
    read_manifest(folder)
    found = by_source(folder)
    count = _Counter(sum(own[0].origin.num_bytes for own in found.values()), progress)
    for own in found.values():
        for packed in own:
            for _, _, raw in original_parts(packed):
                count(len(raw))
    return _outcome(folder, 0)


def _require_gain(checkpoint: Checkpoint) -> None:
    """Raises `UserError` for a model that packing does nothing for."""
    name, stored = checkpoint.directory.name, checkpoint.tensors.values()
    coded = next((entry.coded.coding for entry in stored if entry.coded is not None), None)
    if isinstance(coded, Exponents):
        raise UserError(f"{name} is packed already: run it as it is, or give its source")
    if coded is not None:
        raise UserError(_NO_GAIN.format(name, coded.name))
    found, kinds = forecast(checkpoint), ", ".join(sorted({entry.dtype for entry in stored}))
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
            raise UserError(f"{file.name} is GGUF, and packing is for safetensors: run it as it is, or give its source")
        raise UserError(_NO_GAIN.format(file.name, kind))


@contextmanager
def _leaving(scratch: Path) -> Iterator[None]:
    """What damage leaves behind is named."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; what was unpacked before is in {scratch}, which may be removed") from None


def _portions(checkpoint: Checkpoint) -> dict[str, Portion]:
    """All packed files to be, by name, in order. Raises `UserError` where a source file could not be restored."""
    found = []
    for path, stamp in zip(checkpoint.shards, checkpoint.stamps, strict=True):
        raw, now = read_raw_header(path)
        entries = dict(sorted(parse_header(path, raw, now.num_bytes).items(), key=lambda item: item[1].lo))
        held_bytes = 8 + len(raw) + sum(entry.num_bytes for entry in entries.values())
        rule = "must have its tensors one behind the other"
        require(held_bytes == stamp.num_bytes, f"{path.name} {rule}", f"{held_bytes} of {stamp.num_bytes} bytes",
                "write it anew with safetensors")  # fmt: skip
        cut = list(_cut(entries))
        for number, tensors in enumerate(cut):
            origin = Origin(path.name, stamp.num_bytes, stamp.written_ns, number, len(cut))
            found.append(Portion(path, origin, b"" if number else raw, tensors, _windows(path, tensors)))
    if len(found) == 1:
        return {"model.safetensors": found[0]}
    return {f"model-{n:05d}-of-{len(found):05d}.safetensors": one for n, one in enumerate(found, start=1)}


def _cut(entries: Mapping[str, TensorEntry]) -> Iterator[dict[str, TensorEntry]]:
    """Consecutive tensors of about a portion's size; a layer is cut only where its tensors lie apart anyhow."""
    own, layer = dict[str, TensorEntry](), ""
    for name, entry in entries.items():
        before, layer = layer, (_LAYER.search(name) or [""])[0]
        if layer != before and sum(one.num_bytes for one in own.values()) >= _PORTION_BYTES:
            yield own
            own = {}
        own[name] = entry
    yield own


def _expected_bytes(portion: Portion) -> int:
    """What a packed file is going to take."""
    taken = ((entry, portion.windows.get(name)) for name, entry in portion.tensors.items())
    return sum(entry.num_bytes if window is None else coded_bytes(entry, window) for entry, window in taken)


def _windows(path: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, Window]:
    """Of the tensors that coding makes smaller."""
    with opened(path, os.O_RDONLY) as fd:
        found = {name: window_of(fd, entry) for name, entry in tensors.items() if is_packable(entry)}
    return {
        name: window for name, window in found.items() if coded_bytes(tensors[name], window) < tensors[name].num_bytes
    }


def _is_done(path: Path, portion: Portion) -> bool:
    """Whether an earlier packing has finished this file: it has its name, which none gets before it was proved."""
    if not path.is_file():
        return False
    packed = read_packed(path)
    return packed.origin == portion.origin and packed.names == [*portion.tensors]


def _write_index(folder: Path, portions: Mapping[str, Portion]) -> None:
    headers = {name: read_header(folder / name)[0] for name in portions}
    if len(headers) > 1:
        total_bytes = sum(entry.num_bytes for entries in headers.values() for entry in entries.values())
        weight_map = {tensor: name for name, entries in headers.items() for tensor in entries}
        write_json(
            folder / _INDEX, {"metadata": {"total_size": total_bytes, "format": FORMAT}, "weight_map": weight_map}
        )


def _outcome(folder: Path, num_kept: int) -> Outcome:
    paths = packed_files(folder)
    source_bytes = sum(own["num_bytes"] for own in read_manifest(folder)["files"].values())
    return Outcome(folder, source_bytes, sum(path.stat().st_size for path in paths), len(paths), num_kept)


def _require_unchanged(checkpoint: Checkpoint, path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd:
        if Stamp.of(fd) != checkpoint.stamps[checkpoint.shards.index(path)]:
            raise ReadError(f"{path.name} changed while it was packed: pack the model again")


def _stamps_beside(folder: Path) -> dict[Path, Stamp | None]:
    return {path: stamp_of(path) for path in others(folder)}


def _copy_unchanged(path: Path, stamp: Stamp | None, copy: Path) -> None:
    shutil.copyfile(path, copy)
    if stamp_of(path) != stamp:
        raise ReadError(f"{path.name} changed while it was to be copied: start again when nobody writes to it")


class _Counter:
    """Adds up bytes for a bar."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._done_bytes, self._total_bytes, self._progress = 0, total_bytes, progress

    def __call__(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress(self._done_bytes, self._total_bytes)
