"""Sources of guesses that are no models: what all of them are asked, and all of them together."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from offload.drafting.base import DraftState
from offload.drafting.guesses import NO_GUESSES, Guesses, Tier
from offload.drafting.trust import Trust


class Asked(NamedTuple):
    """How much is wanted."""

    num_nodes: int  # at most, the root left out
    depth: int  # tokens of a continuation


class Source(Protocol):
    """Where guesses come from; what it keeps of one text is a state."""

    name: str

    def new_state(self) -> DraftState:
        """Of a text of which nothing is known yet."""

    def tiers(self, tokens: Sequence[int], asked: Asked, state: Any) -> Iterable[Tier]:
        """What it says of the tokens behind these."""


class SourcesState:
    """What every source keeps of one text, and what they said last."""

    def __init__(self, states: Sequence[DraftState]) -> None:
        self.states, self.said = states, NO_GUESSES

    def copy_from(self, other: "SourcesState", num_tokens: int) -> None:
        """Texts are read anew where they are asked about."""
        self.clear()

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text but for its first tokens, and what was guessed behind them: every step begins so."""
        self.said = NO_GUESSES
        for state in self.states:
            state.clear(num_kept)


class Sources:
    """Several sources, asked together."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def __bool__(self) -> bool:
        return bool(self._sources)

    def __str__(self) -> str:
        return ", ".join(source.name for source in self._sources)

    def new_state(self) -> SourcesState:
        """That of a new text."""
        return SourcesState([source.new_state() for source in self._sources])

    def ask(self, tokens: Sequence[int], asked: Asked, trust: Trust, state: SourcesState) -> Guesses:
        """All that they say of what follows `tokens`; kept in the state, to be learned from."""
        pairs = zip(self._sources, state.states, strict=True)
        tiers = [tier for source, own in pairs for tier in source.tiers(tokens, asked, own)]
        state.said = Guesses(tiers, trust)
        return state.said


NO_SOURCES = Sources(())
