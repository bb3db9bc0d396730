"""Writes stores: documents are encoded in batches, sorted chunk by chunk, and valid from one moment to the next.

Invariant: whatever ends a build, there is a whole store or none; whatever ends an addition, there is the old one or the
new one. The memory that is taken beside the process's own is 5 bytes for every byte of a chunk's text, and a batch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.checkpoint.folder_lock import locked, locked_anew
from offload.config import format_bytes, require
from offload.datastore.chunk import MAX_TEXT_BYTES, ReversedText, Width, sorted_positions
from offload.datastore.store import (
    MANIFEST_NAME,
    ChunkEntry,
    FileEntry,
    Store,
    chunk_files,
    read_store,
    require_tokenizer,
    scratch_folder,
    sorting_bytes,
    vocabulary_sha256,
    vocabulary_size,
)
from offload.errors import UserError
from offload.machine import rss_bytes

_BATCH_CHARS = 1 << 20  # encoded together; tokenizers take some 100 bytes for each token, and heed no Ctrl-C meanwhile
_RESERVE_BYTES = 256 << 20  # for a batch, and what libraries keep
_LEAST_ROOM = 1 << 16  # tokens of a chunk
_BLOCK_BYTES = 1 << 24
_ROOM = "free some room or take another place"


class Coder(NamedTuple):
    """A tokenizer, as far as building needs one."""

    name: str  # folder or hub id
    vocabulary: Mapping[str, int]
    encode: Callable[[list[str]], Iterable[Sequence[int]]]  # without tokens that only begin or end a prompt


OnPhase = Callable[[str], object]  # hears of what begins, where nobody knows how long it takes


def build(path: Path, documents: Iterable[str], coder: Coder, ram_bytes: int, on_phase: OnPhase) -> Store:
    """A new store at `path`. Raises `UserError` where something is there, the corpus is empty, or the disk is full."""
    room = chunk_room(ram_bytes, coder)
    with _refusing_bad_places(path), _workspace(path) as folder:
        writer = _ChunkWriter(folder, vocabulary_size(coder.vocabulary), room, on_phase)
        chunks = tuple(writer.write(_encoded(documents, coder, room), 0))
        require(bool(chunks), "a corpus must hold some text", "none", "name other files")
        named = (coder.name, vocabulary_sha256(coder.vocabulary))
        store = Store(path, vocabulary_size(coder.vocabulary), *named, chunks)
        _write_manifest(folder / MANIFEST_NAME, store)
        _sync_folder(folder)
    return store


def append(path: Path, documents: Iterable[str], coder: Coder, ram_bytes: int, on_phase: OnPhase) -> Store:
    """Add chunks to a store; readers that have it open go on with what it was. Raises what `build` raises."""
    room = chunk_room(ram_bytes, coder)
    with _refusing_bad_places(path), _locked_store(path):
        store = read_store(path)
        require_tokenizer(store, coder.vocabulary)
        with _discarding_what_is_not_named(path):
            writer = _ChunkWriter(path, store.vocab_size, room, on_phase)
            chunks = tuple(writer.write(_encoded(documents, coder, room), len(store.chunks)))
            require(bool(chunks), "what is added must hold some text", "none", "name other files")
            store = store._replace(chunks=(*store.chunks, *chunks))
            _sync_folder(path)  # so that what the new file names is there first
            _write_manifest(path / f".{MANIFEST_NAME}", store)
            os.replace(path / f".{MANIFEST_NAME}", path / MANIFEST_NAME)
            _sync_folder(path)
    return store


def chunk_room(ram_bytes: int, coder: Coder) -> int:
    """Tokens and separators of a chunk that can be sorted within a budget for the whole process. Raises `UserError`."""
    width = Width.of(vocabulary_size(coder.vocabulary)).num_bytes
    taken_bytes = rss_bytes() + _RESERVE_BYTES
    least_bytes = taken_bytes + sorting_bytes(_LEAST_ROOM * width)
    sizes = (format_bytes(least_bytes), format_bytes(ram_bytes))
    require(ram_bytes >= least_bytes, f"`ram` must be at least {sizes[0]} here", sizes[1], "give more")
    return min((ram_bytes - taken_bytes) // sorting_bytes(width), MAX_TEXT_BYTES // width - 1)


def _encoded(documents: Iterable[str], coder: Coder, room: int) -> Iterator[NDArray[np.int64]]:
    """Token ids, in pieces where they would fill more than a chunk."""
    for batch in _batches(documents):
        for ids in coder.encode(batch):
            tokens = np.asarray(ids, np.int64)
            for lo in range(0, len(tokens), room - 1):
                yield tokens[lo : lo + room - 1]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, num_chars = list[str](), 0
    for document in documents:
        batch.append(document)
        num_chars += len(document)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


class _ChunkWriter(NamedTuple):
    """Sorts and writes chunk after chunk into a folder."""

    folder: Path
    vocab_size: int
    room: int  # tokens and separators of one chunk
    on_phase: OnPhase

    def write(self, documents: Iterator[NDArray[np.int64]], first: int) -> Iterator[ChunkEntry]:
        """Documents in as few chunks as have room for them, numbered from `first`."""
        index, held = first, next(documents, None)
        while held is not None:
            text = ReversedText(self.vocab_size, self.room)
            while held is not None and len(held) < text.room:
                text.add(held)
                held = next(documents, None)
            if text.num_tokens:
                yield self._write_one(chunk_files(self.folder, index), text)
                index += 1

    def _write_one(self, files: tuple[Path, Path], text: ReversedText) -> ChunkEntry:
        self.on_phase(f"sorting {text.num_tokens:,} tokens")
        tokens_B = text.tokens_B
        order_M = _heeding_signals(lambda: sorted_positions(tokens_B))
        entries = _write_file(files[0], tokens_B.view(np.uint8)), _write_file(files[1], order_M.view(np.uint8))
        return ChunkEntry(text.num_documents, text.num_tokens, *entries)


def _heeding_signals(work: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
    """In a thread that nobody waits for at the end: the first one hears no Ctrl-C while a library's function runs."""
    done: SimpleQueue[NDArray[np.int32] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except BaseException as error:  # of whatever kind: it is raised where the result is waited for
            done.put(error)

    Thread(target=run, name="offload-sort", daemon=True).start()
    result = done.get()
    if isinstance(result, BaseException):
        raise result
    return result


def _write_file(path: Path, raw_B: NDArray[np.uint8]) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for lo in range(0, len(raw_B), _BLOCK_BYTES):
            block = raw_B[lo : lo + _BLOCK_BYTES].data
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(raw_B), digest.hexdigest())


def _write_manifest(path: Path, store: Store) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(store.manifest(), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _workspace(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, locked: it takes that name when the body ends well, and is removed when not."""
    is_folder = path.is_dir() and path.name != "" and not path.is_symlink()  # one that a rename can replace
    is_free = not os.path.lexists(path) or (is_folder and not any(path.iterdir()))
    if not is_free:
        raise UserError(f"a new store must have a name of its own, {path} exists: take another, or append to it")
    folder = scratch_folder(path)
    with locked_anew(folder):
        for leftover in folder.iterdir():
            leftover.unlink()
        try:
            yield folder
            os.rename(folder, path)
        except BaseException:
            shutil.rmtree(folder)
            raise
        _sync_folder(path.parent)


@contextmanager
def _locked_store(path: Path) -> Iterator[None]:
    """Against others that write. Raises `UserError` where one does, or where there is no store."""
    if not path.is_dir():
        read_store(path)  # which says what is missing
    with locked(path):
        yield


@contextmanager
def _discarding_what_is_not_named(path: Path) -> Iterator[None]:
    """Files of chunks that `store.json` does not name when the body fails: it may have failed just after it did."""
    try:
        yield
    except BaseException:
        named = {file for index in range(len(read_store(path).chunks)) for file in chunk_files(path, index)}
        for file in (*path.glob("chunk-*"), path / f".{MANIFEST_NAME}"):
            if file not in named:
                file.unlink(missing_ok=True)
        raise


@contextmanager
def _refusing_bad_places(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # of who reads what is said
        raise
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}): nothing of it was kept, {_ROOM}") from None
