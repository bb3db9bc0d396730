"""The forms in which models write calls of tools, and readers of each.

A form is what stands around a call, as a model's own template writes it: five kinds cover the
families (`docs/server.md` has the table). A reader takes a block, from the mark that begins it to
the mark that ends it, both included, and returns the calls in it or None.

Invariant: a reader returns calls of all that stands in a block, or none of it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from offload.words.literals import Scanner, typed_value
from offload.words.parts import Offered, WrittenCall

_JSON = json.JSONDecoder()
_NAME = r"(?P<name>[\w.\-/]+)"
# between calls in JSON
_BETWEEN_OBJECTS = re.compile(r"[\s,;\[\]]*")


class CallForm(Protocol):
    """How a family writes calls."""

    @property
    def opening(self) -> str:
        """Return the mark before a block of calls; empty where an answer as a whole is calls."""

    @property
    def closing(self) -> str:
        """Return the mark behind a block; empty where the answer's end is."""

    def read(self, block: str, offered: Offered) -> list[WrittenCall] | None:
        """Return the calls that a block of text holds; None if it holds anything else."""


def _inner(form: CallForm, block: str) -> str:
    """Return a block without its marks."""
    return block.removeprefix(form.opening).rstrip().removesuffix(form.closing or "\n").strip()


@dataclass(frozen=True)
class JsonCalls:
    """Objects with a name and arguments, or a list of such: Hermes, Qwen, Llama 3, Mistral v3,
    Granite, InternLM; of a name alone: Apertus.
    """

    opening: str
    closing: str
    name_key: str = "name"  # empty: a call's one key is its name
    arguments_key: str = "arguments"
    second: str = ""  # a mark between the opening and the calls

    def read(self, block: str, offered: Offered) -> list[WrittenCall] | None:
        """Read a block, see `CallForm`; its marks may stand around each of its objects."""
        inner = _inner(self, block).removeprefix(self.second).lstrip()
        marks = [mark for mark in (self.opening, self.second, self.closing) if mark]
        calls = []
        place = 0
        try:
            while place < len(inner):
                value, place = _JSON.raw_decode(inner, place)
                for item in value if isinstance(value, list) else [value]:
                    calls.append(self._call(item))
                is_stepping = True
                while is_stepping:
                    before = place
                    place = _BETWEEN_OBJECTS.match(inner, place).end()  # type: ignore[union-attr]
                    for mark in marks:
                        place += len(mark) if inner.startswith(mark, place) else 0
                    is_stepping = place > before
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return calls or None

    def _call(self, item: Any) -> WrittenCall:
        """Return the call of an object. Raises for another, see `read`."""
        if not self.name_key:
            ((name, arguments),) = item.items()
            return WrittenCall(name, _arguments(arguments))
        if "function" in item and isinstance(item["function"], dict):
            item = item["function"]
        name = item.get(self.name_key, item.get("name"))
        keys = (self.arguments_key, "arguments", "parameters")
        if not self.opening and not any(key in item for key in keys):
            raise KeyError("an answer that is no call may have a name as well")
        given = next((item[key] for key in keys if key in item), None)
        key = item.get("id")
        return WrittenCall(_text(name), _arguments(given), key if isinstance(key, str) else "")


@dataclass(frozen=True)
class NamedCalls:
    """A name, and arguments in JSON behind it: DeepSeek, Mistral v11, Kimi, Hunyuan.

    `before`, `between` and `behind` are texts around the name and the arguments, in which blanks
    may be more or fewer.
    """

    opening: str
    closing: str
    before: str
    between: str
    behind: str
    is_keyed: bool = False  # what stands from the name to the arguments names the call

    @cached_property
    def _begin(self) -> re.Pattern[str]:
        between = _flexible(self.between)
        return re.compile(rf"\s*{_flexible(self.before)}\s*{_NAME}\s*{between}\s*")

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{_flexible(self.behind)}\s*")

    def read(self, block: str, offered: Offered) -> list[WrittenCall] | None:
        """Read a block, see `CallForm`."""
        calls = []
        first = self.before.lstrip().startswith(self.opening)
        rest = block if first else block.removeprefix(self.opening)
        is_apart = self.closing and not self.behind.rstrip().endswith(self.closing)
        rest = rest.rstrip().removesuffix(self.closing) if is_apart else rest
        place = 0
        try:
            while place < len(rest):
                match = self._begin.match(rest, place)
                if match is None:
                    return None
                given, place = _JSON.raw_decode(rest, match.end())
                if end := self._end.match(rest, place):
                    place = end.end()
                elif rest[place:].strip():
                    return None
                else:
                    place = len(rest)
                key = ""
                if self.is_keyed:
                    number = re.search(r":\d+", rest[match.end("name") : match.end()])
                    key = f"functions.{match['name']}{number[0] if number else ':0'}"
                calls.append(WrittenCall(match["name"], _arguments(given), key))
        except (ValueError, TypeError, RecursionError):
            return None
        return calls or None


@dataclass(frozen=True)
class TaggedCalls:
    """A name, and each argument between marks of its own: Qwen3-Coder, GLM, MiniMax, DSML.

    What a value's text means its function's schema tells. `equals` are the texts between a key and
    its value.
    """

    opening: str
    closing: str
    before: str
    named: str  # behind the name, before the first key's mark
    key_mark: str
    equals: tuple[str, ...]
    value_end: str
    behind: str

    @cached_property
    def _begin(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{_flexible(self.before)}\s*{_NAME}\s*{_flexible(self.named)}\s*")

    @cached_property
    def _pair(self) -> re.Pattern[str]:
        equals = "|".join(_flexible(text.strip()) for text in self.equals)
        # one line end around a value is the template's, other blanks are the value's
        before = r"\n?" if any(text.endswith("\n") for text in self.equals) else ""
        behind = r"\n?" if self.value_end.startswith("\n") else ""
        key = rf"{_flexible(self.key_mark)}\s*(?P<key>[^<>\"=\s]+?)\s*"
        end = _flexible(self.value_end)
        return re.compile(rf"\s*{key}(?:{equals}){before}(?P<value>.*?){behind}{end}", re.DOTALL)

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{_flexible(self.behind)}\s*")

    def read(self, block: str, offered: Offered) -> list[WrittenCall] | None:
        """Read a block, see `CallForm`."""
        is_first = self.before.lstrip().startswith(self.opening)
        rest = block if is_first else block.removeprefix(self.opening)
        is_apart = self.closing and not self.behind.rstrip().endswith(self.closing)
        rest = rest.rstrip().removesuffix(self.closing) if is_apart else rest
        calls = []
        place = 0
        while place < len(rest):
            match = self._begin.match(rest, place)
            if match is None:
                return None
            place = match.end()
            known = _properties(offered.get(match["name"]))
            arguments = dict[str, Any]()
            while pair := self._pair.match(rest, place):
                arguments[pair["key"]] = typed_value(pair["value"], known.get(pair["key"]))
                place = pair.end()
            if end := self._end.match(rest, place):
                place = end.end()
            elif rest[place:].strip():
                return None
            else:
                place = len(rest)
            calls.append(WrittenCall(match["name"], arguments))
        return calls or None


@dataclass(frozen=True)
class PythonCalls:
    """Calls as Python writes them, in a list or one on a line: Llama 3.2, LFM2, Olmo 3."""

    opening: str
    closing: str

    def read(self, block: str, offered: Offered) -> list[WrittenCall] | None:
        """Read a block, see `CallForm`."""
        scanner = Scanner(_inner(self, block))
        calls = []
        try:
            is_list = scanner.takes("[")
            while not (is_list and scanner.takes("]")) and scanner.place < len(scanner.text):
                name = scanner.name()
                scanner.require("(")
                calls.append(WrittenCall(name, scanner.pairs("=", ")")))
                scanner.takes(",")
                scanner.skip_blanks()
            scanner.skip_blanks()
        except ValueError:
            return None
        return (calls or None) if scanner.place == len(scanner.text) else None


@dataclass(frozen=True)
class BracedCalls:
    """A name, and bare keys with values in braces: Gemma."""

    opening: str
    closing: str
    before: str
    quote: str

    def read(self, block: str, offered: Offered) -> list[WrittenCall] | None:
        """Read a block, see `CallForm`."""
        scanner = Scanner(_inner(self, block), quotes=(self.quote,))
        calls = []
        try:
            while scanner.place < len(scanner.text):
                scanner.takes(self.opening)
                scanner.require(self.before.removeprefix(self.opening).strip())
                name = scanner.name()
                scanner.require("{")
                calls.append(WrittenCall(name, scanner.pairs(":", "}")))
                scanner.takes(self.closing)
                scanner.skip_blanks()
        except ValueError:
            return None
        return calls or None


def _flexible(literal: str) -> str:
    """Return a pattern for a literal in which blanks and numbers may differ."""
    words = (re.sub(r"\d+", r"\\d+", re.escape(word)) for word in literal.split())
    return r"\s*".join(words)


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError("a name must be text")
    return name


def _arguments(given: Any) -> Mapping[str, Any]:
    """Return the arguments of a call; some models write them as JSON within JSON."""
    if isinstance(given, str):
        given = json.loads(given or "{}")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TypeError("arguments must be an object")
    return given


def _properties(schema: Any) -> Mapping[str, Any]:
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    return known if isinstance(known, Mapping) else {}
