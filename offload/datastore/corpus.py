"""The documents of a corpus: text and code as they are, chats and samples as lines of JSON.

Invariant: no document contains bytes that are not UTF-8. Skipped files are counted or named; a file
that the user named and that cannot be used is an error, unless bad files are to be skipped.
"""

import codecs
import io
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from offload.checkpoint.files import open_regular
from offload.errors import UserError, ensure, reason

# Longer texts become several documents, cut at line ends, so that no file has to fit in memory.
_PIECE_CHARS = 1 << 16
_MAX_LINE_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_HEAD_BYTES = 8192  # a zero byte among them means that a file is no text, as git decides
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # key in ShareGPT's files
_LAYOUTS = "text, messages (role, content), conversations (from, value), or prompt and completion"

Messages = list[dict[str, str]]  # list of messages, each with role and content


class _File(NamedTuple):
    path: Path
    num_bytes: int
    is_named: bool  # named by the user, not found in a folder


def joined(messages: Messages) -> str:
    """Return a conversation as text, for models without a chat template."""
    return "\n".join(message["content"] for message in messages)


class Corpus:
    """The documents in files and folders; folders are walked in the order of names.

    Args:
        skips_bad: list bad files and lines in `bad` instead of raising `UserError` for the first.
        or_else: ends that error, such as how to skip bad files.
    """

    def __init__(
        self, paths: Sequence[Path], *, skips_bad: bool = False, or_else: str = ""
    ) -> None:
        self._skips_bad = skips_bad
        self._or_else = or_else
        self.bad: list[str] = []  # a line on each
        self.num_binary = 0
        self.num_hidden = 0
        self.done_bytes = 0
        given = (Path(os.path.expanduser(path)) for path in paths)
        self._files = [file for path in given for file in self._regular_files(path)]
        self.num_files = len(self._files)
        self.num_bytes = sum(file.num_bytes for file in self._files)

    def documents(self, render: Callable[[Messages], str] = joined) -> Iterator[str]:
        """Yield the texts, conversations rendered. Raises `UserError` for a bad one."""
        before = 0
        for file in self._files:
            try:
                for text, done_bytes in self._texts(file, render):
                    self.done_bytes = before + min(done_bytes, file.num_bytes)
                    yield text
            except OSError as error:
                failure = f"cannot read {file.path} ({error.strerror or reason(error)})"
                self._refuse(failure, "check its permissions")
            before += file.num_bytes
            self.done_bytes = before

    def _regular_files(self, path: Path) -> Iterator[_File]:
        """Yield the regular files of a path in the order of names; hidden ones are counted."""
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
                try:
                    status = file.stat()
                except OSError:  # such as a broken link: reported when it is read
                    yield _File(file, 0, False)
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield _File(file, status.st_size, False)
                else:  # such as a pipe, which is no text file
                    self.num_binary += 1

    def _refuse_folder(self, error: OSError) -> None:
        self._refuse(f"cannot read {error.filename} ({error.strerror})", "check its permissions")

    def _refuse(self, failure: str, remedy: str) -> None:
        if not self._skips_bad:
            raise UserError(f"{failure}: {remedy}{self._or_else}")
        self.bad.append(failure)

    def _texts(self, file: _File, render: Callable[[Messages], str]) -> Iterator[tuple[str, int]]:
        """Yield texts, each with the bytes read of the file so far."""
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
        """Yield the texts of a JSONL file in pieces, each with the bytes read so far."""
        done_bytes = 0
        for number, line in enumerate(iter(lambda: raw.readline(_MAX_LINE_BYTES), b""), start=1):
            done_bytes += len(line)
            try:
                text = ""
                if line.strip():
                    requirement = f"must have less than {_MAX_LINE_BYTES >> 20} MiB"
                    ensure(len(line) < _MAX_LINE_BYTES, requirement)
                    text = text_of(json.loads(line.decode("utf-8-sig")), render)
                    # half a surrogate pair, which JSON can write, is no character
                    text.encode("utf-8")
            except (ValueError, RecursionError) as error:
                self._refuse(f"{path}:{number} {reason(error)}", "mend the line")
                continue
            yield from ((piece, done_bytes) for piece in _pieces(io.StringIO(text, newline="")))


def text_of(record: Any, render: Callable[[Messages], str]) -> str:
    """Return the text of one JSON record. Raises `ValueError` if it has none of the layouts."""
    match record:
        case {"text": str(text)}:
            return text
        case {"messages": [*messages]}:
            return render([_message(message, "role", "content") for message in messages])
        case {"conversations": [*turns]}:
            return render([_message(turn, "from", "value") for turn in turns])
        case {"prompt": str(prompt), "completion": str(completion)}:
            return prompt + completion
    raise ValueError(f"must be an object with {_LAYOUTS}")


def _message(record: Any, role: str, content: str) -> dict[str, str]:
    """Return one turn; for a content in parts (multimodal layouts), its text parts joined."""
    match isinstance(record, dict) and (record.get(role), record.get(content)):
        case (str(who), str(said)):
            return {"role": _ROLES.get(who, who), "content": said}
        case (str(who), [*parts]):
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            content = "\n".join(text for text in texts if isinstance(text, str))
            return {"role": _ROLES.get(who, who), "content": content}
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
