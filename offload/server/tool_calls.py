"""Calls of tools in what a model writes, in the forms that common models were taught.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 an answer
that is one such object (with `parameters`), Mistral a list of them. Invariant: however the text is
cut into pieces, the same of it is text; what turns out to be no call is handed out as text.
"""

import json
import secrets
from typing import Any

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class ToolCalls:
    """Finds calls of tools in one answer, piece by piece; without tools all is text."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._held = ""
        self._is_begun = False
        self._calls: list[dict[str, Any]] = []

    def push(self, piece: str) -> str:
        """Return text that is no part of a call, as far as that is certain."""
        if not self._is_wanted:
            return piece
        self._held += piece
        if not self._is_begun and self._held.lstrip()[:1] in ("{", "[", ""):
            return ""  # it may be a call as a whole; at the end that is known
        self._is_begun = True
        return self._certain_text()

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return what is left of the text, and all calls."""
        text = ""
        if not self._is_begun:
            self._calls += (found := _read(self._held))
            self._held = "" if found else self._held
            text = self._certain_text()
        _, tag, inner = self._held.partition(_OPEN)
        if tag and (found := _read(inner)):  # some leave the closing tag out
            self._calls += found
            self._held = ""
        rest = text + self._held
        self._held = ""
        return ("" if self._calls and not rest.strip() else rest), self._calls

    def _certain_text(self) -> str:
        """Take what is no call from what is held; behind a call blanks wait for what follows."""
        said = ""
        while _OPEN in self._held:
            before, _, rest = self._held.partition(_OPEN)
            inner, close, after = rest.partition(_CLOSE)
            if not close:
                break
            found = _read(inner)
            if not found:
                said += before + _OPEN + inner + _CLOSE
            else:
                said += before.rstrip() if self._calls else before
            self._calls += found
            self._held = after
        # a tag may begin with the last letters
        begun = (size for size in range(len(_OPEN), 0, -1) if self._held.endswith(_OPEN[:size]))
        end = self._held.find(_OPEN)
        if end < 0:
            end = len(self._held) - next(begun, 0)
        if self._calls:
            end = len(self._held[:end].rstrip())
        said += self._held[:end]
        self._held = self._held[end:]
        return said


def _read(text: str) -> list[dict[str, Any]]:
    """Return the calls in a text that is one, or a list of them; none where it is anything else."""
    try:
        value = json.loads(text)
        calls = []
        for one in value if isinstance(value, list) else [value]:
            name = one["name"]
            arguments = one["arguments"] if "arguments" in one else one["parameters"]
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return []
            told = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            key = f"call_{secrets.token_hex(12)}"
            calls.append({"id": key, "type": "function", "function": told})
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return calls
