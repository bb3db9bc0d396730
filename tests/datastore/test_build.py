"""A store is whole or not there, whatever ends its build, and says what the documents say, however they are cut."""

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import byte_coder
import pytest
from brute_force import rows_of
from byte_coder import CODER, TEXTS, VOCABULARY, append, build, failing, of_small_chunks
from refusals import contents
from shell import run_python

from offload.datastore import build as building
from offload.datastore.build import Coder
from offload.datastore.index import SuffixIndex
from offload.datastore.store import open_datastore, read_store, verify
from offload.errors import UserError


def assert_same(index: SuffixIndex, texts: list[str]) -> None:
    """As one that is made of the same documents at once."""
    wanted = SuffixIndex.in_memory([list(text.encode()) for text in texts], 256)
    assert index.num_tokens == wanted.num_tokens
    for end in ("the cat", "on the", "mat", "a", "z", "the king"):
        result, expected = (store.longest(end.encode()) for store in (index, wanted))
        assert (result.length, result.count) == (expected.length, expected.count)
        assert rows_of(index.continuations(result)) == rows_of(wanted.continuations(expected))


@pytest.mark.parametrize(("room", "num_chunks"), [(1 << 20, 1), (60, 2), (26, 4)])
def test_a_store_finds_what_its_documents_hold(
    room: int, num_chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_small_chunks(monkeypatch, room)
    texts = ["", *TEXTS[:2], "", *TEXTS[2:]]
    store = build(tmp_path / "store", texts)
    assert store == read_store(tmp_path / "store")
    assert (len(store.chunks), store.num_documents, store.num_tokens) == (num_chunks, 4, sum(map(len, texts)))
    assert_same(open_datastore(tmp_path / "store", VOCABULARY), texts)
    verify(store, byte_coder.ignored)
    assert store.num_bytes == sum(p.stat().st_size for p in (tmp_path / "store").iterdir() if p.name != "store.json")


def test_batches_and_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "_BATCH_CHARS", 30)
    batches: list[list[str]] = []
    coder = CODER._replace(encode=lambda texts: batches.append(texts) or CODER.encode(texts))
    build(tmp_path / "store", coder=coder)
    assert batches == [TEXTS[:2], TEXTS[2:]]
    # Memory decides how large chunks are.
    monkeypatch.setattr(building, "rss_bytes", lambda: 100 << 20)
    taken_bytes = (100 << 20) + building._RESERVE_BYTES
    wide = CODER._replace(vocabulary={"last": 2**17})
    assert building.chunk_room(taken_bytes + 10_000_000, CODER) == 1_000_000, "2 bytes, and 4 for each of them"
    assert building.chunk_room(taken_bytes + 10_000_000, wide) == 500_000
    assert building.chunk_room(1 << 50, CODER) == 2**30 - 2, "positions have 31 bits"
    with pytest.raises(UserError, match="`ram` must be at least 357 MiB here, got 300 MiB: "):
        building.chunk_room(300 << 20, CODER)


def test_sorting_takes_the_memory_that_is_stated() -> None:
    """It is that of a process of its own, where nothing else takes any."""
    program = """
import sys
import numpy as np
from offload.datastore.index import ReversedText, sorted_positions
from offload.datastore.store import sorting_bytes
from offload.machine import peak_rss_bytes, rss_bytes
import pydivsufsort
text = ReversedText(int(sys.argv[1]), 1_500_000)
before = rss_bytes()
for _ in range(100):
    text.add(np.arange(14_999) * 7919 % 199)
sorted_positions(text.tokens_B)
print((peak_rss_bytes() - before) / sorting_bytes(1_500_000 * text.width.num_bytes))
"""
    for vocab_size in (4096, 2**17):
        share = float(run_python("-c", program, vocab_size))
        assert 0.8 < share < 1.3, "with what the library takes for texts of any size"


FAULTS = [*(("fsync", number, errno.ENOSPC) for number in range(1, 7)), ("open", 1, errno.EIO)]


@pytest.mark.parametrize(("call", "number", "fault"), FAULTS)
def test_a_disk_that_fails_leaves_nothing_or_the_old_store(
    call: str, number: int, fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where writing late finds no room the so-many-th file cannot be brought to disk; the lock may not be had."""

    def fail(patch: pytest.MonkeyPatch) -> None:
        error = OSError(fault, os.strerror(fault))
        patch.setattr(building.os, call, failing(getattr(os, call), number, error=error))

    of_small_chunks(monkeypatch, 60)
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(UserError, match=rf"cannot write .*store .{os.strerror(fault)}.: nothing of it was kept"):
            build(tmp_path / "store")
    assert not any(tmp_path.iterdir())
    build(tmp_path / "store")
    before = contents(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot write "):
        fail(patch)
        append(tmp_path / "store", TEXTS)
    assert contents(tmp_path) == before
    assert len(append(tmp_path / "store", TEXTS).chunks) == 4


def test_a_write_cut_short_leaves_nothing(tmp_path: Path) -> None:
    """It fails within the first file, as it does where there is no more room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*store .File too large.: "):
            build(tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def interrupted(texts: list[str]) -> Iterator[str]:
    yield from texts
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("writes", [build, append])
def test_an_interruption_while_reading_leaves_what_there_was(
    writes: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_small_chunks(monkeypatch, 24)
    if writes is append:
        build(tmp_path / "store")
    before = contents(tmp_path)
    monkeypatch.setattr(building, "_BATCH_CHARS", 1)
    with pytest.raises(KeyboardInterrupt):
        writes(tmp_path / "store", interrupted(TEXTS))
    assert contents(tmp_path) == before and len(list(tmp_path.iterdir())) == (writes is append)


def test_nothing_is_written_over_but_what_a_killed_build_left(tmp_path: Path) -> None:
    for path in (tmp_path / "file", tmp_path / "folder" / "file"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    before = contents(tmp_path)
    for name in ("file", "folder"):
        with pytest.raises(UserError, match=r"a new store must have a name of its own, .* exists: take another"):
            build(tmp_path / name)
    assert contents(tmp_path) == before
    leftover = tmp_path / ".empty.building"
    leftover.mkdir()
    (leftover / "chunk-00007.tokens").write_bytes(b"half")
    (tmp_path / "empty").mkdir()
    build(tmp_path / "empty")
    assert not leftover.exists() and not (tmp_path / "empty" / "chunk-00007.tokens").exists()


def while_building(act: Callable[[], object]) -> Iterator[str]:
    yield TEXTS[0]
    act()
    yield TEXTS[1]


@pytest.mark.parametrize("writes", [build, append])
def test_two_do_not_write_one_store_and_one_that_is_being_built_is_not_there_yet(
    writes: Callable[..., object], tmp_path: Path
) -> None:
    if writes is append:
        build(tmp_path / "store")

    def meddle() -> None:
        with pytest.raises(UserError, match=r"another process is writing to .*: wait for it"):
            writes(tmp_path / "store", TEXTS)
        if writes is build:
            with pytest.raises(UserError, match=r"must be a folder with store.json, .* it is being built, wait for it"):
                read_store(tmp_path / "store")

    writes(tmp_path / "store", while_building(meddle))
    verify(read_store(tmp_path / "store"), byte_coder.ignored)


EMPTY, STRANGER = "must hold some text, got none: name other files", {**VOCABULARY, "<0>": 1, "<1>": 0}
BROKEN = CODER._replace(encode=lambda texts: [[1, 256, 2]])
REFUSED: list[tuple[bool, list[str], Coder, str]] = [
    (False, [], CODER, f"a corpus {EMPTY}"),
    (False, ["", ""], CODER, f"a corpus {EMPTY}"),
    (True, [], CODER, f"what is added {EMPTY}"),
    (True, ["", ""], CODER, f"what is added {EMPTY}"),
    (False, TEXTS, BROKEN, r"tokens must lie in \[0, 256\), got 256: "),
    (True, TEXTS, CODER._replace(vocabulary=STRANGER), r"must have the model's tokenizer, .* built with that of bytes"),
]


@pytest.mark.parametrize(("appends", "texts", "coder", "words"), REFUSED)
def test_what_cannot_be_stored_changes_nothing(
    appends: bool, texts: list[str], coder: Coder, words: str, tmp_path: Path
) -> None:
    if appends:
        build(tmp_path / "store")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=words):
        (append if appends else build)(tmp_path / "store", texts, coder=coder)
    assert contents(tmp_path) == before and len([*tmp_path.iterdir()]) == appends
