"""When runs were issued, stopped and back, and when tokens were emitted: for a picture, and for the paper's figures."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

_KEPT = 0.9  # of the time of a token so far, from one step to the next


What = Literal["begun", "issued", "cancelled", "drawn", "dead", "emitted"]  # dead: back, without draws


class RunEvent(NamedTuple):
    """One moment of a text."""

    time_s: float  # of the head's clock
    what: What
    run: int  # -1 where none is meant
    num: int = 0  # rows of a run, tokens that were emitted


Listener = Callable[[RunEvent], None]


class Pace(NamedTuple):
    """The paper's figures of one text."""

    tokens_per_s: float  # after the first ones, so without the prompt
    first_token_s: float  # from the beginning to the first token
    inter_token_s: float  # mean time from one token to the next


def pace_of(events: Iterable[RunEvent]) -> Pace:
    """Of the events of one text in which at least two steps emitted tokens; otherwise rates are 0."""
    told = list(events)
    begun_s = next(event.time_s for event in told if event.what == "begun")
    emitted = [event for event in told if event.what == "emitted"]
    if not emitted:
        return Pace(0.0, 0.0, 0.0)
    first, span_s = emitted[0], emitted[-1].time_s - emitted[0].time_s
    num_later = sum(event.num for event in emitted[1:])
    rate = num_later / span_s if span_s > 0 else 0.0
    return Pace(rate, first.time_s - begun_s, 1 / rate if rate else 0.0)


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
            self.token_s = _KEPT * self.token_s + (1 - _KEPT) * token_s if self.token_s else token_s
        self._last_s = now_s
