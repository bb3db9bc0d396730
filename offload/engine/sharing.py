"""What the texts of one decoder share: sets of caches, which are lent, and the turn at computing.

Memory is planned for so many texts at a time, each with a set of caches of its own, which a
`CachePool` lends. `DecoderLock` says which thread may use the decoder. Invariant: only the thread
that has the turn touches caches, slots and readers.
"""

import threading
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from offload.engine.sequence import Caches, Sequence
from offload.errors import UserError

LEAST_COPIED = 16  # copying fewer tokens from another text takes as long as computing them


class _Place:
    """One set of caches, and whose text is in it."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self._returned = list[int]()
        self._held: weakref.ref[Sequence] | None = None

    @property
    def holder(self) -> Sequence | None:
        """Return the sequence that has them; one that was dropped has them no more."""
        return None if self._held is None else self._held()

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the text in the caches: their content begins with these."""
        return self._returned if self.holder is None else self.holder.tokens

    def give(self, sequence: Sequence, num_kept: int) -> None:
        """Give them to a sequence, with what they hold of its first tokens."""
        self.take_back()
        self.caches.clear(num_kept)
        sequence.hold(self.caches)
        sequence.stats.num_kept_tokens = self.caches.target.length
        self._held = weakref.ref(sequence, self._forget)
        self._last_tokens = sequence.tokens

    def take_back(self) -> None:
        """Take them from the sequence that has them; the text in them stays."""
        self._returned = self.tokens
        holder = self.holder
        self._held = None
        if holder is not None:
            holder.hold(None)

    def fill(self, tokens: list[int]) -> None:
        """Note that they were filled with what belongs to these tokens."""
        assert self.holder is None, "a sequence has the caches"
        self._returned = tokens

    def _forget(self, _: object) -> None:
        self._returned = self._last_tokens


class CachePool:
    """Lends sets of caches to sequences; `start_ids` are what texts have behind what an encoder reads.

    Caches are never replaced: captured graphs lie on their buffers, and a text may go on from what
    another one left there. With one set a text that is begun overtakes the one before; with several
    each text keeps its own until it is released.
    """

    def __init__(self, sets: abc.Sequence[Caches], start_ids: tuple[int, ...] = ()) -> None:
        # the one used last comes last
        self._places = [_Place(caches) for caches in sets]
        self._start_ids = start_ids

    @property
    def caches(self) -> Caches:
        return self._places[-1].caches

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the text in them: their content begins with these."""
        return self._places[-1].tokens

    def lend(self, sequence: Sequence, *, keeps: bool) -> None:
        """Lend a free set, or the only one. Raises `UserError` where all are taken.

        `keeps` what was computed for the tokens that both texts begin with.
        """
        free = self._free()
        num_kept = 0
        place = free[0]
        if keeps:
            alike = [self._num_to_keep(one, sequence.tokens) for one in free]
            num_kept = max(alike)
            place = free[alike.index(num_kept)]
            num_kept = self._copied(place, sequence.tokens, num_kept)
        place.give(sequence, num_kept)
        self._places.remove(place)
        self._places.append(place)

    def borrow(self) -> Caches:
        """Return a free set, or the only one, emptied for what is no text; a text may take it.

        Raises `UserError` where all are taken.
        """
        place = self._free()[0]
        place.take_back()
        place.fill([])
        place.caches.clear()
        return place.caches

    def _free(self) -> list[_Place]:
        free = [place for place in self._places if place.holder is None] or self._places[
            : len(self._places) == 1
        ]
        if not free:
            raise UserError(
                f"{len(self._places)} texts are being written, as many as there is memory for: "
                "release one, or load with a larger `parallel`"
            )
        return free

    def _copied(self, place: _Place, tokens: list[int], num_kept: int) -> int:
        """Copy what another place holds more of these tokens; return how many there are then."""
        others = [(self._num_to_keep(one, tokens), one) for one in self._places]
        most_shared, other = max(others, key=lambda pair: pair[0])
        if other is place or most_shared < num_kept + LEAST_COPIED:
            return num_kept
        place.take_back()
        place.fill([])  # of a copy that is cut short nothing is kept
        place.caches.copy_from(other.caches, most_shared)
        place.fill(tokens[:most_shared])
        return most_shared

    def _num_to_keep(self, place: _Place, tokens: list[int]) -> int:
        """Return how many tokens but the last a place has; none of another encoder's prompt."""
        num = num_shared(place.tokens, tokens)
        is_other = any(one not in tokens[:num] for one in self._start_ids)
        return 0 if is_other else place.caches.target.keepable(min(num, len(tokens) - 1))

    def release(self, sequence: Sequence) -> None:
        """Let others have its caches; what they hold stays until then."""
        for place in self._places:
            if place.holder is sequence:
                place.take_back()

    def take_back(self) -> list[int]:
        """Take the caches from all sequences; return the tokens of the last that had any."""
        for place in self._places:
            place.take_back()
        return self.tokens

    def filled_for(self, tokens: list[int]) -> None:
        """Note that the caches used last, which are free, were filled for these tokens."""
        self._places[-1].fill(tokens)


def num_shared(first: abc.Sequence[int], second: abc.Sequence[int]) -> int:
    """Return how many tokens at the beginning two texts have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next(
        (index for index, (one, other) in pairs if one != other), min(len(first), len(second))
    )


class DecoderLock:
    """Gives the turn at a decoder to one thread, and within it to one step; others are refused.

    The thread that has it may take it again; only closing waits for it. `computing` is entered with
    every turn: where that thread is to compute.
    """

    def __init__(self, computing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._lock = threading.RLock()
        self._is_over = False
        self._computing = computing
        self._stepping: int | None = None  # the thread that a step is under way in

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the turn for a run. Raises `UserError` where it is another thread's, or closed."""
        if not self._lock.acquire(blocking=False):
            raise UserError(
                "this decoder is in use by another thread: wait until that is done, or load a "
                "second one"
            )
        try:
            self._require_no_own_step()
            if self._is_over:
                raise UserError("this decoder was closed: load the model again")
            with self._computing():
                yield
        finally:
            self._lock.release()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Hold the turn for one step, which nothing that it calls may disturb."""
        with self.held():
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None

    @contextmanager
    def last(self) -> Iterator[None]:
        """Hold the turn once another thread's step has ended; there is no other turn from now on."""
        self._require_no_own_step()
        self._is_over = True
        with self._lock:
            yield

    def _require_no_own_step(self) -> None:
        if self._stepping == threading.get_ident():
            raise UserError(
                "this decoder is in the middle of a step: let what that calls raise, to end it "
                "first"
            )
