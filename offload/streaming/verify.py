"""`offload verify`: whether a model's files are what they were, and hold numbers that a model can have.

What they were is known from the hub, which leaves checksums beside what it gives, from the manifest of an earlier time,
or, of a packed model, from its own checksums. Invariant: a manifest is only written of files that nothing speaks
against, and replaces one only where the hub's sum speaks for the files.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.hub_sums import changed_small_files, hub_sum, is_sha256
from offload.checkpoint.manifest import SUFFIX, Sums, differences, read_manifest, write_manifest
from offload.checkpoint.numbers import NOT_FINITE, Top, is_finite, remarks
from offload.checkpoint.safetensors import SUMS, stamp_of
from offload.checkpoint.whole import UNREAD, Damage, Whole, WholeFile
from offload.config import format_bytes
from offload.errors import ReadError, UserError
from offload.planning.profile import cache_folder
from offload.streaming.measuring import Measured, measure
from offload.streaming.sight import has_zeros

Progress = Callable[[int, int], None]
_OTHER_SUM = "its bytes are not those of the hub (sha256)"


class Report(NamedTuple):
    """What was found."""

    path: Path
    num_files: int
    num_bytes: int
    elapsed_s: float
    damage: list[Damage]
    notes: list[str]
    manifest: Path
    num_as_before: int  # files that are as the manifest has them
    num_as_hub: int  # files whose sha256 was compared with the hub's, now or when the manifest was written
    num_decoded: int  # packed files that decode to what was packed
    is_written: bool  # the manifest

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        told = self._asdict() | {"path": str(self.path), "manifest": str(self.manifest)}
        told["damage"] = [one._asdict() for one in self.damage]
        return {"is_sound": not self.damage, **told, "bytes_per_s": self.num_bytes / max(self.elapsed_s, 1e-9)}


def verify(whole: Whole, manifest: Path | None, *, progress: Progress) -> Report:
    """Read all of a model once, and say what is wrong.

    Args:
        manifest: to compare with, and to write; default: `default_manifest`.

    Raises:
        UserError: the manifest is unusable, or files change meanwhile.
    """
    manifest, started_s = manifest or default_manifest(whole), time.monotonic()
    known = _comparable(read_manifest(manifest), whole)
    sums = [hub_sum(file.path) for file in whole.files]
    wanted = [one if is_sha256(one) else None for one in sums]
    hashed = {
        index
        for index, (file, sha256) in enumerate(zip(whole.files, wanted, strict=True))
        if sha256 is not None and (file.path.name not in known or known[file.path.name].sha256 != sha256)
    }
    measured = _measured(whole, hashed, progress)
    judged = [
        _judge(file, one, known.get(file.path.name), sha256, manifest)
        for file, one, sha256 in zip(whole.files, measured, wanted, strict=True)
    ]
    fresh = [file for file in whole.files if file.path.name not in known] if whole.is_packed else []
    damage = [*whole.damage, *(one for own in judged for one in own)]
    named = {(one.file, one.tensor) for one in damage}
    damage += [one for one in _undecoded(fresh) if (one.file, one.tensor) not in named]
    found = {
        file.path.name: _sums(file, one, sha256)
        for file, one, sha256 in zip(whole.files, measured, wanted, strict=True)
    }
    notes = [*_notes(whole, measured), *_changed(whole), *_gone(known, found, manifest)]
    is_written = not damage and found != known
    if is_written and (why := _unwritable(manifest, found)):
        notes.append(why)
        is_written = False
    by_manifest = [file for index, file in enumerate(whole.files) if file.path.name in known and index not in hashed]
    counts = len(by_manifest), sum(one is not None for one in wanted), len(fresh)
    elapsed_s = time.monotonic() - started_s
    size = len(whole.files), whole.num_bytes
    return Report(whole.path, *size, elapsed_s, damage, notes, manifest, *counts, is_written)


def _comparable(known: Mapping[str, Sums], whole: Whole) -> dict[str, Sums]:
    """Without sums of a time when a file was not read, and had other parts."""
    read = {file.path.name for file in whole.files if not file.unread}
    return {name: own for name, own in known.items() if name not in read or UNREAD not in own.tensors}


def _undecoded(packed: Sequence[WholeFile]) -> list[Damage]:
    if not packed:
        return []
    from offload.checkpoint.packed_proof import undecoded  # brings torch along, which nothing else here needs

    return [one for file in packed for one in undecoded(file.path)]


def default_manifest(whole: Whole) -> Path:
    """Beside the files; of a model in the hub's cache, which is the hub's, in this program's own."""
    if not os.path.isdir(whole.path):
        return whole.path.with_name(whole.path.name + SUFFIX)
    if whole.path.parent.name == "snapshots":
        return cache_folder() / "sums" / f"{whole.path.parent.parent.name}-{whole.path.name[:12]}.json"
    return whole.path / SUMS


def _measured(whole: Whole, hashed: set[int], progress: Progress) -> list[Measured]:
    done_bytes, total_bytes = 0, whole.num_bytes

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(done_bytes, total_bytes)

    try:
        measured = measure(whole.files, hashed, on_bytes) if whole.files else []
    except ReadError as error:
        raise UserError(f"{error}") from None
    for file in whole.files:
        if stamp_of(file.path) != file.stamp:
            raise UserError(f"{file.path.name} was changed while it was read: ask again when nobody writes to it")
    return measured


def _judge(file: WholeFile, found: Measured, known: Sums | None, sha256: str | None, manifest: Path) -> list[Damage]:
    name = file.path.name
    if found.failure:
        return [Damage(name, "", found.failure)]
    damage = [
        Damage(name, span.name, NOT_FINITE)
        for span, bits in zip(file.spans, found.tops, strict=True)
        if span.name is not None and span.form is not None and not is_finite(bits, span.form)
    ]
    is_as_hub = found.sha256 is not None and found.sha256 == sha256
    if known is not None and not is_as_hub:
        seen = {one.tensor for one in damage}
        changed = differences(name, _sums(file, found, sha256), known, manifest)
        damage += [one for one in changed if one.tensor not in seen]
    if found.sha256 is not None and not is_as_hub:
        damage.append(Damage(name, "", _OTHER_SUM))
    return damage


def _sums(file: WholeFile, found: Measured, sha256: str | None) -> Sums:
    tensors = {span.name: own for span, own in zip(file.spans, found.sums, strict=True) if span.name is not None}
    return Sums(file.stamp.num_bytes, file.stamp.written_ns, sha256, found.sums[0], tensors)


def _notes(whole: Whole, measured: Sequence[Measured]) -> list[str]:
    tops = [
        Top(span.name, file.path.name, span.is_matrix, span.form, bits)
        for file, found in zip(whole.files, measured, strict=True)
        for span, bits in zip(file.spans, found.tops, strict=True)
        if span.name is not None and span.form is not None and span.hi > span.lo and is_finite(bits, span.form)
        and not found.failure
    ]  # fmt: skip
    lines = remarks(tops, has_zeros=has_zeros(whole.folder))
    lines += [f"{one.path.name}: its numbers were not looked at: {one.unread}" for one in whole.files if one.unread]
    kinds = (f"{format_bytes(num_bytes)} of {kind}" for kind, num_bytes in whole.left_out.items())
    return [*lines, *([f"read too, although no text needs it: {', '.join(kinds)}"] if whole.left_out else [])]


def _changed(whole: Whole) -> list[str]:
    names = [*changed_small_files(whole.folder, {file.path.name for file in whole.files})]
    return [f"not as the hub has it: {', '.join(names)}"] if names else []


def _gone(known: Mapping[str, Sums], found: Mapping[str, Sums], manifest: Path) -> list[str]:
    gone = sorted(known.keys() - found.keys())
    return [f"{manifest.name} has files that the model has not: {', '.join(gone[:3])}"] if gone else []


def _unwritable(manifest: Path, found: Mapping[str, Sums]) -> str:
    """Why a manifest cannot be written; empty where it was."""
    try:
        manifest.parent.mkdir(parents=True, exist_ok=True)
        write_manifest(manifest, found)
    except OSError as error:
        return f"cannot write {manifest} ({error.strerror}): nothing to compare with the next time, see `manifest`"
    return ""
