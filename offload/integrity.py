"""`offload verify`: whether a model's files are what they were, and their numbers are finite.

What the files were is known from the hub or a manifest (`checkpoint/whole.py`), or, of a packed
model, from its own checksums.

Invariant: memory holds a few parts, however large the files are, and each byte is read once, at the
speed of the disk. A manifest is only written where that is asked for, for files without damage; it
replaces one only where the hub's checksum confirms the files. A file in a folder of its own is not
compared with the hub once it was written to; in the cache all files are.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from threading import Condition, local
from typing import Any, NamedTuple

import numpy as np

from offload.checkpoint.files import (
    PART_BYTES,
    Progress,
    counter,
    in_order,
    require_writable,
    stamp_of,
)
from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, SlabRead, allocate
from offload.checkpoint.numbers import NOT_FINITE, TensorMaximum, is_finite, remarks, top_bits
from offload.checkpoint.whole import (
    Damage,
    FileSums,
    ModelSpans,
    Span,
    WholeFile,
    crc32_of_scratch,
    default_manifest,
    differences,
    have_same_bytes,
    hub_sum,
    is_sha256,
    read_manifest,
    small_file_notes,
    write_manifest,
)
from offload.errors import ReadError, UserError
from offload.machine import num_cores
from offload.streaming.disk import DiskReader, drop, finish
from offload.streaming.scan import has_zeros
from offload.units import format_bytes

_NUM_AHEAD = 4  # batches that are read while all cores compute
_CACHED_BYTES = 512 << 10  # a block that fits a processor's cache
_BUFFER_BYTES = PART_BYTES + 2 * BLOCK_BYTES
_ELSEWHERE = "`manifest` and `write` name another place"
_OTHER_SUM = "its bytes are not those of the hub (sha256)"


class FileReading:
    """A file, what it should be, and what is found in it so far, as far as the disk gave it.

    Attributes:
        known: its checksums in the manifest.
        wanted: the hub's sha256, which is computed unless the manifest has it.
        crcs: for each span, the CRC-32 of its parts.
        tops: for each span, the largest bits of its numbers.
        failure: why the file could not be read, else empty.
    """

    def __init__(
        self, file: WholeFile, known: FileSums | None = None, wanted: str | None = None
    ) -> None:
        self.file = file
        self.known = known
        self.wanted = wanted
        self.failure = ""
        self.crcs = [""] * len(file.spans)
        self.tops = [0] * len(file.spans)
        is_hashed = wanted not in (None, known and known.sha256)
        self._hashed = hashlib.sha256() if is_hashed else None
        self._turn = 0  # of the batch whose bytes the sha256 wants next
        self._has_turned = Condition()

    @property
    def name(self) -> str:
        return self.file.path.name

    @property
    def sha256(self) -> str | None:
        return None if self._hashed is None else self._hashed.hexdigest()

    @property
    def sums(self) -> FileSums:
        """The checksums; the manifest's own where bytes are the same, also of a copied file."""
        stamp = self.file.stamp
        spans = zip(self.file.spans, self.crcs, strict=True)
        tensors = {span.name: tensor_sums for span, tensor_sums in spans if span.name is not None}
        sums = FileSums(stamp.num_bytes, stamp.written_ns, self.wanted, self.crcs[0], tensors)
        if self.known is None or not have_same_bytes(sums, self.known):
            return sums
        return replace(self.known, sha256=self.wanted or self.known.sha256)

    @property
    def is_as_before(self) -> bool:
        """Whether the file has the bytes of the manifest."""
        return self.known is not None and have_same_bytes(self.sums, self.known)

    def note(self, parts: Sequence[tuple[int, int, int]], outcome: "_Found | ReadError") -> None:
        """Note what was found in the next parts of the file, each a span and [lo, hi)."""
        if isinstance(outcome, ReadError):
            self.failure = self.failure or str(outcome)
            return
        for (span, *_), (crc, bits) in zip(parts, outcome, strict=True):
            self.crcs[span] += f"{crc:08x}"
            self.tops[span] = max(self.tops[span], bits)

    def hash(self, turn: int, stored: np.ndarray | None) -> None:
        """Add a batch to the sha256 once its turn has come; None: it could not be read."""
        if self._hashed is None:
            return
        with self._has_turned:
            self._has_turned.wait_for(lambda: self._turn == turn)
            if stored is not None:
                self._hashed.update(stored.data)
            self._turn += 1
            self._has_turned.notify_all()


class _Batch(NamedTuple):
    """Consecutive parts of a file that are read at once."""

    file: FileReading
    shard: int
    parts: tuple[tuple[int, int, int], ...]  # span, [lo, hi)
    turn: int  # its number in the file, since a sha256 is updated in order

    @property
    def lo(self) -> int:
        return self.parts[0][1]

    @property
    def hi(self) -> int:
        return self.parts[-1][2]


# the CRC-32 of each part of a batch, and the largest bits of its numbers
_Found = list[tuple[int, int]]


def measure(files: Sequence[FileReading], on_bytes: Callable[[int], None]) -> None:
    """Read all of these files once; `on_bytes` hears of the bytes measured.

    Raises `ReadError` for a file that is not the one whose header was read.
    """
    paths = [part.file.path for part in files]
    scratch = local()
    with closing(DiskReader(paths, stamps=[part.file.stamp for part in files])) as reader:

        def look(batch: _Batch) -> tuple[_Batch, _Found | ReadError]:
            stored = None
            try:
                if not hasattr(scratch, "buffer"):
                    scratch.buffer = allocate(_BUFFER_BYTES)
                stored = _read(batch, reader, scratch.buffer)
            except ReadError as error:
                return batch, error
            # others wait for its turn, whatever happened
            finally:
                batch.file.hash(batch.turn, stored)
            return batch, _look(batch, stored)

        left = ((batch,) for batch in _in_turns(files) if not batch.file.failure)
        with closing(in_order(look, left, _NUM_AHEAD)) as looked_at:
            for batch, outcome in looked_at:
                batch.file.note(batch.parts, outcome)
                on_bytes(batch.hi - batch.lo)


def _read(batch: _Batch, reader: DiskReader, buffer: np.ndarray) -> np.ndarray:
    """Return the bytes of a batch, in the buffer. Raises `ReadError`."""
    at = batch.lo % BLOCK_BYTES
    piece = SlabRead(batch.shard, batch.lo, batch.hi, at)
    reads = reader.read(SlabLayout((piece,), {}, _BUFFER_BYTES, is_direct=True), buffer)
    try:
        finish(reads)
    finally:
        drop(reads)
    return buffer[at : at + batch.hi - batch.lo]


def _look(batch: _Batch, stored: np.ndarray) -> _Found:
    """Look at the bytes of a batch, which are overwritten."""
    seen = _Found()
    for index, lo, hi in batch.parts:
        part = stored[lo - batch.lo : hi - batch.lo]
        bits = _top(batch.file.file.spans[index], lo, part)
        seen.append((crc32_of_scratch(part), bits))
    return seen


def _top(span: Span, lo: int, stored: np.ndarray) -> int:
    """Return the largest bits of a part, in blocks that fit a cache: memory is read once."""
    if span.form is None:
        return 0
    stored = stored[: max(0, span.hi - lo)]
    step = _CACHED_BYTES // span.form.item_bytes * span.form.item_bytes
    return max(
        (top_bits(stored[at : at + step], span.form) for at in range(0, len(stored), step)),
        default=0,
    )


def _in_turns(files: Sequence[FileReading]) -> Iterator[_Batch]:
    """Yield batches of a few files in turns, so that as many files are hashed at once."""
    batches = [_batches(shard, file) for shard, file in enumerate(files)]
    for first in range(0, len(files), num_cores()):
        several = batches[first : first + num_cores()]
        yield from (batch for row in zip_longest(*several) for batch in row if batch is not None)


def _batches(shard: int, file: FileReading) -> Iterator[_Batch]:
    """Yield a file's parts in batches of at most `PART_BYTES`, numbered in file order."""
    parts = list[tuple[int, int, int]]()
    turn = 0
    for index, span in enumerate(file.file.spans):
        for lo, hi in span.parts():
            if parts and hi - parts[0][1] > PART_BYTES:
                yield _Batch(file, shard, tuple(parts), turn)
                parts = []
                turn = turn + 1
            parts.append((index, lo, hi))
    if parts:
        yield _Batch(file, shard, tuple(parts), turn)


class Report(NamedTuple):
    """The result of `offload verify`."""

    path: Path
    num_files: int
    num_bytes: int
    elapsed_s: float
    damage: list[Damage]
    notes: list[str]
    manifest: Path
    num_as_before: int  # undamaged files that are as the manifest has them
    num_as_hub: int  # undamaged files with the hub's sha256, compared now or for the manifest
    num_decoded: int  # undamaged files of a packed model that decode to what was packed
    is_written: bool  # whether the manifest was written
    is_lost: bool  # whether it should have been, and the disk refused

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        figures = self._asdict() | {"path": str(self.path), "manifest": str(self.manifest)}
        figures["damage"] = [fault._asdict() for fault in self.damage]
        speed = self.num_bytes / max(self.elapsed_s, 1e-9)
        return {"is_sound": not self.damage, **figures, "bytes_per_s": speed}


def verify(
    whole: ModelSpans, manifest: Path | None, *, may_write: bool = False, progress: Progress
) -> Report:
    """Read all of a model once, and report what is wrong.

    Args:
        manifest: to compare with, which must be there unless it is written; default:
            `default_manifest`, which need not.
        may_write: whether the manifest is written where nothing speaks against the model.

    Raises:
        UserError: the manifest is unusable or cannot be written, or files change meanwhile.
    """
    started_s = time.monotonic()
    if manifest is not None and not may_write and not os.path.lexists(manifest):
        remedy = "check the path, or give `write` as well to have it written there"
        raise UserError(f"no manifest at {manifest}: {remedy}")
    manifest = manifest or default_manifest(whole.path)
    if may_write and not manifest.exists():
        require_writable(manifest, _ELSEWHERE)
    # a file whose header was not read then had other parts
    read = {file.path.name for file in whole.files if not file.unread}
    noted = read_manifest(manifest).items()
    known = {name: sums for name, sums in noted if sums.header or name not in read}
    # small files first, before hours of reading
    small = small_file_notes(whole.folder, {file.path.name for file in whole.files})
    seen = _read_all(whole, known, progress)
    damage = [*whole.damage, *(fault for file in seen for fault in _judge(file, manifest))]
    named = {(fault.file, fault.tensor) for fault in damage}
    fresh = (
        {file.file.path for file in seen if file.known is None} if whole.is_packed else set[Path]()
    )
    if fresh:
        # imports torch, which nothing else here needs
        from offload.packing.damage import undecoded

        found_odd = (fault for path in sorted(fresh) for fault in undecoded(path))
        damage += [fault for fault in found_odd if (fault.file, fault.tensor) not in named]
    measured = {file.name: file.sums for file in seen}
    notes = [*_notes(whole, seen), *small, *_differing_files(known, measured, manifest)]
    is_written = may_write and not damage and measured != known
    failure = _unwritable(manifest, measured) if is_written else ""
    if failure:
        notes.append(failure)
    damaged = {fault.file for fault in damage}
    sound = [file for file in seen if file.name not in damaged]
    return Report(
        path=whole.path,
        num_files=len(whole.files),
        num_bytes=whole.num_bytes,
        elapsed_s=time.monotonic() - started_s,
        damage=damage,
        notes=notes,
        manifest=manifest,
        num_as_before=sum(file.is_as_before for file in sound),
        num_as_hub=sum(file.wanted is not None for file in sound),
        num_decoded=sum(file.file.path in fresh for file in sound),
        is_written=is_written and not failure,
        is_lost=bool(failure),
    )


def _read_all(
    whole: ModelSpans, known: Mapping[str, FileSums], progress: Progress
) -> list[FileReading]:
    """Read all files of a model with their checksums. Raises `UserError` for one that changed."""
    seen = list[FileReading]()
    for file in whole.files:
        wanted = hub_sum(file.path)
        known_sums = known.get(file.path.name)
        seen.append(FileReading(file, known_sums, wanted if is_sha256(wanted) else None))
    try:
        if seen:
            measure(seen, counter(whole.num_bytes, progress))
    except ReadError as error:
        raise UserError(f"{error}") from None
    for file in whole.files:
        if stamp_of(file.path) != file.stamp:
            change = f"{file.path.name} was changed while it was read"
            raise UserError(f"{change}: ask again when no program writes to it")
    return seen


def _judge(seen: FileReading, manifest: Path) -> list[Damage]:
    """Return the damage of one file: numbers that are not finite, and changed bytes."""
    if seen.failure:
        return [Damage(seen.name, "", seen.failure)]
    damage = [
        Damage(seen.name, span.name, NOT_FINITE)
        for span, bits in zip(seen.file.spans, seen.tops, strict=True)
        if span.name is not None and span.form is not None and not is_finite(bits, span.form)
    ]
    sha256 = seen.sha256
    is_as_hub = sha256 is not None and sha256 == seen.wanted
    if seen.known is not None and not is_as_hub:
        odd = {fault.tensor for fault in damage}
        changed = differences(seen.name, seen.sums, seen.known, manifest)
        damage += [fault for fault in changed if fault.tensor not in odd]
    if sha256 is not None and not is_as_hub:
        damage.append(Damage(seen.name, "", _OTHER_SUM))
    return damage


def _notes(whole: ModelSpans, seen: Sequence[FileReading]) -> list[str]:
    """Return lines on odd numbers, files that were not looked at, and unneeded tensors."""
    tops = list[TensorMaximum]()
    for each_file in seen:
        for span, bits in zip(each_file.file.spans, each_file.tops, strict=True):
            if span.name is None or span.form is None or each_file.failure:
                continue
            if span.hi > span.lo and is_finite(bits, span.form):
                tops.append(
                    TensorMaximum(span.name, each_file.name, span.is_matrix, span.form, bits)
                )
    lines = remarks(tops, has_zeros=has_zeros(whole.folder))
    for file in whole.files:
        if file.unread:
            lines.append(f"{file.path.name}: its numbers were not looked at: {file.unread}")
    if whole.left_out:
        kinds = [f"{format_bytes(size)} of {kind}" for kind, size in whole.left_out.items()]
        lines.append(f"read too, although no text needs it: {', '.join(kinds)}")
    return lines


def _differing_files(
    known: Mapping[str, FileSums], measured: Mapping[str, FileSums], manifest: Path
) -> list[str]:
    gone = sorted(known.keys() - measured.keys())
    new = sorted(measured.keys() - known.keys())
    lines = list[str]()
    if gone:
        lines.append(f"{manifest.name} has files that the model has not: {', '.join(gone[:3])}")
    if known and new:
        lines.append(f"{manifest.name} lacks files of the model: {', '.join(new[:3])}")
    return lines


def _unwritable(manifest: Path, measured: Mapping[str, FileSums]) -> str:
    """Write the manifest; return why that failed, empty where it did not."""
    try:
        write_manifest(manifest, measured)
    except OSError as error:
        is_there = os.path.exists(manifest)
        left = "it stays as it was" if is_there else "nothing to compare with the next time"
        return f"cannot write {manifest} ({error.strerror}): {left}; {_ELSEWHERE}"
    return ""
