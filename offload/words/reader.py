"""Readers of answers: text comes in pieces, and parts go out once they are certain.

Invariant: however an answer is cut into pieces, its parts, those of a kind joined, are the same.
What turns out to be no call, or calls what was not offered, is text.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from offload.words.calls import CallForm
from offload.words.parts import Call, Offered, Part, Special, Text, Thought


class PartReader(Protocol):
    """What reads one answer."""

    def push(self, segments: Iterable[str]) -> list[Part]:
        """Return the parts that have become certain."""

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the parts that are left, when the answer has ended.

        Args:
            is_cut: its limit has ended it: what stands in a block without an end is no call, since
                arguments may be missing.
        """


class HeldText:
    """Text that waits to be certain, with the places of its special tokens.

    Args:
        specials: texts that are special tokens: one that ordinary tokens spell marks nothing.
    """

    def __init__(self, specials: Set[str]) -> None:
        self._specials = specials
        self.text = ""
        # [first, end) of each special token, in order
        self._spans: list[tuple[int, int]] = []

    def add(self, segment: str) -> None:
        """Let a segment follow."""
        if isinstance(segment, Special):
            self._spans.append((len(self.text), len(self.text) + len(segment)))
        self.text += segment

    def find(self, marks: Sequence[str]) -> tuple[int, str]:
        """Return the place and the text of the first mark; behind the end if there is none."""
        best = (len(self.text), "")
        for mark in marks:
            place = self.text.find(mark)
            while 0 <= place < best[0] and not self._is_mark(mark, place):
                place = self.text.find(mark, place + 1)
            if 0 <= place < best[0]:
                best = (place, mark)
        return best

    def certain(self, marks: Sequence[str]) -> int:
        """Return the length of the text that can be no beginning of a mark."""
        longest = max(map(len, marks), default=0)
        for size in range(min(longest - 1, len(self.text)), 0, -1):
            if any(mark.startswith(self.text[-size:]) for mark in marks):
                return len(self.text) - size
        return len(self.text)

    def take(self, num_chars: int) -> str:
        """Take this many characters; return those that are no special tokens."""
        kept = []
        place = 0
        for first, end in self._spans:
            if first < num_chars:
                kept.append(self.text[place:first])
                place = end
        kept.append(self.text[place:num_chars])
        self.drop(num_chars)
        return "".join(kept)

    def drop(self, num_chars: int) -> str:
        """Take this many characters; return all of them, special tokens included."""
        taken = self.text[:num_chars]
        self.text = self.text[num_chars:]
        left = [(first - num_chars, end - num_chars) for first, end in self._spans]
        self._spans = [span for span in left if span[0] >= 0]
        return taken

    def drop_specials(self, marks: Sequence[str]) -> None:
        """Drop special tokens at the beginning that are not the beginning of a mark."""
        while self._spans and self._spans[0][0] == 0:
            special = self.text[: self._spans[0][1]]
            if any(mark.startswith(special) for mark in marks):
                return
            self.drop(len(special))

    def _is_mark(self, mark: str, place: int) -> bool:
        if not any(mark.startswith(special) for special in self._specials):
            return True
        index = bisect_left(self._spans, (place, 0))
        return index < len(self._spans) and self._spans[index][0] == place


@dataclass(frozen=True)
class ThoughtForm:
    """The marks around what a model writes for itself."""

    opening: str
    closing: str


class TaggedReader:
    """Reads answers in which marks stand around thoughts and around calls.

    Blanks beside thoughts and calls are the template's and no text.

    Args:
        is_thinking: the prompt has begun a thought.
        has_short_keys: the template takes keys of 9 characters.
    """

    def __init__(
        self,
        thoughts: ThoughtForm | None,
        calls: CallForm | None,
        offered: Offered,
        specials: Set[str] = frozenset(),
        *,
        is_thinking: bool = False,
        has_short_keys: bool = False,
    ) -> None:
        self._thoughts = thoughts
        self._calls = calls if offered else None
        self._offered = offered
        self._has_short_keys = has_short_keys
        self._held = HeldText(specials)
        self._is_thinking = is_thinking
        # blanks that come next are dropped
        self._is_behind_mark = is_thinking
        # blanks that were held, which are text if text follows
        self._blanks = ""
        self._has_said = False
        # where the end of a block is looked for next; None outside of blocks
        self._block_end: int | None = None

    def push(self, segments: Iterable[str]) -> list[Part]:
        """Return the parts that have become certain, see `PartReader`."""
        for segment in segments:
            self._held.add(segment)
        parts = list[Part]()
        while self._advance(parts):
            pass
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the parts that are left, see `PartReader`."""
        parts = list[Part]()
        # a block of calls that was cut off before its closing mark is text
        may_call = not (is_cut and self._calls is not None and bool(self._calls.closing))
        while self._held.text:
            if self._block_end is None and not self._may_be_whole():
                if not self._advance(parts):
                    self._say(parts, self._held.take(len(self._held.text)))
            elif may_call and (calls := self._read_calls(self._held.text)):
                self._block_end = None
                self._held.drop(len(self._held.text))
                parts += calls
            else:
                # no calls: the opening mark is text, and what follows is looked at again
                self._block_end = None
                self._say(parts, self._held.take(max(1, len(self._opening))))
        if self._blanks and not self._is_thinking:
            parts.append(Text(self._blanks))
        return parts

    @property
    def _opening(self) -> str:
        return self._calls.opening if self._calls is not None else ""

    def _marks(self) -> list[str]:
        if self._thoughts is not None and self._is_thinking:
            return [self._thoughts.closing]
        thoughts = [] if self._thoughts is None else [self._thoughts.opening]
        return [*thoughts, *([self._opening] if self._opening else [])]

    def _may_be_whole(self) -> bool:
        """Return True if all of the answer may be calls, which its end tells."""
        is_bare = self._calls is not None and not self._opening and not self._is_thinking
        start = self._held.text.lstrip()[:1]
        return is_bare and not self._has_said and start in ("{", "[")

    def _advance(self, parts: list[Part]) -> bool:
        """Settle the next piece; return whether there may be more."""
        if self._block_end is not None:
            return self._close_block(parts)
        marks = self._marks()
        if not self._has_said:
            self._held.drop_specials(marks)
        if not self._held.text or self._may_be_whole():
            return False
        place, mark = self._held.find(marks)
        if not mark:
            self._say(parts, self._held.take(self._held.certain(marks)))
            return False
        self._say(parts, self._held.take(place))
        if mark == self._opening and not self._is_thinking:
            self._block_end = len(mark)
        else:
            self._held.drop(len(mark))
            self._is_thinking = not self._is_thinking
            self._is_behind_mark = True
            self._blanks = ""
        return True

    def _close_block(self, parts: list[Part]) -> bool:
        """Read the block that was begun, where its end is there."""
        assert self._calls is not None and self._block_end is not None, "a block was begun"
        closing = self._calls.closing
        end = self._held.text.find(closing, self._block_end) if closing else -1
        if end < 0:
            # the mark of its end may begin in what is there
            self._block_end = max(self._block_end, len(self._held.text) - len(closing))
            return False
        end += len(closing)
        calls = self._read_calls(self._held.text[:end])
        if not calls:
            # the mark may stand within an argument: another may follow
            self._block_end = end
            return True
        parts += calls
        self._held.drop(end)
        self._block_end = None
        return True

    def _read_calls(self, block: str) -> list[Call]:
        """Return the calls of a block; none where it has a name that was not offered."""
        if self._calls is None:
            return []
        calls = self._calls.read(block.strip(), self._offered) or []
        if not all(call.name in self._offered for call in calls):
            return []
        if calls:
            self._is_behind_mark = True
            self._blanks = ""
        return [call.as_call(self._has_short_keys) for call in calls]

    def _say(self, parts: list[Part], text: str) -> None:
        """Add text to the parts; blanks at its end wait for what follows."""
        if self._is_behind_mark:
            text = text.lstrip()
        if not text:
            return
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._is_behind_mark = False
            self._has_said = self._has_said or not self._is_thinking
            parts.append(Thought(kept) if self._is_thinking else Text(kept))
