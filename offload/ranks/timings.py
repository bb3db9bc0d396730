"""When runs were issued, stopped and back, and when tokens were emitted."""

from collections.abc import Callable
from typing import Literal, NamedTuple

_KEPT = 0.9  # of the time of a token so far, from one step to the next
_MOST_RISE = 10.0  # times that time: a longer one is no token's, but that of a process that was stopped or has slept

What = Literal["begun", "issued", "cancelled", "drawn", "dead", "emitted"]  # dead: back, without draws


class RunEvent(NamedTuple):
    """One moment of a text."""

    time_s: float  # of the head's clock
    what: What
    run: int  # -1 where none is meant
    num: int = 0  # rows of a run, tokens that were emitted


Listener = Callable[[RunEvent], None]


class TokenTime:
    """Seconds of a token, lately; `token_s` is 0 while nothing is known."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self._last_s: float | None = None

    def begin(self) -> None:
        """A text begins, and its first tokens take as long as the prompt; what was known before still holds."""
        self._last_s = None

    def emitted(self, num: int, now_s: float) -> None:
        """So many tokens have come at once."""
        if self._last_s is not None:
            token_s = (now_s - self._last_s) / num
            counted_s = min(token_s, _MOST_RISE * self.token_s)
            self.token_s = _KEPT * self.token_s + (1 - _KEPT) * counted_s if self.token_s else token_s
        self._last_s = now_s
