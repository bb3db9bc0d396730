"""Build datastores: read documents from files, encode them in batches, sort them chunk by chunk.

Documents are text and code as it is, and the usual layouts of chats and samples in lines of JSON.
Invariant: however a build ends, there is a whole store or none; however an addition ends, there is
the old store or the new one. Beside the process's own memory it takes 5 bytes for every byte of a
chunk's text, and a batch. No document contains bytes that are not UTF-8; skipped files are counted
or named, and a file that was named but cannot be used is an error unless bad ones are to be
skipped.
"""

import codecs
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.checkpoint.files import becoming, is_free, locked, open_regular
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
from offload.errors import UserError, ensure, reason, require
from offload.machine import rss_bytes
from offload.units import format_bytes

# Encoded together: tokenizers take some 100 bytes for each token, and delay Ctrl-C meanwhile.
_BATCH_CHARS = 1 << 20
_RESERVE_BYTES = 256 << 20  # for a batch, and what libraries keep
_LEAST_ROOM = 1 << 16  # tokens of a chunk
_WRITE_BYTES = 1 << 24
_READ_BYTES = 1 << 20
_ROOM = "free some room or take another place"
# Longer texts become several documents, cut at a line's end, so that no file need fit in memory.
_PIECE_CHARS = 1 << 16
_MAX_LINE_BYTES = 64 << 20
_HEAD_BYTES = 8192  # a zero byte in them means that a file is no text, as for git
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # in ShareGPT's files
_LAYOUTS = "text, messages (role, content), conversations (from, value), or prompt and completion"

Messages = list[dict[str, str]]  # each with role and content
OnPhase = Callable[[str], object]  # is told what begins, where its duration is unknown


class Coder(NamedTuple):
    """The part of a tokenizer that building needs."""

    name: str  # folder or hub id
    vocabulary: Mapping[str, int]
    # without tokens that only begin or end a prompt
    encode: Callable[[list[str]], Iterable[Sequence[int]]]


def build(
    path: Path, documents: Iterable[str], coder: Coder, ram_bytes: int, on_phase: OnPhase
) -> Store:
    """Build a store. Raises `UserError` for a path that exists, an empty corpus or a full disk."""
    room = chunk_room(ram_bytes, coder)
    with _refusing_bad_places(path):
        require_new(path)
        with becoming(path, scratch_folder(path)) as folder:
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
    """Add chunks to a store; readers keep its old state. Raises what `build` raises."""
    room = chunk_room(ram_bytes, coder)
    with _refusing_bad_places(path):
        if not path.is_dir():
            read_store(path)  # which says what is missing
    with _refusing_bad_places(path), locked(path):
        store = read_store(path)
        require_tokenizer(store, coder.vocabulary)
        with _discarding_unnamed_chunks(path):
            writer = _ChunkWriter(path, store.vocab_size, room, on_phase)
            chunks = tuple(writer.write(_encoded(documents, coder, room), len(store.chunks)))
            require(bool(chunks), "what is added must hold some text", "none", "name other files")
            store = replace(store, chunks=(*store.chunks, *chunks))
            _sync_folder(path)  # so that what the new file names is there first
            _write_manifest(path / f".{MANIFEST_NAME}", store)
            os.replace(path / f".{MANIFEST_NAME}", path / MANIFEST_NAME)
            _sync_folder(path)
    return store


def chunk_room(ram_bytes: int, coder: Coder) -> int:
    """Return how many tokens and separators of a chunk can be sorted within `ram_bytes`.

    The budget is that of the whole process. Raises `UserError`.
    """
    width = TokenWidth.of(vocabulary_size(coder.vocabulary)).num_bytes
    taken_bytes = rss_bytes() + _RESERVE_BYTES
    least_bytes = taken_bytes + sorting_bytes(_LEAST_ROOM * width)
    rule = f"`ram` must be at least {format_bytes(least_bytes)} here"
    require(ram_bytes >= least_bytes, rule, format_bytes(ram_bytes), "give more")
    return min((ram_bytes - taken_bytes) // sorting_bytes(width), MAX_TEXT_BYTES // width - 1)


def _encoded(documents: Iterable[str], coder: Coder, room: int) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of documents, in pieces where they would fill more than a chunk."""
    for batch in _batches(documents):
        for ids in coder.encode(batch):
            tokens = np.asarray(ids, np.int64)
            for lo in range(0, len(tokens), room - 1):
                yield tokens[lo : lo + room - 1]


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
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
        """Write documents into as few chunks as have room for them, numbered from `first`."""
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
    """Return `work()`, run in a daemon thread so that Ctrl-C is handled meanwhile.

    The main thread handles no signal while a library's function runs in it.
    """
    done: SimpleQueue[NDArray[np.int32] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        # of any kind: it is raised again where the result is waited for
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
        rule = "a new store must have a name of its own"
        raise UserError(f"{rule}, {path} exists: take another, or append to it")


@contextmanager
def _discarding_unnamed_chunks(path: Path) -> Iterator[None]:
    """Remove chunks that `store.json` does not name; it may have been replaced just before."""
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
        what = f"cannot write {path} ({error.strerror or error})"
        raise UserError(f"{what}: nothing of it was kept, {_ROOM}") from None


class _File(NamedTuple):
    path: Path
    num_bytes: int
    is_named: bool  # by the user, not found in a folder


def joined(messages: Messages) -> str:
    """Return a conversation as text, for models without a chat template."""
    return "\n".join(message["content"] for message in messages)


class Corpus:
    """The documents in files and folders; folders are walked in the order of names.

    Args:
        skips_bad: list bad files and lines in `bad` instead of raising `UserError` for the first.
        or_else: what that error adds, such as how to skip them.
    """

    def __init__(
        self, paths: Sequence[Path], *, skips_bad: bool = False, or_else: str = ""
    ) -> None:
        self._skips_bad = skips_bad
        self._or_else = or_else
        self.bad: list[str] = []  # a line of explanation each
        self.num_binary = 0
        self.num_hidden = 0
        self.done_bytes = 0
        given = (Path(os.path.expanduser(path)) for path in paths)
        self._files = [file for path in given for file in self._found(path)]
        self.num_files = len(self._files)
        self.num_bytes = sum(file.num_bytes for file in self._files)

    def documents(self, render: Callable[[Messages], str] = joined) -> Iterator[str]:
        """Yield the texts, conversations rendered. Raises `UserError` for a bad one that counts."""
        before = 0
        for file in self._files:
            try:
                for text, done_bytes in self._texts(file, render):
                    self.done_bytes = before + min(done_bytes, file.num_bytes)
                    yield text
            except OSError as error:
                what = f"cannot read {file.path} ({error.strerror or reason(error)})"
                self._refuse(what, "check its permissions")
            before += file.num_bytes
            self.done_bytes = before

    def _found(self, path: Path) -> Iterator[_File]:
        if not path.is_dir():
            try:
                yield _File(path, path.stat().st_size, True)
            except OSError as error:
                self._refuse(f"cannot read {path} ({error.strerror})", "check the path")
            return
        for folder, inner, names in os.walk(path, onerror=self._refuse_folder):
            self.num_hidden += sum(name.startswith(".") for name in (*inner, *names))
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                file = Path(folder, name)
                if file.exists() and not file.is_file():  # such as a pipe, which is no text either
                    self.num_binary += 1
                else:  # a link that leads nowhere is told when it is read
                    yield _File(file, file.stat().st_size if file.exists() else 0, False)

    def _refuse_folder(self, error: OSError) -> None:
        self._refuse(f"cannot read {error.filename} ({error.strerror})", "check its permissions")

    def _refuse(self, what: str, remedy: str) -> None:
        if not self._skips_bad:
            raise UserError(f"{what}: {remedy}{self._or_else}")
        self.bad.append(what)

    def _texts(self, file: _File, render: Callable[[Messages], str]) -> Iterator[tuple[str, int]]:
        """Yield texts, and how many bytes of the file they have taken."""
        with open_regular(file.path) as raw:
            is_binary = b"\0" in raw.read(_HEAD_BYTES)
            raw.seek(0)
            if is_binary and file.is_named:
                self._refuse(f"{file.path} is no text, it has zero bytes", "take it out")
            elif is_binary:
                self.num_binary += 1
            elif file.path.suffix == ".jsonl":
                yield from self._lines(file.path, raw, render)
            elif (wrong := _first_wrong(raw)) is not None:
                self._refuse(f"{file.path} must be UTF-8, it is not at byte {wrong}", "convert it")
            else:
                raw.seek(0)
                # utf-8-sig drops the byte order mark that some files begin with
                with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as reader:
                    yield from ((piece, raw.tell()) for piece in _pieces(reader))

    def _lines(
        self, path: Path, raw: BinaryIO, render: Callable[[Messages], str]
    ) -> Iterator[tuple[str, int]]:
        done_bytes = 0
        for number, line in enumerate(iter(lambda: raw.readline(_MAX_LINE_BYTES), b""), start=1):
            done_bytes += len(line)
            try:
                text = ""
                if line.strip():
                    rule = f"must have less than {_MAX_LINE_BYTES >> 20} MiB"
                    ensure(len(line) < _MAX_LINE_BYTES, rule)
                    text = text_of(json.loads(line.decode("utf-8")), render)
                    text.encode("utf-8")  # half a character, which JSON can write, is none
            except (ValueError, RecursionError) as error:
                self._refuse(f"{path}:{number} {reason(error)}", "mend the line")
                continue
            yield from ((piece, done_bytes) for piece in _pieces(io.StringIO(text, newline="")))


def text_of(record: Any, render: Callable[[Messages], str]) -> str:
    """Return the text of one JSON record. Raises `ValueError` where it has none of the layouts."""
    match record:
        case {"text": str(text)}:
            return text
        case {"messages": [*messages]}:
            return render([_message(one, "role", "content") for one in messages])
        case {"conversations": [*turns]}:
            return render([_message(one, "from", "value") for one in turns])
        case {"prompt": str(prompt), "completion": str(completion)}:
            return prompt + completion
    raise ValueError(f"must be an object with {_LAYOUTS}")


def _message(record: Any, role: str, content: str) -> dict[str, str]:
    """Return one turn; of a content in parts (multimodal layouts), the text parts are joined."""
    match isinstance(record, dict) and (record.get(role), record.get(content)):
        case (str(who), str(said)):
            return {"role": _ROLES.get(who, who), "content": said}
        case (str(who), [*parts]):
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            told = "\n".join(text for text in texts if isinstance(text, str))
            return {"role": _ROLES.get(who, who), "content": told}
    raise ValueError(f"has a message without {role} and {content}")


def _first_wrong(raw: BinaryIO) -> int | None:
    """Return the byte at which a file stops being UTF-8, or None."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    for block in iter(lambda: raw.read(_READ_BYTES), b""):
        kept_bytes = len(decoder.getstate()[0])
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            return before - kept_bytes + error.start
        before += len(block)
    num_left = len(decoder.getstate()[0])
    return before - num_left if num_left else None


def _pieces(reader: io.TextIOBase) -> Iterator[str]:
    while piece := reader.read(_PIECE_CHARS):
        yield piece + reader.readline(_PIECE_CHARS)
