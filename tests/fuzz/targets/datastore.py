"""Stores of a corpus: whatever a store holds, the text is that of the model, or the store is refused."""

from pathlib import Path

from case import Target
from damage import BYTES, JSON, only, special
from model_files import ENOUGH, as_wanted, keep_wanted, save_files
from shell import Outcome, shell

_KEYS = ("vocab_size", "token_bytes", "tokenizer", "tokenizer_sha256", "chunks", "version", "format", "x")
_CORPUS = "".join(f"Count: a{number % 7} b{number % 5}\n" for number in range(400))
_LOOKS_UP = ("--tree", "6x3", "--profile", "none", "--quiet", *ENOUGH[:6])


def _save(folder: Path) -> None:
    save_files(folder / "model")
    (folder / "corpus.txt").write_text(_CORPUS)
    built = shell("datastore", "build", folder / "corpus.txt", "--tokenizer", folder / "model", "--out",
        folder / "store", "--quiet")  # fmt: skip
    assert built.code == 0, built.err
    keep_wanted(folder, _write(folder))


def _write(folder: Path) -> Outcome:
    where = ("-m", folder / "model", "--datastore", folder / "store")
    return shell("generate", *where, "-p", "Count: a", "-n", 8, "--greedy", *_LOOKS_UP)


def _write_the_same(folder: Path) -> Outcome:
    """A corpus guesses, and decides nothing."""
    return as_wanted(folder, _write(folder))


def _verify(folder: Path) -> Outcome:
    return shell("datastore", "verify", folder / "store", "--quiet")


def _append(folder: Path) -> Outcome:
    where = ("--tokenizer", folder / "model", "--ram", "2GiB", "--quiet")
    return shell("datastore", "append", folder / "store", folder / "corpus.txt", *where)


_FILES = {
    "store/store.json": (only(*_KEYS), *JSON),
    "store/*.tokens": (*BYTES, special),
    "store/*.positions": (*BYTES, special),
}
TARGETS = [
    Target("datastore/generate", _save, _FILES, _write_the_same),
    Target("datastore/verify", _save, _FILES, _verify),
    Target("datastore/append", _save, _FILES, _append, writes=("store/*", "store")),
]
