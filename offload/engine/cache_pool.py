"""Who has the caches of a decoder: memory is planned for so many texts at a time, each with a set of its own.

They are never replaced: captured graphs lie on their buffers, and a text may go on from what another one left there.
With one set a text that is begun overtakes the one before; with several each text keeps its own until it is released.
"""

import weakref
from collections.abc import Sequence as Several

from offload.engine.sequence import Caches, Sequence
from offload.errors import UserError

LEAST_COPIED = 16  # tokens: computing fewer once more takes no longer


class _Place:
    """One set of caches, and whose text is in it."""

    def __init__(self, caches: Caches) -> None:
        self.caches, self._returned, self._last_used = caches, list[int](), 0
        self._held: weakref.ref[Sequence] | None = None

    @property
    def holder(self) -> Sequence | None:
        """Who has them; whoever was dropped has them no more."""
        return None if self._held is None else self._held()

    @property
    def tokens(self) -> list[int]:
        """Of the text that the caches belong to: their content begins with these."""
        return self._returned if self.holder is None else self.holder.tokens

    def give(self, sequence: Sequence, num_kept: int) -> None:
        """To a sequence, with what they hold of its first tokens."""
        self.take_back()
        self.caches.clear(num_kept)
        sequence.hold(self.caches)
        sequence.stats.num_kept_tokens = self.caches.target.length
        self._held = weakref.ref(sequence, self._forget)
        self._last_tokens = sequence.tokens

    def take_back(self) -> None:
        """Nobody has them; the text in them is the same."""
        self._returned, holder = self.tokens, self.holder
        self._held = None
        if holder is not None:
            holder.hold(None)

    def fill(self, tokens: list[int]) -> None:
        """They were filled with what belongs to these tokens."""
        assert self.holder is None, "a sequence has the caches"
        self._returned = tokens

    def _forget(self, _: object) -> None:
        self._returned = self._last_tokens


class CachePool:
    """Lends sets of caches to sequences; `start` is what texts have behind what an encoder reads."""

    def __init__(self, sets: Several[Caches], start: tuple[int, ...] = ()) -> None:
        self._places, self._start = [_Place(caches) for caches in sets], start  # the one used last comes last

    @property
    def caches(self) -> Caches:
        """The set that was used last."""
        return self._places[-1].caches

    @property
    def tokens(self) -> list[int]:
        """Of the text that these belong to: their content begins with them."""
        return self._places[-1].tokens

    def lend(self, sequence: Sequence, *, keeps: bool) -> None:
        """A set that nobody has, or the only one; `keeps` what was computed for the tokens that both begin with.

        Raises `UserError` where all are taken.
        """
        free = self._free()
        num_kept, place = 0, free[0]
        if keeps:
            alike = [self._num_to_keep(one, sequence.tokens) for one in free]
            num_kept = max(alike)
            place = free[alike.index(num_kept)]
            num_kept = self._copied(place, sequence.tokens, num_kept)
        place.give(sequence, num_kept)
        self._places.remove(place)
        self._places.append(place)

    def borrow(self) -> Caches:
        """An empty set that nobody has, or the only one, for what is no text; the next text may have it.

        Raises `UserError` where all are taken.
        """
        place = self._free()[0]
        place.take_back()
        place.fill([])
        place.caches.clear()
        return place.caches

    def _free(self) -> list[_Place]:
        free = [place for place in self._places if place.holder is None] or self._places[: len(self._places) == 1]
        if not free:
            raise UserError(
                f"{len(self._places)} texts are being written, as many as there is memory for: "
                "release one, or load with a larger `parallel`"
            )
        return free

    def _copied(self, place: _Place, tokens: list[int], num_kept: int) -> int:
        """Tokens that a place holds once it has taken over what another text, such as one being written, holds more."""
        others = [(self._num_to_keep(one, tokens), one) for one in self._places]
        num_shared, other = max(others, key=lambda pair: pair[0])
        if other is place or num_shared < num_kept + LEAST_COPIED:
            return num_kept
        place.take_back()
        place.fill([])  # of a copy that is cut short nothing is kept
        place.caches.copy_from(other.caches, num_shared)
        place.fill(tokens[:num_shared])
        return num_shared

    def _num_to_keep(self, place: _Place, tokens: list[int]) -> int:
        """Of the tokens but for the last, what a place has; nothing of another prompt to an encoder, however alike."""
        num = num_shared(place.tokens, tokens)
        is_other = any(one not in tokens[:num] for one in self._start)
        return 0 if is_other else min(num, len(tokens) - 1, place.caches.target.length)

    def release(self, sequence: Sequence) -> None:
        """Its caches may go to others; what they hold stays until then."""
        for place in self._places:
            if place.holder is sequence:
                place.take_back()

    def take_back(self) -> list[int]:
        """No sequence has any caches; returns the tokens of the last that had."""
        for place in self._places:
            place.take_back()
        return self.tokens

    def filled_for(self, tokens: list[int]) -> None:
        """The caches that were used last, which nobody has, were filled with what belongs to these."""
        self._places[-1].fill(tokens)


def num_shared(first: list[int], second: list[int]) -> int:
    """Tokens at the beginning that two texts have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
