"""Documents from files: text and code as it is, and the usual layouts of chats and samples from lines of JSON.

Invariant: no document is made of bytes that are not UTF-8. What is passed over is counted or named, and a file that was
meant but cannot be used is an error unless bad ones are to be skipped.
"""

import codecs
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from offload.checkpoint.small_files import open_regular
from offload.errors import UserError, reason

Messages = list[dict[str, str]]  # of roles and contents
_PIECE_CHARS = 1 << 16  # longer texts are several documents, cut at a line's end, so that no file need fit into memory
_MAX_LINE_BYTES = 64 << 20
_HEAD_BYTES = 8192  # where a zero byte tells that a file is no text, as for git
_BLOCK_BYTES = 1 << 20
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # in ShareGPT's files
_LAYOUTS = "text, messages (role, content), conversations (from, value), or prompt and completion"


class _File(NamedTuple):
    path: Path
    num_bytes: int
    is_named: bool  # by the user, not found in a folder


def joined(messages: Messages) -> str:
    """A conversation for models without a chat template."""
    return "\n".join(message["content"] for message in messages)


class Corpus:
    """What files and folders hold, document by document; folders are walked in the order of names.

    Args:
        skips_bad: name bad files and lines in `bad`, where otherwise the first one is raised as `UserError`.
    """

    def __init__(self, paths: Sequence[Path], *, skips_bad: bool = False) -> None:
        self._skips_bad = skips_bad
        self.bad: list[str] = []  # a line of explanation each
        self.num_binary = self.num_hidden = self.done_bytes = 0
        self._files = [file for path in paths for file in self._found(Path(os.path.expanduser(path)))]
        self.num_files, self.num_bytes = len(self._files), sum(file.num_bytes for file in self._files)

    def documents(self, render: Callable[[Messages], str] = joined) -> Iterator[str]:
        """Texts; `render` makes one of a conversation, or raises `ValueError` where it cannot.

        Raises `UserError` for the first bad file or line, unless they are skipped.
        """
        before = 0
        for file in self._files:
            try:
                for text, done_bytes in self._texts(file, render):
                    self.done_bytes = before + min(done_bytes, file.num_bytes)
                    yield text
            except OSError as error:
                self._refuse(f"cannot read {file.path} ({error.strerror or reason(error)})", "check its permissions")
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
            raise UserError(f"{what}: {remedy}, or pass over it with --skip-bad")
        self.bad.append(what)

    def _texts(self, file: _File, render: Callable[[Messages], str]) -> Iterator[tuple[str, int]]:
        """Texts, and how many bytes of the file they have taken."""
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
                yield from _pieces_of_file(raw)

    def _lines(self, path: Path, raw: BinaryIO, render: Callable[[Messages], str]) -> Iterator[tuple[str, int]]:
        done_bytes = 0
        for number, line in enumerate(iter(lambda: raw.readline(_MAX_LINE_BYTES), b""), start=1):
            done_bytes += len(line)
            try:
                text = _text_of_line(line, render) if line.strip() else ""
            except (ValueError, RecursionError) as error:
                self._refuse(f"{path}:{number} {reason(error)}", "mend the line")
                continue
            yield from ((piece, done_bytes) for piece in _pieces(io.StringIO(text, newline="")))


def _text_of_line(line: bytes, render: Callable[[Messages], str]) -> str:
    """Raises `ValueError` for a line without a text."""
    if len(line) == _MAX_LINE_BYTES:
        raise ValueError(f"must have less than {_MAX_LINE_BYTES >> 20} MiB")
    text = text_of(json.loads(line.decode("utf-8")), render)
    text.encode("utf-8")  # half a character, which JSON can write, is none
    return text


def text_of(record: Any, render: Callable[[Messages], str]) -> str:
    """The text of one line of JSON. Raises `ValueError` where it has none of the layouts."""
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
    """One turn; a content in parts, as models for pictures take it, is the text of its parts."""
    match isinstance(record, dict) and (record.get(role), record.get(content)):
        case (str(who), str(said)):
            return {"role": _ROLES.get(who, who), "content": said}
        case (str(who), [*parts]):
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            return {"role": _ROLES.get(who, who), "content": "\n".join(texts)}
    raise ValueError(f"has a message without {role} and {content}")


def _first_wrong(raw: BinaryIO) -> int | None:
    """Where a file stops being UTF-8."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    for block in iter(lambda: raw.read(_BLOCK_BYTES), b""):
        kept_bytes = len(decoder.getstate()[0])
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            return before - kept_bytes + error.start
        before += len(block)
    num_left = len(decoder.getstate()[0])
    return before - num_left if num_left else None


def _pieces_of_file(raw: BinaryIO) -> Iterator[tuple[str, int]]:
    with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as reader:  # without the mark that some begin with
        for piece in _pieces(reader):
            yield piece, raw.tell()


def _pieces(reader: io.TextIOBase) -> Iterator[str]:
    while piece := reader.read(_PIECE_CHARS):
        yield piece + reader.readline(_PIECE_CHARS)
