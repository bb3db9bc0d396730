"""The parts of an answer, and the segments of text that they are read from.

Invariant: nothing here knows tokens, templates or a protocol.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# the functions that are offered to a model: JSON schemas of their parameters, by name
Offered = Mapping[str, Mapping[str, Any]]


class Special(str):
    """The text of a special token. It marks borders and is no text of the answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Words that a model writes for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    key: str  # names the call where its result comes back


Part = Text | Thought | Call


class WrittenCall(NamedTuple):
    """A call as a reader finds it; an empty key is none."""

    name: str
    arguments: Mapping[str, Any]
    key: str = ""

    def as_call(self, is_short: bool) -> Call:
        """Return the call with a key, its own or a new one; some templates take 9 characters."""
        key = self.key or new_key(is_short)
        return Call(self.name, json.dumps(self.arguments, ensure_ascii=False), key)


def new_key(is_short: bool) -> str:
    """Return a name for a call that no other call has."""
    return secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Offered:
    """Return the functions of tools as OpenAI's protocol describes them."""
    functions = (tool["function"] for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


_OPENING = "<think>\n"
_CLOSING = "\n</think>\n\n"


class FramedText:
    """Turns the parts of an answer into text, with thoughts between marks of one kind."""

    def __init__(self) -> None:
        self._is_thinking = False

    def push(self, parts: Sequence[Part]) -> str:
        """Return the text of these parts, behind those before."""
        pieces = []
        for part in parts:
            if not isinstance(part, Text | Thought):
                continue
            is_thought = isinstance(part, Thought)
            if is_thought != self._is_thinking:
                pieces.append(_OPENING if is_thought else _CLOSING)
            self._is_thinking = is_thought
            pieces.append(part.text)
        return "".join(pieces)
