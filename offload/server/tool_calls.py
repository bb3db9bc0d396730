"""Calls of tools in what a model writes: found in its text, in the forms that common models were taught.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 an answer that is one such
object (with `parameters`), Mistral a list of them. Invariant: text that turns out to be no call is handed out as text,
and none of it is lost.
"""

import json
import secrets
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCalls:
    """Takes one answer piece by piece. Without tools (`is_wanted` False) all is text."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted, self._held, self._is_begun = is_wanted, "", False
        self._calls: list[dict[str, Any]] = []

    def push(self, piece: str) -> str:
        """Text that is no part of a call, as far as that is certain."""
        if not self._is_wanted:
            return piece
        self._held += piece
        if not self._is_begun and self._held.lstrip()[:1] in ("{", "[", ""):
            return ""  # it may be a call as a whole; at the end that is known
        self._is_begun = True
        said = ""
        while _OPEN in self._held:
            before, _, rest = self._held.partition(_OPEN)
            inner, close, after = rest.partition(_CLOSE)
            said += before
            self._held = _OPEN + rest
            if not close:
                return said
            said += self._call_or_text(inner, _OPEN + inner + _CLOSE)
            self._held = after
        certain = len(self._held) - _num_begun(self._held)
        said, self._held = said + self._held[:certain], self._held[certain:]
        return said.rstrip() if self._calls and not said.strip() else said

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left of the text, and all calls."""
        held, self._held = self._held, ""
        if not self._is_wanted or not held:
            return held, self._calls
        inner = held.removeprefix(_OPEN)  # some leave the closing tag out
        return self._call_or_text(inner, held), self._calls

    def _call_or_text(self, inner: str, whole: str) -> str:
        found = _read(inner)
        self._calls += found
        return "" if found else whole


def _read(text: str) -> list[dict[str, Any]]:
    """Calls in a text that is one, or a list of them; none where it is anything else."""
    try:
        value = json.loads(text)
        values = value if isinstance(value, list) else [value]
        pairs = [(one["name"], one["arguments"] if "arguments" in one else one["parameters"]) for one in values]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    if not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in pairs):
        return []
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for name, arguments in pairs
    ]


def _num_begun(text: str) -> int:
    """Characters at its end that a tag may begin with."""
    return next((size for size in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:size])), 0)
