"""Probabilities of given texts: many of them in one pass, as branches of one tree of tokens.

Texts that begin alike share those rows, and all of them share sweeps over the weights. Nothing is
drawn. Invariant: a row sees the tokens before it in its own text, and no others.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload.declaration import whole_number
from offload.engine.cache_pool import num_shared
from offload.engine.sequence import Caches, TokenLogprob, token_logprob
from offload.errors import HostFault, UserError, require
from offload.model.kv_cache import KVCache
from offload.model.target import Target


class TextScore(NamedTuple):
    """The score of a text's end, given its beginning."""

    logprob: float  # natural logarithm, summed over its tokens
    is_greedy: bool  # whether each of them is the likeliest at its position
    num_tokens: int


class PromptScore(NamedTuple):
    """Scores of every token of a text but the first, given those before it."""

    tokens: tuple[TokenLogprob, ...]
    likeliest: TokenLogprob  # the likeliest tokens after the last


class ScoreRequest(NamedTuple):
    """One text, and the index of its first scored token; at least one comes before.

    With `num_top` each token has its own score, with this many of the likeliest at its position and
    after the last; without it only their sum is returned.
    """

    tokens: Sequence[int]
    first: int
    num_top: int | None = None

    @property
    def rows(self) -> list[int]:
        """Return the tokens that a pass computes; what follows the last may not be needed."""
        return list(self.tokens if self.num_top is not None else self.tokens[:-1])


def wanted_of(texts: Any) -> list[tuple[Any, int]]:
    """Return pairs of a text and the index of its first scored token, checked. Raises `UserError`."""
    try:
        return [(text, whole_number(first, "a text's first token")) for text, first in texts]
    except (TypeError, ValueError):
        raise UserError(
            f"texts must be pairs of token ids and a number, got {texts!r:.80}: such as ([5, 7], 1)"
        ) from None


class _TokenScore(NamedTuple):
    drawn: TokenLogprob
    is_best: bool


class Scorer:
    """Scores texts in a cache of its own, by passes of at most `max_rows` rows.

    A pool may lend it the cache, as it does to a text. Raises `UserError` for a text without a
    beginning.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache | None,
        max_rows: int,
        texts: Sequence[ScoreRequest],
    ) -> None:
        for text in texts:
            requirement = "a text is scored behind its first token"
            require(
                0 < text.first <= len(text.tokens), requirement, text.first, "give it a beginning"
            )
        self.tokens = list[int]()  # tokens of a text in its cache that others may continue: none
        self.num_passes = 0  # passes over the weights so far
        self._target = target
        self._held = cache
        self._max_rows = max_rows
        self._texts = texts
        self._rows = [text.rows for text in texts]
        # by text and position
        self._seen: list[dict[int, _TokenScore]] = [{} for _ in texts]
        self._left = self._batches()

    def hold(self, caches: Caches | None) -> None:
        """Use the target's cache from now on; None takes it away."""
        self._held = None if caches is None else caches.target

    def step(self) -> bool:
        """Run one pass; return True if there was work left. Raises `HostFault` without a cache."""
        batch = next(self._left, None)
        if batch is not None:
            self._pass(batch)
        return batch is not None

    def scores(self) -> list[TextScore]:
        """Return the score of each text, after all passes."""
        return [
            TextScore(
                sum(score.drawn.logprob for score in seen.values()),
                all(score.is_best for score in seen.values()),
                len(seen),
            )
            for seen in map(self._in_order, range(len(self._texts)))
        ]

    def prompt_scores(self) -> list[PromptScore]:
        """Return the scores of each text's tokens, requested with `num_top`, after all passes."""
        scored = [
            [score.drawn for score in self._in_order(index).values()]
            for index in range(len(self._texts))
        ]
        return [PromptScore(tuple(tokens), likeliest) for *tokens, likeliest in scored]

    def _in_order(self, index: int) -> dict[int, _TokenScore]:
        return dict(sorted(self._seen[index].items()))

    @property
    def _cache(self) -> KVCache:
        if self._held is None:
            raise HostFault("these scores have lost their place, or the decoder was closed")
        return self._held

    def _batches(self) -> Iterator["_Branches"]:
        """Yield texts in batches; those that begin alike are adjacent."""
        rows = self._rows
        order = sorted(range(len(rows)), key=lambda index: list(self._texts[index].tokens))
        branches = _Branches(0)
        most = self._room_behind(0)
        for index in (index for index in order if len(rows[index]) <= most):
            if branches.num_rows + branches.num_new(rows[index]) > most:
                yield branches
                branches = _Branches(0)
            branches.add(index, rows[index])
        yield from [branches] if branches.num_rows else []
        yield from self._long_batches([index for index in order if len(rows[index]) > most])

    def _long_batches(self, order: list[int]) -> Iterator["_Branches"]:
        """Yield texts longer than a pass part by part; those that begin alike share parts."""
        rows = self._rows
        waiting = deque(order)
        num_held = 0
        before: int | None = None
        while waiting:
            index = waiting.popleft()
            lo = self._cache.reusable_prefix(self._num_alike(num_held, before, index))
            while len(rows[index]) - lo > (most := self._room_behind(lo)):
                part = _Branches(lo)
                part.add(index, rows[index][lo : lo + most])
                yield part
                lo += most
            num_held = lo
            before = index
            branches = _Branches(lo)
            branches.add(index, rows[index][lo:])
            while waiting and self._num_alike(num_held, before, waiting[0]) == lo:
                if branches.num_rows + branches.num_new(rows[waiting[0]][lo:]) > most:
                    break
                branches.add(waiting[0], rows[waiting.popleft()][lo:])
            yield branches

    def _num_alike(self, num_held: int, before: int | None, index: int) -> int:
        """Count the rows of a text that the one before it has left in the cache.

        A token's score holds for both texts if it and those before it are the same.
        """
        if before is None:
            return 0
        num = num_shared(self._rows[before], self._rows[index])
        first = self._texts[index].first
        num_untold = min(num, num_held, first - 1)
        num_alike = min(num - 1, num_held)
        places = range(first, num_alike + 1)
        is_alike = self._texts[before].num_top == self._texts[index].num_top
        seen = self._seen[before]
        if num_alike <= num_untold or not is_alike or any(place not in seen for place in places):
            return num_untold
        self._seen[index] |= {place: seen[place] for place in places}
        return num_alike

    def _room_behind(self, num_kept: int) -> int:
        """Count the rows that fit after the cached tokens; branches may outgrow the context."""
        return min(self._max_rows, self._cache.num_slots - num_kept)

    def _pass(self, batch: "_Branches") -> None:
        """Score a batch in one pass; only the rows of a single text stay in the cache."""
        cache = self._cache
        cache.clear(batch.first)
        cache.expect_rows(batch.num_rows if batch.is_chain else 0, keeps_others=False)
        logits = self._target.score_rows(batch.tokens, batch.depths, batch.sees(), cache)
        self.num_passes += 1
        rows = [
            (row, index, batch.first + depth + 1)
            for index, path in batch.paths.items()
            for depth, row in enumerate(path)
        ]
        for row, index, place in sorted(rows):
            text = self._texts[index]
            if place >= text.first:
                token = text.tokens[place] if place < len(text.tokens) else None
                self._seen[index][place] = _score_token(
                    logits[row].float(), token, text.num_top or 0
                )
        if batch.is_chain:
            cache.commit(range(batch.num_rows))


def _score_token(logits_V: torch.Tensor, token: int | None, num_top: int) -> _TokenScore:
    """Return a token's log probability; None stands for the likeliest token."""
    best = int(logits_V.argmax())
    token = best if token is None else token
    logprob_V = logits_V.log_softmax(0)
    return _TokenScore(token_logprob(logprob_V, token, num_top), token == best)


class _Branches:
    """A tree of tokens without a root, after `first` tokens in the cache."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.tokens = list[int]()
        self.depths = list[int]()
        self._parents = list[int]()
        self.paths = dict[int, list[int]]()  # rows of each text
        # row by its parent's row, -1 for none, and its token
        self._child: dict[tuple[int, int], int] = {}

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Return True if all rows are of one text, so that it may be continued."""
        return len(self.paths) == 1

    def num_new(self, tokens: Sequence[int]) -> int:
        """Count the rows that these tokens would add."""
        row = -1
        num_known = 0
        for token in tokens:
            row = self._child.get((row, token), -2)
            if row < -1:
                break
            num_known += 1
        return len(tokens) - num_known

    def add(self, index: int, tokens: Sequence[int]) -> None:
        """Add a text's tokens as a branch, which shares the rows of its beginning with others."""
        row = -1
        path = list[int]()
        for depth, token in enumerate(tokens):
            key = (row, token)
            if key not in self._child:
                self._child[key] = self.num_rows
                self.tokens.append(token)
                self.depths.append(depth)
                self._parents.append(row)
            row = self._child[key]
            path.append(row)
        self.paths[index] = path

    def sees(self) -> torch.Tensor:
        """Return bool (T, T): a row sees the branch that it ends."""
        sees_TT = torch.eye(self.num_rows, dtype=torch.bool)
        for row, parent in enumerate(self._parents):
            if parent >= 0:
                sees_TT[row] |= sees_TT[parent]
        return sees_TT
