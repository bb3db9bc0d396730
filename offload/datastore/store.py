"""A corpus on disk: a folder with `store.json` and, for each chunk, its tokens and positions.

`verify` checks that a store is as it was written, and sorted as searches need it: every byte is
read once, and every position checked, because checksums alone can be edited along with the data.
Invariant: a chunk's files never change once `store.json` names them, so readers that have mapped
them are not disturbed while chunks are added. A file is only mapped if its size is the one in
`store.json`. No store is used with a tokenizer whose ids mean something else.
"""

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, convert
from numpy.typing import NDArray

from offload.checkpoint.files import Progress, counter, open_regular, read_object
from offload.datastore.index import CorpusChunk, SuffixIndex, TokenWidth
from offload.errors import UserError, ensure, os_errors_as_user_error, require

MANIFEST_NAME = "store.json"
FORMAT = "offload datastore"
VERSION = 1
AGAIN = "build it again with offload datastore build"
_READ_BYTES = 1 << 22
_BLOCK = 1 << 20  # positions that are checked together


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The expected size and checksum of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One chunk of a store."""

    num_documents: int
    num_tokens: int
    tokens: FileEntry
    positions: FileEntry


@dataclass(frozen=True, slots=True)
class Store:
    """The content of `store.json`."""

    path: Path
    vocab_size: Annotated[int, Meta(gt=0, lt=2**32)]
    tokenizer: str  # folder or hub id, when the store was built
    tokenizer_sha256: str
    chunks: Annotated[tuple[ChunkEntry, ...], Meta(min_length=1)]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_documents(self) -> int:
        """Return the number of documents in all chunks; one that fills several counts in each."""
        return sum(chunk.num_documents for chunk in self.chunks)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token's id."""
        return TokenWidth.from_vocab_size(self.vocab_size).num_bytes

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files but `store.json`."""
        return sum(chunk.tokens.num_bytes + chunk.positions.num_bytes for chunk in self.chunks)

    @property
    def sorting_bytes(self) -> int:
        """Return the memory that sorting the largest chunk took."""
        return max(sorting_bytes(chunk.tokens.num_bytes) for chunk in self.chunks)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for `--json`, derived ones included."""
        names = ("num_tokens", "num_documents", "num_bytes", "sorting_bytes")
        sums = {name: getattr(self, name) for name in names}
        return {"path": str(self.path), **sums, **self.manifest()}

    def manifest(self) -> dict[str, Any]:
        """Return the content of `store.json`."""
        kept = asdict(self)
        del kept["path"]
        size = kept.pop("vocab_size")
        numbers = {"vocab_size": size, "token_bytes": self.token_bytes}
        return {"format": FORMAT, "version": VERSION, **numbers, **kept}


def sorting_bytes(text_bytes: int) -> int:
    """Return the memory for sorting a text: five bytes for each of its bytes."""
    return 5 * text_bytes


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Return a digest of a tokenizer's vocabulary; equal if every id means the same token."""
    written = json.dumps(sorted(vocabulary.items()), separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()


def vocabulary_size(vocabulary: Mapping[str, int]) -> int:
    """Return the number of ids that texts can have; a model may have more logits, as padding."""
    return max(vocabulary.values(), default=0) + 1


def open_datastore(
    path: str | os.PathLike[str], vocabulary: Mapping[str, int], most_ids: int = sys.maxsize
) -> SuffixIndex:
    """Return the index of a store, mapped from its files.

    Tokens from `most_ids` on end a match or a continuation: a tokenizer may have more of them than
    its model. Raises `UserError` if the store's tokenizer has another vocabulary.
    """
    store = read_store(path)
    require_tokenizer(store, vocabulary)
    chunks = [map_chunk(store, index) for index in range(len(store.chunks))]
    return SuffixIndex(chunks, store.vocab_size, most_ids)


def require_tokenizer(store: Store, vocabulary: Mapping[str, int]) -> None:
    """Raise `UserError` if the ids of a store mean something else in this vocabulary."""
    expected = store.tokenizer_sha256
    other = vocabulary_sha256(vocabulary)
    if expected != other:
        had = f"{store.tokenizer} ({store.vocab_size} ids, sha256 {expected[:12]})"
        has = f"{vocabulary_size(vocabulary)} ids, {other[:12]}"
        mismatch = (
            f"a store must have the model's tokenizer, {store.path} was built with that of {had}"
        )
        remedy = "build one with offload datastore build --tokenizer MODEL"
        raise UserError(f"{mismatch} against {has}: {remedy}")


def read_store(path: str | os.PathLike[str]) -> Store:
    """Return the content of `store.json`, its files' sizes checked. Raises `UserError`."""
    folder = Path(os.path.expanduser(path))
    file = folder / MANIFEST_NAME
    with os_errors_as_user_error(f"cannot read {file}", "check its permissions"):
        try:
            content = read_object(file, AGAIN)
        except (FileNotFoundError, NotADirectoryError):
            remedy = "check the path, or offload datastore build"
            if os.path.isdir(scratch_folder(folder)):
                remedy = "it is being built, wait for it"
            mismatch = f"a store must be a folder with {MANIFEST_NAME}, {folder} is none"
            raise UserError(f"{mismatch}: {remedy}") from None
    form = content.get("format")
    require(form == FORMAT, f"{file} must say {FORMAT}", form, "take another folder")
    version = content.get("version")
    remedy = f"take the offload that wrote it, or {AGAIN}"
    require(version == VERSION, f"{file} must have version {VERSION}", version, remedy)
    store = _checked(folder, content)
    for index in range(len(store.chunks)):
        map_chunk(store, index)  # cheap, and checks their sizes
    return store


def scratch_folder(path: Path) -> Path:
    """Return the folder in which a store is written until it is whole."""
    # absolute, because `.` has no name of its own
    whole = Path(os.path.abspath(path))
    return whole.parent / f".{whole.name}.building"


def chunk_files(path: Path, index: int) -> tuple[Path, Path]:
    """Return the paths of tokens and positions."""
    return path / f"chunk-{index:05d}.tokens", path / f"chunk-{index:05d}.positions"


def map_chunk(store: Store, index: int) -> CorpusChunk:
    """Map the files of a chunk. Raises `UserError` if one is missing or has another size."""
    entry = store.chunks[index]
    files = chunk_files(store.path, index)
    text = _mapped(files[0], entry.tokens.num_bytes)
    order = _mapped(files[1], entry.positions.num_bytes)
    tokens_B = np.frombuffer(text, TokenWidth.from_vocab_size(store.vocab_size).dtype)
    position_M = np.frombuffer(order, np.int32)
    return CorpusChunk(text, tokens_B, position_M, (text, order))


def _checked(folder: Path, content: dict[str, Any]) -> Store:
    """Return the content of a manifest, checked.

    Sizes follow from the numbers of documents and tokens: each document has one separator, each
    token one position.
    """
    try:
        store = convert({**content, "path": folder}, Store)
        width = store.token_bytes
        ensure(content.get("token_bytes") == width, "tokens have another width")
        for chunk in store.chunks:
            num_texts = chunk.num_documents
            text_bytes = (chunk.num_tokens + num_texts + 1) * width
            wanted = (text_bytes, 4 * chunk.num_tokens)
            ensure(0 < num_texts <= chunk.num_tokens, "documents hold tokens")
            ensure((chunk.tokens.num_bytes, chunk.positions.num_bytes) == wanted, "sizes differ")
    except ValueError:
        mismatch = f"{folder / MANIFEST_NAME} is not as offload datastore writes it"
        raise UserError(f"{mismatch}: {AGAIN}") from None
    return store


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    with os_errors_as_user_error(f"cannot read {path}", AGAIN), open_regular(path) as file:
        found_bytes = os.fstat(file.fileno()).st_size
        requirement = f"{path} must have {num_bytes} bytes"
        require(found_bytes == num_bytes, requirement, found_bytes, AGAIN)
        return mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ)


def verify(store: Store, on_bytes: Progress) -> None:
    """Check all chunks. Raises `UserError` for the first fault.

    `on_bytes` is called with the bytes done and the bytes in all. Takes about eight bytes of memory
    for every token of the largest chunk.
    """
    count = counter(store.num_bytes, on_bytes)
    for index, entry in enumerate(store.chunks):
        files = chunk_files(store.path, index)
        chunk = map_chunk(store, index)
        parts = ((entry.tokens, chunk.tokens_B), (entry.positions, chunk.position_M))
        for path, (wanted, part) in zip(files, parts, strict=True):
            for num_bytes in _check_sum(path, wanted, part.view(np.uint8)):
                count(num_bytes)
        _check_tokens(files[0], chunk, store.vocab_size, entry.num_documents)
        _check_order(files[1], chunk, TokenWidth.from_vocab_size(store.vocab_size).separator)


def _check_sum(path: Path, wanted: FileEntry, raw_B: NDArray[np.uint8]) -> Iterator[int]:
    """Compare a checksum; yield the bytes of every block that was read."""
    digest = hashlib.sha256()
    for lo in range(0, len(raw_B), _READ_BYTES):
        block = raw_B[lo : lo + _READ_BYTES].data
        digest.update(block)
        yield len(block)
    actual = digest.hexdigest()
    requirement = f"{path} must have sha256 {wanted.sha256[:12]}..."
    require(actual == wanted.sha256, requirement, f"{actual[:12]}...", AGAIN)


def _check_tokens(path: Path, chunk: CorpusChunk, vocab_size: int, num_documents: int) -> None:
    """Check that tokens lie in the vocabulary, and separators enclose non-empty documents."""
    tokens_B = chunk.tokens_B
    separator = TokenWidth.from_vocab_size(vocab_size).separator
    is_end_B = tokens_B == separator
    wrong = tokens_B[(tokens_B >= vocab_size) & ~is_end_B]
    require(not len(wrong), f"{path}: tokens must lie below {vocab_size}", wrong[:1], AGAIN)
    is_parted = is_end_B[0] and is_end_B[-1] and not np.any(is_end_B[1:] & is_end_B[:-1])
    num_ends = np.count_nonzero(is_end_B)
    is_right = is_parted and num_ends == num_documents + 1
    requirement = f"{path} must hold {num_documents} documents between separators"
    require(is_right, requirement, num_ends - 1, AGAIN)


def _check_order(path: Path, chunk: CorpusChunk, separator: int) -> None:
    """Check that each position occurs once, except behind separators, in sorted order.

    Two suffixes with the same first token are in order if what follows is, and the positions' own
    ranks show that. Behind a separator nothing is compared: no search looks further.
    """
    tokens_B = chunk.tokens_B
    position_M = chunk.position_M
    is_inside = position_M.min() > 0 and position_M.max() < len(tokens_B)
    requirement = f"{path}: positions must lie in [1, {len(tokens_B)})"
    require(is_inside, requirement, position_M.min(), AGAIN)
    rank_B = np.full(len(tokens_B) + 1, -1, np.int32)
    rank_B[position_M] = np.arange(len(position_M), dtype=np.int32)
    is_complete = np.array_equal(rank_B[1:-1] >= 0, tokens_B[:-1] != separator)
    require(is_complete, f"{path} must hold every position once", "others", AGAIN)
    for lo in range(0, len(position_M) - 1, _BLOCK):
        at = position_M[lo : lo + _BLOCK]
        then = position_M[lo + 1 : lo + 1 + _BLOCK]
        at = at[: len(then)]
        token = tokens_B[at]
        later = tokens_B[then]
        is_tie_right = (token == separator) | (rank_B[at + 1] < rank_B[then + 1])
        wrong = np.flatnonzero(~((token < later) | (token == later) & is_tie_right))
        mismatch = f"another order at {lo + wrong[:1]}"
        require(not len(wrong), f"{path} must be sorted", mismatch, AGAIN)
