"""Documents are what files say, in one order; what is passed over is counted, what is bad is named by its line."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.datastore import corpus as corpora
from offload.datastore.corpus import Corpus, Messages
from offload.errors import UserError


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(*paths: Path) -> list[str]:
    return list(Corpus(paths).documents())


def tagged(messages: Messages) -> str:
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def said(*pairs: tuple[str, object]) -> dict[str, object]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


PARTS = [{"type": "text", "text": "A"}, {"type": "image"}]
LAYOUTS: list[tuple[object, str, str]] = [
    ({"text": "one\ntwo", "meta": {"url": "x"}}, "one\ntwo", "one\ntwo"),
    ({"text": "wins", "messages": ASKED}, "wins", "wins"),
    ({"messages": ASKED}, "Hi\nHello", "<user>Hi<assistant>Hello"),
    ({"messages": [{"role": "user", "content": PARTS}]}, "A", "<user>A"),
    (said(("human", "Hi"), ("gpt", "Hello")), "Hi\nHello", "<user>Hi<assistant>Hello"),
    (said(("system", "Be kind")), "Be kind", "<system>Be kind"),
    ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 = 4", "2 + 2 = 4"),
]


@pytest.mark.parametrize(("record", "plain", "in_template"), LAYOUTS)
def test_layouts_of_lines(record: object, plain: str, in_template: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", record)
    assert documents(path) == [plain]
    assert list(Corpus([path]).documents(tagged)) == [in_template]


def test_marks_and_empty_lines_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": ""}\n  \n{"text": "x"}')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbftext")  # some editors begin with such a mark
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "y"}\n')
    assert documents(tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "c.jsonl") == ["x", "text", "y"]


BAD_LINES: list[tuple[bytes, str]] = [
    (b"not json", "Expecting value"),
    (b'{"text": 7}', "must be an object with text, messages (role, content), conversations"),
    (b'{"prompt": "alone"}', "must be an object with text"),
    (b'["text"]', "must be an object with text"),
    (b'{"messages": [{"role": "user"}]}', "has a message without role and content"),
    (b'{"messages": ["hi"]}', "has a message without role and content"),
    (b'{"conversations": [{"from": "gpt", "value": 7}]}', "has a message without from and value"),
    (b'{"text": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
    (b'{"text": "\\ud83d"}', "surrogates not allowed"),
    (b"[" * 100_000, "recursion"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped(line: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "third"}\n')
    with pytest.raises(UserError) as caught:
        documents(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2 ") and words in message
    assert message.endswith(": mend the line")
    corpus = Corpus([path], skips_bad=True)
    assert list(corpus.documents()) == ["first", "third"]
    (skipped,) = corpus.bad
    assert skipped.startswith(f"{path}:2 ") and corpus.done_bytes == corpus.num_bytes


def test_what_no_template_takes_and_endless_lines_are_bad_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: Messages) -> str:
        raise UserError("does not fit into the chat template (roles must alternate)")

    path = lines(tmp_path / "a.jsonl", {"messages": ASKED})
    with pytest.raises(UserError, match=r"a.jsonl:1 does not fit into the chat template"):
        list(Corpus([path]).documents(refuse))
    monkeypatch.setattr(corpora, "_MAX_LINE_BYTES", 1 << 20)
    lines(path, {"text": "x" * (1 << 20)}, {"text": "y"})
    with pytest.raises(UserError, match=r"a.jsonl:1 must have less than 1 MiB"):
        documents(path)


FINE, CUT = b"fine\n" * 300_000 + b"gr\xfc\xdfe\n", b"fine " + "日".encode()[:2]
BAD_FILES: list[tuple[Callable[[Path], object], str, bool]] = [
    (lambda path: path.write_bytes(FINE), "must be UTF-8, it is not at byte 1500002", True),
    (lambda path: path.write_bytes(CUT), "must be UTF-8, it is not at byte 5: convert it", True),
    (lambda path: path.write_bytes(b"MZ\0\0"), "is no text, it has zero bytes: take it out", False),
    (lambda path: path.symlink_to(path.parent / "nowhere"), "(No such file or directory): check ", True),
    (os.mkfifo, "(it is no regular file): check ", False),
]


@pytest.mark.parametrize(("make", "words", "also_in_folder"), BAD_FILES)
def test_a_bad_file_is_named_or_skipped(
    make: Callable[[Path], object], words: str, also_in_folder: bool, tmp_path: Path
) -> None:
    (tmp_path / "good.txt").write_text("good")
    bad = tmp_path / "a.txt"
    make(bad)
    if not also_in_folder:
        assert documents(tmp_path) == ["good"] and Corpus([tmp_path]).bad == []
    for paths in ([bad, tmp_path / "good.txt"], *([[tmp_path]] if also_in_folder else [])):
        with pytest.raises(UserError) as caught:
            documents(*paths)
        assert str(bad) in str(caught.value) and words in str(caught.value)
        corpus = Corpus(paths, skips_bad=True)
        assert list(corpus.documents()) == ["good"] and len(corpus.bad) == 1 and str(bad) in corpus.bad[0]


def test_a_file_that_may_not_be_read_or_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(corpora, "open_regular", forbid)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"cannot read .*a.txt \(Permission denied\): check its permissions$"):
        documents(tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*nowhere \(No such file or directory\): check the path"):
        Corpus([tmp_path, tmp_path / "nowhere"])  # before anything is read
