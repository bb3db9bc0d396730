"""Who has the caches of a decoder: memory is planned for one text at a time, so there is one set of them.

They are never replaced: captured graphs lie on their buffers, and a text may go on from what the last one left there.
"""

from offload.engine.sequence import Caches, Sequence


class CachePool:
    """Lends one set of caches to one sequence at a time; `start` is what texts have behind what an encoder reads."""

    def __init__(self, caches: Caches, start: tuple[int, ...] = ()) -> None:
        self.caches, self._start = caches, start
        self._holder: Sequence | None = None
        self._returned: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """Of the text that the caches belong to: their content begins with these."""
        return self._returned if self._holder is None else self._holder.tokens

    def lend(self, sequence: Sequence, *, keeps: bool) -> None:
        """From whichever sequence had the caches; `keeps` what was computed for the tokens that both begin with."""
        before = self.take_back()
        self.caches.clear(self._num_to_keep(before, sequence.tokens) if keeps else 0)
        sequence.hold(self.caches)
        sequence.stats.num_kept_tokens = self.caches.target.length
        self._holder = sequence

    def _num_to_keep(self, before: list[int], tokens: list[int]) -> int:
        """Of the tokens but for the last; of another prompt to an encoder none, though it begin alike."""
        num = num_shared(before, tokens)
        is_other = any(one not in tokens[:num] for one in self._start)
        return 0 if is_other else min(num, len(tokens) - 1)

    def take_back(self) -> list[int]:
        """No sequence has the caches; returns the tokens of the last that had."""
        self._returned, holder = self.tokens, self._holder
        self._holder = None
        if holder is not None:
            holder.hold(None)
        return self._returned

    def filled_for(self, tokens: list[int]) -> None:
        """The caches, which nobody has, were filled with what belongs to these."""
        assert self._holder is None, "a sequence has the caches"
        self._returned = tokens


def num_shared(first: list[int], second: list[int]) -> int:
    """Tokens at the beginning that two texts have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
