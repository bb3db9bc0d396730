"""Prompts: code that every machine has and the packaged pair has not seen, or files of the user's.

`code` is beginnings of standard library files, `copy` functions of them that are begun again under
another name, with another argument. A text file is one prompt; `.jsonl` has one a line: Spec-Bench
and MT-Bench (`turns`), `prompt` or `text`. Invariant: the same machine gives the same prompts in
the same order.
"""

import ast
import hashlib
import json
import os
import re
import sysconfig
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offload.engine.conversation import encode_prompt
from offload.engine.decoder import Decoder
from offload.engine.tokenizer import Tokenizer, load_tokenizer
from offload.errors import UserError

CODE = "code"
COPY = "copy"
_HELD_OUT_PERCENT = 3
# characters of a text: more than enough for 128 tokens
_CHARS = 1200
# bytes of a file: shorter ones are stubs, longer ones tables
_FILE_BYTES = range(4001, 60_000)
_ALL = slice(None)
# characters of a function that is copied: some 250 to 400 tokens
_COPIED_CHARS = range(800, 1500)


class Prompt(NamedTuple):
    name: str  # unique within a bench, such as code/argparse.py
    text: str
    is_chat: bool = False  # a question: it belongs into a chat template where the model has one
    # how a copy goes on where the text is done as it was begun
    then: str = ""


def prompts(sources: Iterable[str], num_each: int, part: slice = _ALL) -> list[Prompt]:
    """Return `num_each` prompts from a part of every source, spread evenly. Raises `UserError`."""
    makers = {CODE: _beginnings, COPY: _copies}
    chosen = list[Prompt]()
    for source in sources:
        texts = makers[source]() if source in makers else _from_file(Path(source))
        every = list({prompt.text: prompt for prompt in texts}.values())
        if not every:
            complaint = f"--prompts {source} gives no prompt on this machine"
            raise UserError(f"{complaint}: name a text or .jsonl file")
        of_source = every[part]
        num = min(num_each, len(of_source))
        chosen += [of_source[index * len(of_source) // num] for index in range(num)]
    return [
        prompt if prompt.then else prompt._replace(text=prompt.text[:_CHARS]) for prompt in chosen
    ]


def encoded(decoder: Decoder, prompt: Prompt, num_tokens: int) -> list[int]:
    """Return token ids: a text cut to `num_tokens`, a copy whole, a question as a chat."""
    if prompt.is_chat and decoder.tokenizer is not None and decoder.tokenizer.chat_template:
        return decoder.encode(prompt.text)
    ids = decoder.encode(prompt.text, raw=True)
    return ids if prompt.then else ids[:num_tokens]


def tokenizer_of(model: Path) -> Tokenizer:
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer: name a model that has one")
    return tokenizer


def raw_ids(model: Path, texts: Iterable[Prompt], num_tokens: int) -> list[list[int]]:
    """Return ids by a model's own tokenizer, cut as `encoded` does. Raises `UserError`."""
    tokenizer = tokenizer_of(model)
    pairs = [(prompt, encode_prompt(tokenizer, prompt.text, raw=True)) for prompt in texts]
    return [ids if prompt.then else ids[:num_tokens] for prompt, ids in pairs]


def _beginnings() -> Iterator[Prompt]:
    for path in held_out_files():
        if path.stat().st_size in _FILE_BYTES:
            yield Prompt(f"{CODE}/{path.name}", read_source(path))


def _copies() -> Iterator[Prompt]:
    """Yield functions that are neither short nor long, each with the head of its edited copy."""
    for path in held_out_files():
        source = read_source(path)
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:  # a few test files are meant to be wrong
            continue
        lines = source.splitlines(keepends=True)
        for node in nodes:
            if not isinstance(node, ast.FunctionDef) or not node.args.args:
                continue
            text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(text) not in _COPIED_CHARS:
                continue
            edited = text.replace(node.name, f"{node.name}_again")
            argument = node.args.args[-1].arg
            if argument not in ("self", "cls"):
                edited = re.sub(rf"\b{argument}\b", f"new_{argument}", edited)
            head, _, then = edited.partition("\n")
            yield Prompt(f"{COPY}/{path.name}:{node.lineno}", f"{text}\n\n{head}\n", then=then)


def _from_file(path: Path) -> Iterator[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        requirement = f"--prompts must be {CODE}, {COPY} or a file"
        raise UserError(f"{requirement}, cannot read {path} ({why}): name another") from None
    if path.suffix != ".jsonl":
        yield from [Prompt(path.name, text)] if text.strip() else []
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path.name}:{number}"
        try:
            entry: Any = json.loads(line)
        except ValueError:
            raise UserError(f"{place} is not JSON: give one object a line") from None
        entry = entry if isinstance(entry, dict) else {}
        turns = entry.get("turns")
        is_turns = isinstance(turns, list) and turns
        question = turns[0] if is_turns else entry.get("prompt") or entry.get("text")
        if not isinstance(question, str) or not question.strip():
            raise UserError(f'{place} has no question: it needs "turns", "prompt" or "text"')
        yield Prompt(place, question, is_chat=True)


def held_out_files() -> list[Path]:
    """Return library files that the pair was not trained on, split by a hash of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in library_files({"site-packages", "lib2to3", "idlelib"}):
        digest = hashlib.sha256(str(path.relative_to(root)).encode()).digest()
        if digest[0] * 100 < _HELD_OUT_PERCENT * 256:
            files.append(path)
    return files


def library_files(left_out: Collection[str] = ("site-packages",)) -> list[Path]:
    """Return the standard library's files in order, without folders of these names.

    Such a folder is not entered: what is installed there is ten times the library.
    """
    files: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
        below[:] = [name for name in below if name not in left_out]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def read_source(path: Path) -> str:
    """Read a file; what does not decode is dropped, since a few test files are not UTF-8."""
    return path.read_text(encoding="utf-8", errors="ignore")
