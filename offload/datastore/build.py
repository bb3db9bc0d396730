"""Build datastores: encode documents in batches, sort them chunk by chunk.

Invariant: however a build ends, there is a whole store or none; however an addition ends, there is
the old store or the new one. In addition to the process's own memory, a build takes 5 bytes for
every byte of a chunk's text, and a batch.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.checkpoint.files import is_free, locked, publish_atomically
from offload.datastore.index import MAX_TEXT_BYTES, ReversedText, TokenWidth, sorted_positions
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
from offload.errors import UserError, require
from offload.machine import rss_bytes
from offload.units import format_bytes

# Encoded together. Tokenizers take about 100 bytes for each token, and delay Ctrl-C.
_BATCH_CHARS = 1 << 20
_RESERVE_BYTES = 256 << 20  # for a batch, and what libraries keep of it
_LEAST_ROOM = 1 << 16  # tokens of a chunk
_WRITE_BYTES = 1 << 24
_ROOM = "free some room or take another place"
OnPhase = Callable[[str], object]  # called with the name of a part whose duration is unknown


class Coder(NamedTuple):
    """The part of a tokenizer that building needs."""

    name: str  # folder or hub id
    vocabulary: Mapping[str, int]
    # encodes without tokens that only begin or end a prompt
    encode: Callable[[list[str]], Iterable[Sequence[int]]]


def build(
    path: Path, documents: Iterable[str], coder: Coder, ram_bytes: int, on_phase: OnPhase
) -> Store:
    """Build a store. Raises `UserError` for a path that exists, an empty corpus or a full disk."""
    room = chunk_room(ram_bytes, coder)
    with _refusing_bad_places(path):
        require_new(path)
        with publish_atomically(path, scratch_folder(path)) as folder:
            writer = _ChunkWriter(folder, vocabulary_size(coder.vocabulary), room, on_phase)
            chunks = tuple(writer.write(_encoded(documents, coder, room), 0))
            require(bool(chunks), "a corpus must hold some text", "none", "name other files")
            named = (coder.name, vocabulary_sha256(coder.vocabulary))
            store = Store(path, vocabulary_size(coder.vocabulary), *named, chunks)
            _write_manifest(folder / MANIFEST_NAME, store)
            _sync_folder(folder)
        _sync_folder(path.parent)
    return store


def append(
    path: Path, documents: Iterable[str], coder: Coder, ram_bytes: int, on_phase: OnPhase
) -> Store:
    """Add chunks to a store; readers keep its old state. Raises as `build` does."""
    room = chunk_room(ram_bytes, coder)
    with _refusing_bad_places(path):
        if not path.is_dir():
            read_store(path)  # raises if the store is missing
    with _refusing_bad_places(path), locked(path):
        store = read_store(path)
        require_tokenizer(store, coder.vocabulary)
        with _discarding_unnamed_chunks(path):
            writer = _ChunkWriter(path, store.vocab_size, room, on_phase)
            chunks = tuple(writer.write(_encoded(documents, coder, room), len(store.chunks)))
            require(bool(chunks), "what is added must hold some text", "none", "name other files")
            store = replace(store, chunks=(*store.chunks, *chunks))
            _sync_folder(path)  # so that files exist before the new `store.json` names them
            _write_manifest(path / f".{MANIFEST_NAME}", store)
            os.replace(path / f".{MANIFEST_NAME}", path / MANIFEST_NAME)
            _sync_folder(path)
    return store


def chunk_room(ram_bytes: int, coder: Coder) -> int:
    """Return the number of tokens and separators of a chunk that can be sorted within `ram_bytes`.

    The budget is that of the whole process. Raises `UserError` if it is too small.
    """
    width = TokenWidth.from_vocab_size(vocabulary_size(coder.vocabulary)).num_bytes
    taken_bytes = rss_bytes() + _RESERVE_BYTES
    least_bytes = taken_bytes + sorting_bytes(_LEAST_ROOM * width)
    requirement = f"`ram` must be at least {format_bytes(least_bytes)} here"
    require(ram_bytes >= least_bytes, requirement, format_bytes(ram_bytes), "give more")
    return min((ram_bytes - taken_bytes) // sorting_bytes(width), MAX_TEXT_BYTES // width - 1)


def _encoded(documents: Iterable[str], coder: Coder, room: int) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of documents, in pieces where they would fill more than a chunk."""
    for batch in _batches(documents):
        for ids in coder.encode(batch):
            tokens = np.asarray(ids, np.int64)
            for lo in range(0, len(tokens), room - 1):
                yield tokens[lo : lo + room - 1]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents in batches of about `_BATCH_CHARS` characters."""
    batch = list[str]()
    num_chars = 0
    for document in documents:
        batch.append(document)
        num_chars += len(document)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch = []
            num_chars = 0
    if batch:
        yield batch


class _ChunkWriter(NamedTuple):
    """Sorts and writes chunk after chunk into a folder."""

    folder: Path
    vocab_size: int
    room: int  # tokens and separators of one chunk
    on_phase: OnPhase

    def write(self, documents: Iterator[NDArray[np.int64]], first: int) -> Iterator[ChunkEntry]:
        """Write documents into as few chunks as can hold them, numbered from `first`."""
        index = first
        document = next(documents, None)
        while document is not None:
            text = ReversedText(self.vocab_size, self.room)
            while document is not None and len(document) < text.room:
                text.add(document)
                document = next(documents, None)
            if text.num_tokens:
                yield self._write_one(chunk_files(self.folder, index), text)
                index += 1

    def _write_one(self, files: tuple[Path, Path], text: ReversedText) -> ChunkEntry:
        self.on_phase(f"sorting {text.num_tokens:,} tokens")
        order_M = _heeding_signals(lambda: sorted_positions(text.tokens_B))
        parts = zip(files, (text.tokens_B, order_M), strict=True)
        entries = [_write_file(path, part.view(np.uint8)) for path, part in parts]
        return ChunkEntry(text.num_documents, text.num_tokens, *entries)


def _heeding_signals(work: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the result of `work()`, run in a daemon thread so that Ctrl-C is handled meanwhile.

    The main thread handles no signal while a library call runs in it.
    """
    done: SimpleQueue[NDArray[np.int32] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        # any exception: it is raised again where the result is waited for
        except BaseException as error:
            done.put(error)

    Thread(target=run, name="offload-sort", daemon=True).start()
    result = done.get()
    if isinstance(result, BaseException):
        raise result
    return result


def _write_file(path: Path, raw_B: NDArray[np.uint8]) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for lo in range(0, len(raw_B), _WRITE_BYTES):
            block = raw_B[lo : lo + _WRITE_BYTES].data
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


def require_new(path: Path) -> None:
    """Raise `UserError` where a new store cannot have this name."""
    if not is_free(path):
        requirement = "a new store must have a name of its own"
        raise UserError(f"{requirement}, {path} exists: take another, or append to it")


@contextmanager
def _discarding_unnamed_chunks(path: Path) -> Iterator[None]:
    """Remove chunks that `store.json` does not name; it is read again, as it may just have changed."""
    try:
        yield
    except BaseException:
        num_chunks = len(read_store(path).chunks)
        named = {file for index in range(num_chunks) for file in chunk_files(path, index)}
        for file in {*path.glob("chunk-*"), path / f".{MANIFEST_NAME}"} - named:
            file.unlink(missing_ok=True)
        raise


@contextmanager
def _refusing_bad_places(path: Path) -> Iterator[None]:
    try:
        yield
    # comes from the reader of the progress messages, not from the store
    except BrokenPipeError:
        raise
    except OSError as error:
        failure = f"cannot write {path} ({error.strerror or error})"
        raise UserError(f"{failure}: nothing of it was kept, {_ROOM}") from None
