"""A store that was cut, edited or made by another is refused in a line; `verify` finds what sizes do not tell."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import byte_coder
import numpy as np
import pytest
from byte_coder import VOCABULARY, build, of_small_chunks

from offload.datastore.store import open_datastore, read_store, verify, vocabulary_sha256, vocabulary_size
from offload.errors import ReadError, UserError

Edit = Callable[[np.ndarray], object]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In two chunks."""
    of_small_chunks(monkeypatch, 60)
    build(tmp_path / "store")
    return tmp_path / "store"


def edited(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((store / "store.json").read_text())
    change(content)
    (store / "store.json").write_text(json.dumps(content))


def refused(store: Path, *, by_verify: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        verify(read_store(store), byte_coder.ignored) if by_verify else open_datastore(store, VOCABULARY)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ALTERED = "is not as offload datastore writes it"


def test_the_vocabulary_tells_tokenizers_apart(store: Path) -> None:
    known = vocabulary_sha256({"a": 0, "b": 1})
    assert known == vocabulary_sha256({"b": 1, "a": 0}) == hashlib.sha256(b'[["a",0],["b",1]]').hexdigest()
    assert known not in map(vocabulary_sha256, ({"a": 1, "b": 0}, {"a": 0, "c": 1}, {"a": 0}, {"a": 0, "b": 1, "c": 2}))
    assert vocabulary_size({"a": 0, "b": 7}) == 8
    open_datastore(store, dict(reversed(VOCABULARY.items())))
    with pytest.raises(UserError) as caught:
        open_datastore(store, {"a": 0, "b": 1})
    ours, other = vocabulary_sha256(VOCABULARY)[:12], known[:12]
    assert str(caught.value) == (
        f"a store must have the model's tokenizer, {store} was built with that of bytes (256 ids, sha256 {ours}) "
        f"against 2 ids, {other}: build one with offload datastore build --tokenizer MODEL"
    )


@pytest.mark.parametrize("name", ["chunk-00000.tokens", "chunk-00001.positions"])
@pytest.mark.parametrize("cut", [lambda raw: raw[:-2], lambda raw: raw + b"x", lambda raw: b""])
def test_a_file_of_another_size_is_refused(name: str, cut: Callable[[bytes], bytes], store: Path) -> None:
    raw = (store / name).read_bytes()
    (store / name).write_bytes(cut(raw))
    wanted = f"{store / name} must have {len(raw)} bytes, got {len(cut(raw))}: build it again"
    assert refused(store).startswith(wanted) and refused(store, by_verify=True).startswith(wanted)


@pytest.mark.parametrize("name", ["chunk-00000.tokens", "chunk-00000.positions"])
def test_a_file_that_is_cut_while_it_is_mapped_ends_a_look_up_and_not_the_process(name: str, store: Path) -> None:
    index = open_datastore(store, VOCABULARY)
    assert index.longest([97, 98], least=0).count > 0
    os.truncate(store / name, 0)
    with pytest.raises(ReadError, match="a file of the datastore was cut short while in use"):
        index.longest([97, 98], least=0)


def test_what_is_missing_or_no_store_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.parent
    (folder / "file").write_text("text")
    (folder / "folder").mkdir()
    for name in ("nowhere", "file", "folder"):
        wanted = f"a store must be a folder with store.json, {folder / name} is none: check the path"
        assert refused(folder / name).startswith(wanted)
    monkeypatch.chdir(store)
    assert read_store(".").num_documents == 4, "where one stands is a path too"
    monkeypatch.chdir(folder)
    for path in (".", "..", "/"):
        assert "is none: check the path" in refused(Path(path))
        with pytest.raises(UserError, match="a new store must have a name of its own"):
            build(Path(path))
    (store / "chunk-00001.tokens").unlink()
    assert "chunk-00001.tokens (No such file or directory): build it again" in refused(store)
    (store / "chunk-00001.tokens").mkdir()
    assert "chunk-00001.tokens (it is no regular file): build it again" in refused(store)


MANIFESTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(version=2), "must have version 1, got 2: take the offload that wrote it"),
    (lambda c: c.update(format="x"), "must say offload datastore, got x: "),
    (lambda c: c.update(vocab_size=0), ALTERED),
    (lambda c: c.update(vocab_size=2**40), ALTERED),
    (lambda c: c.update(vocab_size=2**20), ALTERED),
    (lambda c: c.update(token_bytes=4), ALTERED),
    (lambda c: c.update(chunks=[]), ALTERED),
    (lambda c: c.update(chunks=[7]), ALTERED),
    (lambda c: c.pop("tokenizer"), ALTERED),
    (lambda c: c["chunks"][0].update(num_tokens=-1), ALTERED),
    (lambda c: c["chunks"][0].update(num_documents=10**30), ALTERED),
    (lambda c: c["chunks"][0]["tokens"].update(num_bytes=8), ALTERED),
    (lambda c: c["chunks"].reverse(), "must have"),
    (lambda c: c["chunks"].append(c["chunks"][0]), "chunk-00002.tokens (No such file"),
]


@pytest.mark.parametrize(("change", "words"), MANIFESTS)
def test_an_edited_manifest_is_refused(change: Callable[[dict[str, Any]], object], words: str, store: Path) -> None:
    edited(store, change)
    assert words in refused(store)


@pytest.mark.parametrize("name", ["chunk-00000.tokens", "chunk-00001.positions"])
def test_verify_reads_every_byte_and_finds_a_flipped_bit(name: str, store: Path) -> None:
    store_read, heard = read_store(store), list[tuple[int, int]]()
    verify(store_read, lambda *pair: heard.append(pair))
    assert heard[-1] == (store_read.num_bytes, store_read.num_bytes) and heard == sorted(heard)
    raw = bytearray((store / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (store / name).write_bytes(raw)
    open_datastore(store, VOCABULARY)
    assert f"{store / name} must have sha256 " in refused(store, by_verify=True)


def swapped(order_M: np.ndarray) -> None:
    """The last two suffixes that begin with `o` and differ within it."""
    order_M[[10, 40]] = order_M[[40, 10]]


EDITS: list[tuple[str, str, Edit, str]] = [
    ("tokens", ">u2", lambda t: t.put(3, 256), "tokens must lie below 256, got [256]"),
    ("tokens", ">u2", lambda t: t.put(3, 65534), "tokens must lie below 256, got [65534]"),
    ("tokens", ">u2", lambda t: t.put(3, 65535), "must hold 2 documents between separators, got 3"),
    ("tokens", ">u2", lambda t: t.put(0, 7), "must hold 2 documents between separators, got 1"),
    ("tokens", ">u2", lambda t: t.put(3, t[4]), "must be sorted"),
    ("positions", "<i4", lambda p: p.put(3, -1), "positions must lie in [1, "),
    ("positions", "<i4", lambda p: p.put(3, 2**31 - 1), "positions must lie in [1, "),
    ("positions", "<i4", lambda p: p.put(3, 0), "positions must lie in [1, "),
    ("positions", "<i4", lambda p: p.put(3, p[4]), "must hold every position once"),
    ("positions", "<i4", lambda p: p.sort(), "must be sorted"),
    ("positions", "<i4", swapped, "must be sorted, got another order at"),
]


@pytest.mark.parametrize(("part", "dtype", "edit", "words"), EDITS)
def test_verify_finds_what_a_forged_checksum_hides(part: str, dtype: str, edit: Edit, words: str, store: Path) -> None:
    path = store / f"chunk-00000.{part}"
    values = np.fromfile(path, dtype)
    edit(values)
    values.tofile(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edited(store, lambda content: content["chunks"][0][part].update(sha256=digest))
    open_datastore(store, VOCABULARY).longest(b"the cat")
    assert words in refused(store, by_verify=True)
