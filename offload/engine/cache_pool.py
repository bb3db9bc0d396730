"""Sets of caches, lent to the texts that are being written.

Memory is planned for a number of texts at a time, each with a set of caches of its own.
"""

import weakref
from collections.abc import Sequence
from typing import Protocol

from offload.engine.decoder_config import DecoderConfig
from offload.engine.prefix_cache import open_prefixes
from offload.engine.sequence import Caches, TokenSequence
from offload.errors import UserError

LEAST_COPIED = 16  # tokens; copying fewer from another text takes as long as computing them


class CacheHolder(Protocol):
    """A borrower of caches: a text, or scores of several texts."""

    tokens: list[int]

    def hold(self, caches: Caches | None) -> None:
        """Use these caches from now on; None takes them away."""


class _CacheSet:
    """One set of caches, and whose text is in it."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self._returned = list[int]()
        self._last_tokens = list[int]()
        self.is_kept = True  # whether the prefix cache has all of it
        self._holder: weakref.ref[CacheHolder] | None = None

    @property
    def holder(self) -> CacheHolder | None:
        """Return the holder; None once it was dropped."""
        return None if self._holder is None else self._holder()

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the text in the caches: their content begins with these."""
        return self._returned if self.holder is None else self.holder.tokens

    def assign(self, holder: CacheHolder, num_kept: int) -> None:
        """Assign the set to a holder, with the rows of its first `num_kept` tokens."""
        self.release()
        self.caches.clear(num_kept)
        holder.hold(self.caches)
        self.is_kept = False
        self._holder = weakref.ref(holder, self._forget)
        self._last_tokens = holder.tokens

    def release(self) -> None:
        """Take the set from its holder; the rows in it stay."""
        self._returned = self.tokens
        holder = self.holder
        self._holder = None
        if holder is not None:
            holder.hold(None)

    def fill(self, tokens: list[int]) -> None:
        """Note that the caches now hold these tokens."""
        assert self.holder is None, "a sequence has the caches"
        self._returned = tokens
        self.is_kept = False

    def _forget(self, _: object) -> None:
        self._returned = self._last_tokens


class CachePool:
    """Assigns sets of caches to sequences; `start_ids` precede every text after an encoder's prompt.

    Caches are never replaced: captured graphs refer to their buffers, and a text may continue from
    what another one left there. With one set a new text takes over the one before; with several
    each text keeps its own until it is released. Before another text gets a set, its content goes
    to a prefix cache, if `config` asks for one.
    """

    def __init__(
        self,
        sets: Sequence[Caches],
        start_ids: tuple[int, ...] = (),
        config: DecoderConfig | None = None,
    ) -> None:
        # the most recently used is last
        self._sets = [_CacheSet(caches) for caches in sets]
        self._start_ids = start_ids
        self._prefixes = None
        if config is not None and not start_ids:
            self._prefixes = open_prefixes(config, [caches.target for caches in sets])

    @property
    def caches(self) -> Caches:
        return self._sets[-1].caches

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the text in them: their content begins with these."""
        return self._sets[-1].tokens

    def acquire(self, sequence: TokenSequence, *, keeps: bool) -> None:
        """Assign a free set, or the only one, to a sequence. Raises `UserError` if all are taken.

        With `keeps`, the set's rows of the tokens that both texts begin with are kept.
        """
        free = self._free()
        num_kept = 0
        best = free[0]
        if keeps:
            shared = [self._num_to_keep(cache_set, sequence.tokens) for cache_set in free]
            num_kept = max(shared)
            best = free[shared.index(num_kept)]
            num_kept = self._copied(best, sequence.tokens, num_kept)
        self._keep(best)
        best.assign(sequence, num_kept)
        self._sets.remove(best)
        self._sets.append(best)

    def fill(self, sequence: TokenSequence) -> None:
        """Load what is kept of a text that was lent a set, see `PrefixCache`."""
        if self._prefixes is not None:
            self._prefixes.fill(sequence.caches, sequence.tokens)

    def keep(self, sequence: TokenSequence) -> None:
        """Keep a text's computed rows for others with the same beginning, see `PrefixCache`."""
        if self._prefixes is not None:
            self._prefixes.keep(sequence.caches, sequence.tokens)

    def _keep(self, cache_set: _CacheSet) -> None:
        """Keep the content of a set before another text gets it, unless that was done."""
        if self._prefixes is not None and not cache_set.is_kept:
            self._prefixes.keep(cache_set.caches, cache_set.tokens)
            cache_set.is_kept = True

    def acquire_empty(self, holder: CacheHolder) -> None:
        """Assign a free set, or the only one, emptied, to a holder that is no text.

        Raises `UserError` if all are taken.
        """
        cache_set = self._free()[0]
        self._keep(cache_set)
        cache_set.assign(holder, 0)

    def _free(self) -> list[_CacheSet]:
        free = [cache_set for cache_set in self._sets if cache_set.holder is None]
        if len(self._sets) == 1:
            return [*self._sets]
        if not free:
            raise UserError(
                f"{len(self._sets)} texts are being written, as many as there is memory for: "
                "release one, or load with a larger `parallel`"
            )
        return free

    def _copied(self, cache_set: _CacheSet, tokens: list[int], num_kept: int) -> int:
        """Copy the rows of these tokens that only another set holds; return the number held."""
        others = [(self._num_to_keep(other, tokens), other) for other in self._sets]
        most_shared, other = max(others, key=lambda pair: pair[0])
        if other is cache_set or most_shared < num_kept + LEAST_COPIED:
            return num_kept
        self._keep(cache_set)
        cache_set.release()
        cache_set.fill([])  # nothing of an interrupted copy is kept
        cache_set.caches.copy_from(other.caches, most_shared)
        cache_set.fill(tokens[:most_shared])
        return most_shared

    def _num_to_keep(self, cache_set: _CacheSet, tokens: list[int]) -> int:
        """Count these tokens in a set, the last excluded; 0 for another encoder's prompt."""
        num = num_shared(cache_set.tokens, tokens)
        is_other = any(token not in tokens[:num] for token in self._start_ids)
        return 0 if is_other else cache_set.caches.target.reusable_prefix(min(num, len(tokens) - 1))

    def release(self, sequence: CacheHolder) -> None:
        """Give the caches back; their content stays until they are lent again."""
        for cache_set in self._sets:
            if cache_set.holder is sequence:
                cache_set.release()
                self._keep(cache_set)

    def release_all(self) -> list[int]:
        """Take the caches from all sequences; return the tokens of the last holder."""
        for cache_set in self._sets:
            cache_set.release()
            self._keep(cache_set)
        return self.tokens

    def filled_for(self, tokens: list[int]) -> None:
        """Note that the most recently used caches, which are free, were filled with these tokens."""
        self._sets[-1].fill(tokens)


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of first tokens that two texts have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next(
        (index for index, (token, other) in pairs if token != other), min(len(first), len(second))
    )
