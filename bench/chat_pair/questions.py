"""Questions and answers about Python that the packaged chat pair learns by heart.

They come from two places: a page of dialogues beside this file, and the docstrings of the standard
library. Invariant: an answer is text that a person wrote, and nothing is taken from outside the
machine; the same Python gives the same dialogues in the same order.
"""

import ast
import inspect
import random
import re
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from offload.bench.harness.prompts import read_source

_MODULES = (
    "bisect builtins copy functools glob heapq itertools json math os.path random re shutil"
    " statistics string textwrap time"
)
_WHAT = ("What does {} do?", "What is {}?", "Explain {}", "Tell me what {} does")
_HOW = ("How do I {}?", "How can I {} in Python?")
_WRITE = ("Write a function to {}.", "Write code to {}.")
_VERBS = (
    "add apply append assign build call change check close compute convert copy count create decode"
    " delete divide encode execute extend find format generate get insert iterate join load make"
    " merge move open parse pop print push put query quote raise read register remove rename replace"
    " reset return run select send serialize set shuffle sort split stop test truncate update wrap"
    " write yield"
)
_SENTENCE_CHARS = range(12, 130)
_CODE_CHARS = range(60, 420)
_SIGNATURE_CHARS = 40


class Dialogue(NamedTuple):
    """One answer, and the questions that it is for."""

    questions: tuple[str, ...]
    answer: str


def written_dialogues() -> list[Dialogue]:
    """Return the dialogues of the page: a line of questions with bars between, then the answer."""
    text = Path(__file__).with_name("dialogues.txt").read_text(encoding="utf-8")
    found: list[Dialogue] = []
    for asked, answer in re.findall(r"^(.+ \| .+)\n((?:(?!.+ \| ).*\n)+)", text, re.MULTILINE):
        questions = [one.strip() for one in asked.split(" | ")]
        bare = [one.rstrip("?.").lower() for one in questions]
        found.append(Dialogue(tuple(dict.fromkeys([*questions, *bare])), answer.strip()))
    return found


def library_dialogues() -> list[Dialogue]:
    """Return what docstrings of the standard library say of functions that people ask for."""
    found = dict[str, Dialogue]()
    for module_name in _MODULES.split():
        module = import_module(module_name)
        for name in sorted(vars(module)):
            value = getattr(module, name)
            is_own = getattr(value, "__module__", None) in (module_name, None, _home(module_name))
            if name.startswith("_") or not callable(value) or not is_own:
                continue
            full = name if module_name == "builtins" else f"{module_name}.{name}"
            for one in _of_callable(full, value):
                found.setdefault(one.questions[0], one)
    return list(found.values())


def _home(module_name: str) -> str:
    """Return the module that functions of another say they are of."""
    return {"os.path": "posixpath", "os": "posix"}.get(module_name, f"_{module_name}")


def _of_callable(name: str, value: Any) -> Iterator[Dialogue]:
    sentence = _first_sentence(inspect.getdoc(value) or "")
    if len(sentence) not in _SENTENCE_CHARS or (isinstance(value, type) and "rror" in name):
        return
    called = f"`{name}{_signature(value)}`"
    asked = (*(one.format(name) for one in _WHAT), _WHAT[0].format(f"`{name}`"))
    yield Dialogue(asked, f"{called}: {sentence}")
    wish = _as_wish(sentence)
    if wish:
        yield Dialogue(tuple(one.format(wish) for one in _HOW), f"Use {called}.")


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z)'])\.(?:\s|$)", paragraph)[0].rstrip(".")
    is_plain = sentence.isascii() and ">>>" not in sentence and "->" not in sentence
    return f"{sentence}." if is_plain and sentence[:1].isupper() else ""


def _as_wish(sentence: str) -> str:
    """Return what a person wants who needs it; nothing where it is no order."""
    first, _, rest = sentence.rstrip(".").partition(" ")
    word = first.lower()
    if word not in _VERBS.split() or "," in rest or len(rest) > 70:
        return ""
    return f"{'get' if word in ('return', 'yield') else word} {rest}"


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (ValueError, TypeError):
        return "()"
    text = re.sub(r" -> .*|, /|\s*<[^>]*>", "", text)
    return text if len(text) <= _SIGNATURE_CHARS else "(...)"


def code_dialogues() -> list[Dialogue]:
    """Return short functions of the standard library with what their docstrings ask for."""
    found = dict[str, Dialogue]()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = read_source(path)
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            wish = _as_wish(_first_sentence(ast.get_docstring(node) or ""))
            code = ast.get_source_segment(source, node) or ""
            if wish and len(code) in _CODE_CHARS and code.isascii():
                asked = tuple(one.format(wish) for one in _WRITE)
                found.setdefault(wish, Dialogue(asked, f"```python\n{code}\n```"))
    return list(found.values())


def dialogue_text(dialogues: list[Dialogue], seed: int, end: str) -> str:
    """Return every question with its answer once, in random order, as the chat template has them."""
    turns = [f"{end}Q: {one}\nA:\n{it.answer}" for it in dialogues for one in it.questions]
    return "".join(random.Random(seed).sample(turns, len(turns)))
