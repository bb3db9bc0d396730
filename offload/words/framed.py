"""An answer as a person reads it: thoughts stand between marks, whatever the model's own are."""

from collections.abc import Sequence

from offload.words.parts import Part, Text, Thought

_OPENING = "<think>\n"
_CLOSING = "\n</think>\n\n"


class FramedText:
    """Turns the parts of an answer, as they come, into text."""

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
