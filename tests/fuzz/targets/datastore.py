"""Stores of a corpus: whatever a store holds, the text is that of the model, or the store is refused."""

import json
from pathlib import Path

from case import Target
from damage import BYTES, JSON, json_line, only, special, text
from model_files import ENOUGH, as_wanted, keep_wanted, save_files
from shell import Outcome, shell

_KEYS = ("vocab_size", "token_bytes", "tokenizer", "tokenizer_sha256", "chunks", "version", "format", "x")
_CORPUS = "".join(f"Count: a{number % 7} b{number % 5}\n" for number in range(400))
_TURNS = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "a b"}]
_CHATS = ({"text": "Count: a"}, {"messages": _TURNS}, {"prompt": "Count", "completion": " a"},
    {"conversations": [{"from": "human", "value": "Count"}, {"from": "gpt", "value": "a"}]})  # fmt: skip
_LOOKS_UP = ("--tree", "6x3", "--profile", "none", "--quiet", *ENOUGH[:6])


def _save(folder: Path) -> None:
    save_files(folder / "model")
    (folder / "corpus.txt").write_text(_CORPUS)
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _CHATS))
    built = shell("datastore", "build", folder / "corpus.txt", "--tokenizer", folder / "model", "--out",
        folder / "store", "--quiet")  # fmt: skip
    assert built.code == 0, built.err
    keep_wanted(folder, _write(folder))


def _write(folder: Path) -> Outcome:
    where = ("-m", folder / "model", "--datastore", folder / "store")
    return shell("generate", *where, "-p", "Count: a", "-n", 8, "--greedy", *_LOOKS_UP)


def _verify(store: Path) -> Outcome:
    return shell("datastore", "verify", store, "--quiet")


def _append(folder: Path) -> Outcome:
    where = ("--tokenizer", folder / "model", "--ram", "2GiB", "--quiet")
    return shell("datastore", "append", folder / "store", folder / "corpus.txt", *where)


def _build(folder: Path) -> Outcome:
    """What is built from whatever was found is whole."""
    named = (folder / "corpus.txt", folder / "chats.jsonl", "--tokenizer", folder / "model")
    built = shell("datastore", "build", *named, "--out", folder / "built", "--ram", "2GiB", "--quiet")
    if built.code == 0:
        verified = _verify(folder / "built")
        assert verified.code == 0, verified.err
    return built


_CORPORA = {"corpus.txt": (text, special, *BYTES), "chats.jsonl": (json_line, json_line, text, special, *BYTES)}
_FILES = {"store/store.json": (only(*_KEYS), *JSON)}
_FILES |= {f"store/*.{kind}": (*BYTES, special) for kind in ("tokens", "positions")}
TARGETS = [
    Target("datastore/generate", _save, _FILES, lambda folder: as_wanted(folder, _write(folder))),
    Target("datastore/build", _save, _CORPORA, _build, writes=("built*", "built*/*")),
    Target("datastore/verify", _save, _FILES, lambda folder: _verify(folder / "store")),
    Target("datastore/append", _save, _FILES, _append, writes=("store/*", "store")),
]
