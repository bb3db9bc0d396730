"""How likely texts are that are there already: many of them in one pass, as branches of one tree of
tokens.

Texts that begin alike share the rows of their beginning, and all of them one sweep over the
weights. Nothing is drawn.
Invariant: a row sees the tokens before it in its own text, and no others.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload.declaration import whole_number
from offload.engine.cache_pool import num_shared
from offload.errors import UserError, require
from offload.model.kv_cache import KVCache
from offload.model.target import Target


class TextScore(NamedTuple):
    """The end of one text, given its beginning."""

    logprob: float  # natural, of all its tokens together
    is_greedy: bool  # whether each of them is the likeliest in its place
    num_tokens: int


class ScoreRequest(NamedTuple):
    """One text, and from which of its tokens on they are scored; at least one comes before."""

    tokens: Sequence[int]
    first: int


def wanted_of(texts: Any) -> list[tuple[Any, int]]:
    """Return pairs of a text and a number. Raises `UserError` for anything else."""
    try:
        return [(text, whole_number(first, "a text's first token")) for text, first in texts]
    except (TypeError, ValueError):
        raise UserError(
            f"texts must be pairs of token ids and a number, got {texts!r:.80}: such as ([5, 7], 1)"
        ) from None


@dataclass(eq=False)
class Scorer:
    """Scores texts over a cache that nothing else uses, by passes of `_max_rows` rows at most."""

    _target: Target
    _cache: KVCache
    _max_rows: int
    num_passes: int = 0  # over the weights, so far

    def score(self, texts: Sequence[ScoreRequest]) -> list[TextScore]:
        """Return the score of each text. Raises `UserError` for one without a beginning."""
        for tokens, first in texts:
            rule = "a text is scored behind its first token"
            require(0 < first <= len(tokens), rule, first, "give it a beginning")
        seen: defaultdict[int, list[tuple[float, bool]]] = defaultdict(list)
        for batch in self._batches(texts):
            for index, found in self._pass(texts, batch):
                seen[index].append(found)
        return [
            TextScore(
                sum(one for one, _ in seen[index]),
                all(best for _, best in seen[index]),
                len(seen[index]),
            )
            for index in range(len(texts))
        ]

    def _batches(self, texts: Sequence[ScoreRequest]) -> Iterator["_Branches"]:
        """Yield texts in batches; those that are alike lie together."""
        order = sorted(range(len(texts)), key=lambda index: list(texts[index].tokens))
        rows = [list(text.tokens[:-1]) for text in texts]
        branches = _Branches(0)
        most = self._room_behind(0)
        for index in (index for index in order if len(rows[index]) <= most):
            if branches.num_rows + branches.num_new(rows[index]) > most:
                yield branches
                branches = _Branches(0)
            branches.add(index, rows[index])
        yield from [branches] if branches.num_rows else []
        long = [index for index in order if len(rows[index]) > most]
        yield from self._long_batches(long, rows, [text.first - 1 for text in texts])

    def _long_batches(
        self, order: list[int], rows: list[list[int]], firsts: list[int]
    ) -> Iterator["_Branches"]:
        """Yield texts longer than a pass part by part; those that begin alike share those parts."""
        waiting = deque(order)
        held = list[int]()
        while waiting:
            index = waiting.popleft()
            lo = self._cache.keepable(min(num_shared(held, rows[index]), firsts[index]))
            while len(rows[index]) - lo > (most := self._room_behind(lo)):
                part = _Branches(lo)
                part.add(index, rows[index][lo : lo + most])
                yield part
                lo += most
            held = rows[index][:lo]
            branches = _Branches(lo)
            branches.add(index, rows[index][lo:])
            while waiting and rows[waiting[0]][:lo] == held and firsts[waiting[0]] >= lo:
                if branches.num_rows + branches.num_new(rows[waiting[0]][lo:]) > most:
                    break
                branches.add(waiting[0], rows[waiting.popleft()][lo:])
            yield branches

    def _room_behind(self, num_kept: int) -> int:
        """Return how many rows fit behind cached tokens; branches may outgrow the context."""
        return min(self._max_rows, self._cache.num_slots - num_kept)

    def _pass(
        self, texts: Sequence[ScoreRequest], batch: "_Branches"
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        self._cache.clear(batch.first)
        self._cache.promise(batch.num_rows if batch.is_chain else 0, keeps_others=False)
        logits = self._target.score_rows(batch.tokens, batch.depths, batch.sees(), self._cache)
        self.num_passes += 1
        rows = [
            (row, index, batch.first + depth)
            for index, path in batch.paths.items()
            for depth, row in enumerate(path)
        ]
        for row, index, depth in sorted(rows):
            tokens, first = texts[index]
            if depth + 1 >= first:
                logits_V = logits[row].float()
                token = tokens[depth + 1]
                yield (
                    index,
                    (float(logits_V.log_softmax(0)[token]), int(logits_V.argmax()) == token),
                )
        if batch.is_chain:
            self._cache.commit(range(batch.num_rows))


class _Branches:
    """A tree of tokens without a root, behind `first` tokens that the cache has."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.tokens = list[int]()
        self.depths = list[int]()
        self._parents = list[int]()
        self.paths = dict[int, list[int]]()  # rows of each text
        self._child: dict[tuple[int, int], int] = {}  # by row of the parent, -1 for none, and token

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Return whether all rows are of one text, so that more of it may follow."""
        return len(self.paths) == 1

    def num_new(self, tokens: Sequence[int]) -> int:
        row = -1
        num_known = 0
        for token in tokens:
            row = self._child.get((row, token), -2)
            if row < -1:
                break
            num_known += 1
        return len(tokens) - num_known

    def add(self, index: int, tokens: Sequence[int]) -> None:
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
