"""One text being written: its tokens, how it goes on, and the caches and the turn that it needs.

Models hold weights alone, so all that is known of a text is in its `Sequence`. Memory is planned
for so many texts at a time, each with a set of caches of its own, which a `CachePool` lends.
`DecoderLock` says which thread may use the decoder.

Invariants: the caches of a sequence hold keys and values of its tokens, from the first on (a step
that was cut short may leave more in them, which the next one clears away); log-probabilities are
the target's own, before anything was done to its logits, and asking for them changes no token; only
the thread that has the turn touches caches, slots and readers.
"""

import sys
import threading
import weakref
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from offload.errors import UserError
from offload.model.kv_cache import KVCache
from offload.planning.chains import ChainPolicy
from offload.rules import ChildSampling
from offload.sampling.sampler import Rows, Sampler
from offload.stats import Stats, Transfers
from offload.trees.topology import DynamicShape, Shape, chain
from offload.trees.verification import Rule


class TokenLogprob(NamedTuple):
    """One new token."""

    token: int
    # natural; of the softmax of the target's logits, before penalties, biases, temperature and
    # filters
    logprob: float
    # the likeliest tokens there with theirs, the likeliest first
    top: tuple[tuple[int, float], ...]


def path_logprobs(
    rows: Rows, nodes: abc.Sequence[int], tokens: abc.Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """Return the log-probabilities of the tokens emitted after these nodes of an accepted path.

    They are those of the target's own logits.
    """
    return [_logprob(rows[node], token, num_top) for node, token in zip(nodes, tokens, strict=True)]


def _logprob(logits_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    logprob_V = logits_V.float().log_softmax(0)
    logprob_K, token_K = logprob_V.topk(min(num_top, len(logprob_V)))
    return TokenLogprob(
        token,
        float(logprob_V[token]),
        tuple(zip(token_K.tolist(), logprob_K.tolist(), strict=True)),
    )


class Caches(NamedTuple):
    """What the two models keep of one text."""

    target: KVCache
    draft: Any  # a `DraftState`, of a kind that its drafter alone knows

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text but for its first tokens."""
        self.target.clear(num_kept)
        self.draft.clear(num_kept)

    def copy_from(self, other: "Caches", num_tokens: int) -> None:
        """Hold what another text's hold of its first tokens, and nothing else."""
        self.target.copy_from(other.target, num_tokens)
        self.draft.copy_from(other.draft, num_tokens)


class PassFigures(NamedTuple):
    """What the last pass over the weights did for one text."""

    parents: list[int]  # of its tree's nodes, in level order; the root's is -1
    tokens: list[int]  # of the nodes
    accepted: list[int]  # nodes of the accepted path, root first
    num_texts: int  # that shared the pass
    draft_s: float
    sweep_s: float
    moved: Transfers


class Limits(NamedTuple):
    """What ends a text."""

    max_new_tokens: int = sys.maxsize
    # that of the end is part of the sequence, but not of its text
    end_ids: frozenset[int] = frozenset()


class Sequence:
    """One text, with the caches that were lent to it.

    Attributes:
        tokens: of the prompt, then all that were accepted; the last is the root of the next tree.
        shape: of the next tree.
        limits: what ends it.
        stats: of its steps since the shape was set.
        last_pass: its last step; None before the first.
        num_logprobs: how many of the likeliest tokens to note beside each new one; None notes
            nothing.
        logprobs: of the new tokens, where they are noted.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        sampler: Sampler,
        rule: Rule,
        shape: Shape,
        limits: Limits,
        *,
        has_draft: bool = True,
    ) -> None:
        self._has_draft = has_draft
        self.tokens = list(tokens)
        self.sampler = sampler
        self.rule = rule
        self.limits = limits
        self.num_prompt_tokens = len(self.tokens)
        self._caches: Caches | None = None
        self._chains: ChainPolicy | None = None
        self._among: Callable[[int], Shape] | None = None
        self.last_pass: PassFigures | None = None
        self.num_logprobs: int | None = None
        self.logprobs = list[TokenLogprob]()
        self.set_shape(shape)

    def set_shape(self, shape: Shape) -> Stats:
        """Give later trees this shape; return the figures of their steps, which begin anew."""
        self.shape = shape
        self.stats = Stats(num_prompt_tokens=self.num_prompt_tokens)
        self.stats.tree_num_nodes = shape.num_nodes
        self.stats.tree_depth = shape.depth
        self.stats.is_tree_dynamic = isinstance(shape, DynamicShape)
        is_known = self.sampler.is_greedy or self.sampler.drafting is not ChildSampling.COUPLED
        self.stats.is_draft_known = is_known and self._has_draft
        return self.stats

    def follow(
        self, chains: ChainPolicy | None, among: Callable[[int], Shape] | None = None
    ) -> None:
        """Let trees be chains of lengths that change as this says, from the next step on.

        None changes nothing. `among` returns the shape of its tree beside others, by how many texts
        share the pass. `among` is the shape of its tree beside others, by how many texts share the
        pass.
        """
        self._chains = chains
        self._among = among

    def shape_among(self, num_texts: int) -> Shape:
        """Return the shape of the next tree, where so many texts share the pass."""
        is_fixed = num_texts == 1 or self._chains is not None or self._among is None
        return self.shape if is_fixed else self._among(num_texts)  # type: ignore[misc]

    @property
    def is_taken_in(self) -> bool:
        """Return whether keys and values are there for all tokens but the last."""
        return self.caches.target.length >= len(self.tokens) - 1

    def lengthen(self) -> None:
        """End a step: let the next chain be as long as all steps so far suggest.

        Nothing is drawn for it yet.
        """
        if self._chains is None:
            return
        self.stats.chain_lengths.append(self.shape.depth)
        self.shape = chain(self._chains.length(self.stats.first_guess))
        self.stats.tree_depth = max(self.stats.tree_depth, self.shape.depth)
        self.stats.tree_num_nodes = 1 + self.stats.tree_depth

    @property
    def caches(self) -> Caches:
        """Return what the models keep of it.

        Raises `UserError` when they were taken away, by another one or for good.
        """
        if self._caches is None:
            raise UserError(
                "this decoder has begun another generation or was closed: finish one before the "
                "next"
            )
        return self._caches

    def hold(self, caches: Caches | None) -> None:
        """Let these be its caches from now on; None takes them away."""
        self._caches = caches

    @property
    def new_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_at_end_token(self) -> bool:
        """Return whether the model has ended the text."""
        return len(self.tokens) > self.num_prompt_tokens and self.tokens[-1] in self.limits.end_ids

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more is to be written, as far as tokens tell."""
        is_whole = len(self.tokens) >= self.num_prompt_tokens + self.limits.max_new_tokens
        return is_whole or self.is_at_end_token or self.sampler.is_over

    def accept(self, tokens: list[int], logprobs: Iterable[TokenLogprob] = ()) -> list[int]:
        """Add newly accepted tokens up to where the text ends; returns those."""
        num_left = self.num_prompt_tokens + self.limits.max_new_tokens - len(self.tokens)
        end = next(
            (index for index, token in enumerate(tokens) if token in self.limits.end_ids),
            len(tokens),
        )
        counted = tokens[: min(end + 1, num_left)]
        counted = counted[: self.sampler.accept(counted)]
        self.tokens += counted
        self.logprobs += islice(logprobs, len(counted))
        return counted

    def cut(self, num_new: int) -> None:
        """Drop all but so many of its new tokens: behind them a stop string is complete."""
        del self.tokens[self.num_prompt_tokens + num_new :], self.logprobs[num_new:]
        self.sampler.cut(self.new_ids)


# Copying fewer tokens from another text takes as long as computing them.
LEAST_COPIED = 16


class _Place:
    """One set of caches, and whose text is in it."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self._returned = list[int]()
        self._last_used = 0
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
    """Lends sets of caches to sequences; `start` is what texts have behind what an encoder reads.

    Caches are never replaced: captured graphs lie on their buffers, and a text may go on from what
    another one left there. With one set a text that is begun overtakes the one before; with several
    each text keeps its own until it is released.
    """

    def __init__(self, sets: abc.Sequence[Caches], start: tuple[int, ...] = ()) -> None:
        # the one used last comes last
        self._places = [_Place(caches) for caches in sets]
        self._start = start

    @property
    def caches(self) -> Caches:
        """Return the set that was used last."""
        return self._places[-1].caches

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the text in them: their content begins with these."""
        return self._places[-1].tokens

    def lend(self, sequence: Sequence, *, keeps: bool) -> None:
        """Lend a free set, or the only one; `keeps` what was computed for the tokens that both
        texts begin with.

        Raises `UserError` where all are taken.
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
        """Return a free set, or the only one, emptied, for what is no text; the next text may have
        it.

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
        """Copy what another text's place holds more of these tokens; return how many the place has
        then.
        """
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
        """Return how many of the tokens, but for the last, a place has.

        It has none of another prompt to an encoder, however alike.
        """
        num = num_shared(place.tokens, tokens)
        is_other = any(one not in tokens[:num] for one in self._start)
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
        """Hold the turn for a run, or a part of one.

        Raises `UserError` where another thread has it, or the decoder was closed.
        """
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
