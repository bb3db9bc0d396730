"""All weights of a model as they lie on disk, whatever a text needs of them: what `offload verify` is asked about.

Nothing has to be known of the model, so that any checkpoint of safetensors, and any GGUF file, can be asked about; what
is of a kind that is not read is bytes, no numbers. Invariant: the spans of a file follow one another and are all of it.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from offload.checkpoint.download import in_cache
from offload.checkpoint.gguf import files_of, gguf_file
from offload.checkpoint.gguf_header import read_gguf_header
from offload.checkpoint.hub import open_headers
from offload.checkpoint.numbers import Form, form_of, is_matrix
from offload.checkpoint.parts import PART_BYTES
from offload.checkpoint.safetensors import MANIFEST, Stamp, find_shards, is_hub_id, read_header
from offload.checkpoint.tensors import TensorEntry
from offload.errors import UnreadError, UserError, reason

_UNREAD = ""  # name of the span that is all of a file whose header is not read

_Headers = dict[Path, tuple[dict[str, TensorEntry], Stamp]]


class Damage(NamedTuple):
    """What is wrong with a file, or with a tensor in it."""

    file: str
    tensor: str  # "" where it is of none alone
    what: str


class Span(NamedTuple):
    """A tensor, or the header before all of them, with what lies between it and the next."""

    name: str | None  # None: the header
    lo: int
    hi: int
    end: int  # of the padding behind it
    form: Form | None = None  # of its numbers, where they are known
    is_matrix: bool = False

    def parts(self) -> Iterator[tuple[int, int]]:
        """Cut where numbers, or blocks of them, end."""
        item_bytes = self.form.item_bytes if self.form else 1
        step = PART_BYTES // item_bytes * item_bytes
        for at in range(self.lo, self.end, step):
            yield at, min(at + step, self.end)


class WholeFile(NamedTuple):
    """A file whose header makes sense, or is not read."""

    path: Path
    stamp: Stamp
    spans: tuple[Span, ...]
    unread: str = ""  # why its header is not; then there is one span, of all of it


class Whole(NamedTuple):
    """A model's files."""

    path: Path  # folder, or first GGUF file
    files: tuple[WholeFile, ...]
    damage: tuple[Damage, ...]  # that names, sizes and headers show
    left_out: Mapping[str, int]  # bytes that no text needs, by what they are of

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self.path if os.path.isdir(self.path) else self.path.parent

    @property
    def is_packed(self) -> bool:
        """Whether `offload pack` has made it."""
        return os.path.isfile(self.folder / MANIFEST)

    @property
    def num_bytes(self) -> int:
        return sum(file.stamp.num_bytes for file in self.files)


def open_whole(model: str) -> Whole:
    """Read the headers of a folder, a GGUF file or a hub id that was downloaded. Raises `UserError` for anything else.

    What damage shows in headers is no error.
    """
    file, places = gguf_file(model), dict[str, str]()
    if file is not None:
        path, shards = file, files_of(file)
    else:
        path = _local(model)
        shards, weight_map = find_shards(path)
        places = weight_map or {}
    headers, unread, damage = _headers(shards, is_gguf=file is not None)
    have = {shard.name: entries for shard, (entries, _) in headers.items()}
    for name, own in places.items():
        if own in have and name not in have[own]:
            damage.append(Damage(own, name, "is not in the file that the index names"))
    words, left_out = _meaning(path, shards)
    files = (
        WholeFile(one, stamp, _spans(entries, stamp, words.get(one, ()))) for one, (entries, stamp) in headers.items()
    )
    others = (_unread_file(one, why) for one, why in unread.items())
    return Whole(path, (*files, *others), tuple(damage), left_out)


def _local(model: str) -> Path:
    """A folder, or what the hub's cache has: nothing is downloaded."""
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return path
    if os.path.exists(path) or not is_hub_id(model):
        raise UserError(f"no model at {path}: give a folder, a GGUF file, or a hub id that was downloaded")
    from huggingface_hub.errors import HFValidationError

    try:
        return in_cache(model)
    except (OSError, HFValidationError) as error:
        raise UserError(
            f"{model} is neither a folder nor in the hub's cache ({reason(error)}): download it first"
        ) from None


def _headers(shards: tuple[Path, ...], *, is_gguf: bool) -> tuple[_Headers, dict[Path, str], list[Damage]]:
    """What headers say, why others are not read, and what is damaged."""
    found, unread, damage = _Headers(), dict[Path, str](), list[Damage]()
    for path in shards:
        if not os.path.isfile(path):
            damage.append(Damage(path.name, "", "is no regular file" if os.path.lexists(path) else "is missing"))
            continue
        if not os.access(path, os.R_OK):
            raise UserError(f"cannot read {path}: check that it is yours to read")
        try:
            if is_gguf:
                header = read_gguf_header(path)
                found[path] = header.tensors, header.stamp
            else:
                found[path] = read_header(path)
        except UnreadError as error:
            unread[path] = _without_name(error, path).rpartition(": ")[0]  # the remedy is for whoever wants to run it
        except UserError as error:
            damage.append(Damage(path.name, "", _without_name(error, path)))
    return found, unread, damage


def _without_name(error: UserError, path: Path) -> str:
    return str(error).removeprefix(f"{path.name}: ").removeprefix(f"{path.name} ")


def _unread_file(path: Path, why: str) -> WholeFile:
    stamp = Stamp.of(path)
    spans = Span(None, 0, 0, 0), Span(_UNREAD, 0, stamp.num_bytes, stamp.num_bytes)
    return WholeFile(path, stamp, spans, why)


def _meaning(path: Path, shards: tuple[Path, ...]) -> tuple[dict[Path, set[int]], Mapping[str, int]]:
    """Where words of coded weights begin, by file, and what no text needs; nothing of models that cannot be run."""
    words = dict[Path, set[int]]()
    try:
        checkpoint = open_headers(path)
    except UserError:
        return words, {}
    for entry in checkpoint.tensors.values():
        if entry.coded is not None:
            words.setdefault(shards[entry.shard], set()).add(entry.lo)
    return words, checkpoint.left_out


def _spans(entries: Mapping[str, TensorEntry], stamp: Stamp, words: Collection[int]) -> tuple[Span, ...]:
    ordered = sorted(entries.items(), key=lambda item: (item[1].lo, item[1].hi))
    starts = [*(entry.lo for _, entry in ordered), stamp.num_bytes]
    spans = [Span(None, 0, starts[0], starts[0])]
    for (name, entry), (_, end) in zip(ordered, pairwise(starts), strict=True):
        form = form_of(entry.dtype, name)
        is_float = form is not None and form.endless is not None
        matters = entry.lo in words or (is_float and is_matrix(entry.shape))
        spans.append(Span(name, entry.lo, entry.hi, end, form, matters))
    return tuple(spans)
