"""Values as models write them outside of JSON: in Python's form, in Gemma's, or as bare text.

Why not Python's own parser: what a model writes may be nested without end, and warns where it is
odd.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_MOST_LEVELS = 50
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_WORDS |= {"null": None, "None": None}  # type: ignore[dict-item]
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_NAME = re.compile(r"[^\s(){}\[\]:,=\"'<>|]+")
_BLANK = re.compile(r"\s*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\n": ""}


class Scanner:
    """Reads values from a place in a text on.

    Args:
        quotes: what begins and ends a string; of one character, as Python has it.

    Methods raise `ValueError` where the text has another form.
    """

    def __init__(self, text: str, place: int = 0, quotes: tuple[str, ...] = ('"', "'")) -> None:
        self.text = text
        self.place = place
        self._quotes = quotes

    def takes(self, literal: str) -> bool:
        """Step over blanks and then over a literal where it comes next."""
        self.skip_blanks()
        is_next = self.text.startswith(literal, self.place)
        self.place += len(literal) if is_next else 0
        return is_next

    def require(self, literal: str) -> None:
        """Step over a literal."""
        if not self.takes(literal):
            raise ValueError(f"{literal!r} is missing at {self.place}")

    def skip_blanks(self) -> None:
        """Step over blanks."""
        self.place = _BLANK.match(self.text, self.place).end()  # type: ignore[union-attr]

    def name(self) -> str:
        """Step over a name."""
        return self._matched(_NAME)

    def pairs(self, between: str, close: str, level: int = 0) -> dict[str, Any]:
        """Step over names with values, such as `a=1, b=2)`, and what closes them."""
        pairs = dict[str, Any]()
        while not self.takes(close):
            if pairs:
                self.require(",")
                if self.takes(close):
                    break
            key = self._string() if self._quote() else self.name()
            self.require(between)
            pairs[key] = self.value(level)
        return pairs

    def value(self, level: int = 0) -> Any:
        """Step over a value."""
        if level > _MOST_LEVELS:
            raise ValueError("values are nested too deeply")
        if self._quote():
            return self._string()
        if self.takes("{"):
            return self.pairs(":", "}", level + 1)
        if self.takes("["):
            items = list[Any]()
            while not self.takes("]"):
                if items:
                    self.require(",")
                items.append(self.value(level + 1))
            return items
        for word, meaning in _WORDS.items():
            if self.takes(word):
                return meaning
        return json.loads(self._matched(_NUMBER))

    def _quote(self) -> str:
        self.skip_blanks()
        ahead = (quote for quote in self._quotes if self.text.startswith(quote, self.place))
        return next(ahead, "")

    def _string(self) -> str:
        """Return a quoted string, escapes resolved. Raises `ValueError` where it has no end."""
        quote = self._quote()
        self.require(quote)
        if len(quote) > 1:
            end = self.text.index(quote, self.place)
            inner = self.text[self.place : end]
            self.place = end + len(quote)
            return inner
        letters = []
        while not self.text.startswith(quote, self.place):
            letter = self.text[self.place : self.place + 1]
            self.place += 1
            if letter == "\\":
                escaped = self.text[self.place : self.place + 1]
                self.place += 1
                letter = _ESCAPES.get(escaped, escaped)
            if not letter and self.place > len(self.text):
                raise ValueError("a string has no end")
            letters.append(letter)
        self.place += len(quote)
        return "".join(letters)

    def _matched(self, pattern: re.Pattern[str]) -> str:
        self.skip_blanks()
        match = pattern.match(self.text, self.place)
        if match is None:
            raise ValueError(f"no {pattern.pattern} at {self.place}")
        self.place = match.end()
        return match.group()


def typed_value(text: str, schema: Any) -> Any:
    """Return the value of a bare text by its JSON schema: text where that may be text."""
    kinds = _kinds(schema)
    if "string" in kinds:
        return None if "null" in kinds and text in ("null", "None") else text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        scanner = Scanner(text)
        meaning = scanner.value()
        scanner.skip_blanks()
    except ValueError:
        return text
    return meaning if scanner.place == len(text) else text


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema names, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {*named} if isinstance(named, list) else set()
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    kinds |= {"string" for value in values if isinstance(value, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(name) or ():
            kinds |= _kinds(inner) if inner is not schema else set()
    return kinds
