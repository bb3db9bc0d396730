"""`offload verify`: whether a model's files are what they were, and hold numbers that a model can have.

What they were is known from the hub, which leaves checksums beside what it gives, from the manifest of an earlier time,
or, of a packed model, from its own checksums. Invariant: a manifest is only written of files that nothing speaks
against, replaces one only where the hub's sum speaks for the files, and never one that was only named.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.hub_sums import changed_small_files, hub_sum, is_sha256
from offload.checkpoint.manifest import SUFFIX, Sums, differences, have_same_bytes, read_manifest, write_manifest
from offload.checkpoint.numbers import NOT_FINITE, Top, is_finite, remarks
from offload.checkpoint.safetensors import SUMS, stamp_of
from offload.checkpoint.whole import Damage, Whole, WholeFile
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
    num_as_before: int  # files without damage that are as the manifest has them
    num_as_hub: int  # such files that have the hub's sha256: compared now, or when the manifest was written
    num_decoded: int  # such files of a packed model, that decode to what was packed
    is_written: bool  # the manifest

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        told = self._asdict() | {"path": str(self.path), "manifest": str(self.manifest)}
        told["damage"] = [one._asdict() for one in self.damage]
        return {"is_sound": not self.damage, **told, "bytes_per_s": self.num_bytes / max(self.elapsed_s, 1e-9)}


class _Seen(NamedTuple):
    """A file that was read, and what it should be."""

    file: WholeFile
    measured: Measured
    known: Sums | None  # from the manifest
    wanted: str | None  # the hub's sha256

    @property
    def sums(self) -> Sums:
        """As a manifest has them: of the same bytes what it had, also where their file was touched, or copied."""
        stamp, header = self.file.stamp, self.measured.sums[0]
        spans = zip(self.file.spans, self.measured.sums, strict=True)
        tensors = {span.name: own for span, own in spans if span.name is not None}
        found = Sums(stamp.num_bytes, stamp.written_ns, self.wanted, header, tensors)
        if self.known is None or not have_same_bytes(found, self.known):
            return found
        return self.known._replace(sha256=self.wanted or self.known.sha256)

    @property
    def is_as_before(self) -> bool:
        """Whether it has the bytes of the manifest."""
        return self.known is not None and have_same_bytes(self.sums, self.known)


def verify(whole: Whole, manifest: Path | None, *, may_write: bool = False, progress: Progress) -> Report:
    """Read all of a model once, and say what is wrong.

    Args:
        manifest: to compare with; default: `default_manifest`, which is written as well.
        may_write: a manifest that is named, too.

    Raises:
        UserError: the manifest is unusable, or files change meanwhile.
    """
    started_s, may_write = time.monotonic(), may_write or manifest is None
    manifest = manifest or default_manifest(whole)
    known = _comparable(_known(manifest, may_write=may_write), whole)
    small = _small(whole)  # before hours of reading
    seen = _seen(whole, known, progress)
    damage = [*whole.damage, *(one for own in seen for one in _judge(own, manifest))]
    named = {(one.file, one.tensor) for one in damage}
    fresh = {own.file.path for own in seen if own.known is None} if whole.is_packed else set[Path]()
    damage += [one for one in _undecoded(fresh) if (one.file, one.tensor) not in named]
    found = {own.file.path.name: own.sums for own in seen}
    notes = [*_notes(whole, seen), *small, *_gone(known, found, manifest)]
    is_written = may_write and not damage and found != known
    if is_written and (why := _unwritable(manifest, found)):
        notes.append(why)
        is_written = False
    damaged = {one.file for one in damage}
    counts = _counts([own for own in seen if own.file.path.name not in damaged], fresh)
    size, elapsed_s = (len(whole.files), whole.num_bytes), time.monotonic() - started_s
    return Report(whole.path, *size, elapsed_s, damage, notes, manifest, *counts, is_written)


def _counts(sound: Sequence[_Seen], decoded: Set[Path]) -> tuple[int, int, int]:
    """Of these files: as before, as the hub has them, and decoded."""
    as_before = sum(own.is_as_before for own in sound)
    return as_before, sum(own.wanted is not None for own in sound), sum(own.file.path in decoded for own in sound)


def _known(manifest: Path, *, may_write: bool) -> dict[str, Sums]:
    if not may_write and not os.path.lexists(manifest):
        raise UserError(f"no manifest at {manifest}: check the path, or give `write` as well to have it written there")
    return read_manifest(manifest)


def _comparable(known: Mapping[str, Sums], whole: Whole) -> dict[str, Sums]:
    """Without sums of a time when a file was not read, and had other parts and no header."""
    read = {file.path.name for file in whole.files if not file.unread}
    return {name: own for name, own in known.items() if own.header or name not in read}


def _undecoded(packed: Set[Path]) -> list[Damage]:
    if not packed:
        return []
    from offload.checkpoint.packed_file import undecoded  # brings torch along, which nothing else here needs

    return [one for path in sorted(packed) for one in undecoded(path)]


def default_manifest(whole: Whole) -> Path:
    """Beside the files; of a model in the hub's cache, which is the hub's, in this program's own."""
    path = Path(os.path.abspath(whole.path))  # links are not followed: files of the cache are links out of a commit
    for commit in (path, *path.parents):
        snapshots, repo = commit.parent, commit.parent.parent
        if snapshots.name == "snapshots" and repo.name.startswith("models--"):
            name = "-".join((repo.name, commit.name[:12], *path.relative_to(commit).parts))
            return cache_folder() / "sums" / f"{name}.json"
    return whole.path / SUMS if os.path.isdir(whole.path) else whole.path.with_name(whole.path.name + SUFFIX)


def _seen(whole: Whole, known: Mapping[str, Sums], progress: Progress) -> list[_Seen]:
    """Read all files. The sha256 is taken of those for which no manifest has it yet."""
    before = [known.get(file.path.name) for file in whole.files]
    wanted = [one if is_sha256(one) else None for one in (hub_sum(file.path) for file in whole.files)]
    noted = [None if own is None else own.sha256 for own in before]
    hashed = {index for index, one in enumerate(wanted) if one not in (None, noted[index])}
    measured = _measured(whole, hashed, progress)
    return [_Seen(*one) for one in zip(whole.files, measured, before, wanted, strict=True)]


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


def _judge(seen: _Seen, manifest: Path) -> list[Damage]:
    name, found = seen.file.path.name, seen.measured
    if found.failure:
        return [Damage(name, "", found.failure)]
    damage = [
        Damage(name, span.name, NOT_FINITE)
        for span, bits in zip(seen.file.spans, found.tops, strict=True)
        if span.name is not None and span.form is not None and not is_finite(bits, span.form)
    ]
    is_as_hub = found.sha256 is not None and found.sha256 == seen.wanted
    if seen.known is not None and not is_as_hub:
        odd = {one.tensor for one in damage}
        damage += [one for one in differences(name, seen.sums, seen.known, manifest) if one.tensor not in odd]
    if found.sha256 is not None and not is_as_hub:
        damage.append(Damage(name, "", _OTHER_SUM))
    return damage


def _notes(whole: Whole, seen: Sequence[_Seen]) -> list[str]:
    tops = [
        Top(span.name, own.file.path.name, span.is_matrix, span.form, bits)
        for own in seen
        for span, bits in zip(own.file.spans, own.measured.tops, strict=True)
        if span.name is not None and span.form is not None and span.hi > span.lo and is_finite(bits, span.form)
        and not own.measured.failure
    ]  # fmt: skip
    lines = remarks(tops, has_zeros=has_zeros(whole.folder))
    lines += [f"{one.path.name}: its numbers were not looked at: {one.unread}" for one in whole.files if one.unread]
    kinds = (f"{format_bytes(num_bytes)} of {kind}" for kind, num_bytes in whole.left_out.items())
    return [*lines, *([f"read too, although no text needs it: {', '.join(kinds)}"] if whole.left_out else [])]


def _small(whole: Whole) -> list[str]:
    """What the hub's sums say of configs, tokenizers and the like."""
    changed, unread = changed_small_files(whole.folder, {file.path.name for file in whole.files})
    lines = [f"not as the hub has it: {', '.join(changed)}"] if changed else []
    return [*lines, f"cannot be read and held against the hub's sum: {', '.join(unread)}"] if unread else lines


def _gone(known: Mapping[str, Sums], found: Mapping[str, Sums], manifest: Path) -> list[str]:
    gone, new = sorted(known.keys() - found.keys()), sorted(found.keys() - known.keys())
    lines = [f"{manifest.name} has files that the model has not: {', '.join(gone[:3])}"] if gone else []
    return [*lines, f"{manifest.name} lacks files of the model: {', '.join(new[:3])}"] if known and new else lines


def _unwritable(manifest: Path, found: Mapping[str, Sums]) -> str:
    """Why a manifest cannot be written; empty where it was."""
    try:
        manifest.parent.mkdir(parents=True, exist_ok=True)
        write_manifest(manifest, found)
    except OSError as error:
        left = "it stays as it was" if os.path.exists(manifest) else "nothing to compare with the next time"
        return f"cannot write {manifest} ({error.strerror}): {left}; `manifest` and `write` name another place"
    return ""
