"""Answers in harmony, gpt-oss' form: messages, each with a header that names its channel.

A header ends at `<|message|>`, a message at `<|end|>`, `<|call|>` or `<|return|>`. The channel
`final` is for the user, `analysis` for the model itself; on `commentary` stand calls, whose
recipient is `functions.NAME`, and words for the user before them.
"""

import json
import re
from collections.abc import Iterable, Set

from offload.words.calls import _arguments
from offload.words.parts import Offered, Part, Text, Thought, WrittenCall
from offload.words.reader import HeldText

MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_STARTS = ("<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Reads one answer, see `PartReader`.

    Args:
        is_in_header: the prompt ends within a header.
    """

    def __init__(
        self, offered: Offered, specials: Set[str] = frozenset(), *, is_in_header: bool = False
    ) -> None:
        self._offered = offered
        self._held = HeldText(specials)
        self._header: str | None = "" if is_in_header else None
        self._channel = "final"
        self._function = ""
        # later messages for the user are set apart from the first
        self._has_said = {"final": False, "analysis": False}
        self._is_new = False

    def push(self, segments: Iterable[str]) -> list[Part]:
        """Return the parts that have become certain."""
        for segment in segments:
            self._held.add(segment)
        parts = list[Part]()
        while self._advance(parts):
            pass
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the parts that are left; arguments that are cut are no JSON."""
        parts = list[Part]()
        if self._function:
            body = self._held.take(len(self._held.text))
            parts += self._called(body) if body or not is_cut else []
        elif self._header is None:
            self._say(parts, self._held.take(len(self._held.text)))
        elif not _CHANNEL.search(self._header + self._held.text):
            # no header, as it has no channel: words are not lost
            words = self._held.take(len(self._held.text)).removeprefix("assistant")
            self._channel = "final"
            self._say(parts, words)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Take in the held text up to the next mark; return False if there is none yet."""
        marks = ("<|message|>",) if self._header is not None else (*_ENDS, *_STARTS)
        place, mark = self._held.find(marks)
        if not mark:
            if self._header is None and not self._function:
                self._say(parts, self._held.take(self._held.certain(marks)))
            return False
        if self._header is not None:
            self._open(self._header + self._held.drop(place))
            self._held.drop(len(mark))
            return True
        body = self._held.take(place)
        if self._function:
            parts += self._called(body)
        else:
            self._say(parts, body)
        self._function = ""
        self._held.drop(len(mark))
        # between an end and the next start nothing is said
        self._header = mark if mark == "<|channel|>" else ""
        return True

    def _open(self, header: str) -> None:
        """Begin a message with this header."""
        self._header = None
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        self._channel = "analysis" if channel and channel[1] == "analysis" else "final"
        self._function = recipient[1] if recipient and recipient[1] in self._offered else ""
        self._is_new = True

    def _say(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        if self._is_new and self._has_said[self._channel]:
            text = "\n" + text
        self._is_new = False
        self._has_said[self._channel] = True
        parts.append(Thought(text) if self._channel == "analysis" else Text(text))

    def _called(self, body: str) -> list[Part]:
        """Return the call whose arguments are this text, or the text."""
        name = self._function
        self._function = ""
        try:
            arguments = _arguments(json.loads(body or "{}"))
        except (ValueError, TypeError, RecursionError):
            return [Text(body)] if body else []
        return [WrittenCall(name, arguments).as_call(is_short=False)]
