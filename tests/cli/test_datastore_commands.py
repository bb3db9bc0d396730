"""Datastores as a person makes them: what is said and where, what programs read, and every refusal in one line."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from reciting import SAID
from refusals import assert_refused, contents
from shell import Outcome, shell, start
from tiny import save_tokenizer

from offload.datastore.store import open_datastore
from offload.engine.tokenizer import load_tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.py").write_text("def f(x):\n    return x\n")
    (folder / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "Say hello"}]}\n{"text": "hello you"}\n')
    (folder / "image.png").write_bytes(b"\x89PNG\0")
    (folder / ".git").mkdir()
    return folder


def build(model: Path, out: Path, *arguments: object) -> Outcome:
    return shell("datastore", "build", "--tokenizer", model, "--out", out, *arguments)


@pytest.fixture
def store(looper: Path, texts: Path, tmp_path: Path) -> Path:
    assert build(looper, tmp_path / "store", texts, "-q") == Outcome(0, "", "")
    return tmp_path / "store"


def test_a_store_from_files_to_matches(looper: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    outcome = build(looper, out, texts)
    assert outcome.code == 0 and outcome.out == ""
    passed, made, speed = outcome.err.splitlines()[-3:]
    assert passed == "passed over in folders: 1 hidden, 1 binary"
    assert made.startswith(f"{out}: 41 tokens of 3 documents in 1 chunk, ")
    assert speed.startswith("41 new tokens, ") and " a second; peak memory " in speed and "of 2 GiB allowed" in speed
    tokenizer = load_tokenizer(looper)
    index = open_datastore(out, tokenizer.get_vocab())
    result = index.longest(tokenizer("please return")["input_ids"])
    (row,) = index.continuations(result, 20)
    assert result.length == len(" return") and tokenizer.decode(row[row >= 0]) == " x\n"


@pytest.mark.parametrize("flag", ["--datastore", "--ngram"])
def test_a_store_guesses_for_a_model_of_its_tokenizer(flag: str, looper: Path, store: Path) -> None:
    """The text is the model's own; a store of another tokenizer, or none, is refused before a weight is read."""
    run = ["generate", "-m", looper, "-p", "Say:", "-n", 11, "--ram", "1GiB", "--context", 64, "--threads", 1]
    outcome = shell(*run, flag, store)
    assert (outcome.code, outcome.out) == (0, SAID + "\n") and f"by lookup, {flag.strip('-')}" in outcome.err
    manifest = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**manifest, "tokenizer_sha256": "0" * 64}))
    assert_refused(shell(*run, flag, store), str(store), "tokenizer")
    assert_refused(shell(*run, flag, store.parent / "none"), str(store.parent / "none"))


def test_info_and_verify_say_it_in_lines_and_a_store_grows(store: Path, looper: Path, tmp_path: Path) -> None:
    size, tokenizer, sorting = shell("datastore", "info", store).out.splitlines()
    assert size.startswith(f"{store}: 41 tokens of 3 documents in 1 chunk, ")
    assert tokenizer.startswith(f"tokenizer of {looper}: 199 ids in 2 bytes each, sha256 ")
    assert sorting == "sorting its largest chunk took 450 B beside the process's own memory"
    assert shell("datastore", "verify", store).out == f"{size}: sound\n"
    (tmp_path / "more.txt").write_text("hello you there")
    outcome = shell("datastore", "append", store, tmp_path / "more.txt")
    assert outcome.code == 0 and f"{store}: 56 tokens of 4 documents in 2 chunks" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("15 new tokens, ")
    assert shell("datastore", "verify", store).code == 0


def test_conversations_take_the_models_template(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tokenizer(model, chat_template="{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}")
    chats = tmp_path / "a.jsonl"
    chats.write_text('{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}\n')
    assert build(model, tmp_path / "store", chats, "-q").code == 0
    tokenizer = load_tokenizer(model)
    index = open_datastore(tmp_path / "store", tokenizer.get_vocab())
    (row,) = index.continuations(index.longest(tokenizer.encode("</s><s>")), 20)
    assert tokenizer.decode(row[row >= 0]) == "assistant:Ho</s>"


def test_what_no_store_can_be_made_of_is_refused(looper: Path, texts: Path, tmp_path: Path) -> None:
    for folder in ("empty", "bare"):
        (tmp_path / folder).mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    for model, corpus, flags, words in (
        (looper, tmp_path / "empty", (), "a corpus must hold some text, got none: "),
        (looper, tmp_path / "empty" / "a.txt", (), "a corpus must hold some text, got none: "),
        (tmp_path / "bare", texts, (), "has no tokenizer"),
        (tmp_path / "nowhere", texts, (), "no model directory at"),
        (looper, texts, ("--ram", "1MiB"), "--ram must be at least "),
    ):
        assert_refused(build(model, tmp_path / "store", corpus, *flags, "-q"), words)
        assert not (tmp_path / "store").exists()


def test_a_store_of_another_tokenizer_is_refused(store: Path, texts: Path, tmp_path: Path, looper: Path) -> None:
    """A moved one can be named: what a store remembers of its tokenizer is where it was."""
    save_tokenizer(tmp_path / "other", ["another"])
    before = contents(store)
    refused = shell("datastore", "append", store, texts, "--tokenizer", tmp_path / "other", "-q")
    assert_refused(refused, "a store must have the model's tokenizer", "199 ids", "offload datastore build --tokenizer")
    assert contents(store) == before
    content = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**content, "tokenizer": str(tmp_path / "gone")}))
    assert_refused(shell("datastore", "append", store, texts, "-q"), "no model directory at ", "gone")
    moved = shutil.copytree(looper, tmp_path / "moved", ignore=shutil.ignore_patterns("*.safetensors"))
    assert shell("datastore", "append", store, texts, "--tokenizer", moved, "-q") == Outcome(0, "", "")


def test_ctrl_c_in_a_process_of_its_own(looper: Path, texts: Path, tmp_path: Path) -> None:
    """While it encodes a text that takes seconds."""
    (texts / "z.txt").write_text("def f(x): return x\n" * 1_000_000)
    command = ("datastore", "build", "--tokenizer", looper, "--out", tmp_path / "store", texts)
    with start(*command) as running:
        while not list(tmp_path.glob(".store.building")) and running.poll() is None:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out) == (130, b"") and err.decode().splitlines()[-1] == "offload: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
