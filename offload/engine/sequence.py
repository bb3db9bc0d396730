"""One text being written: all that is known of it and of how it goes on, while models hold weights alone.

Invariant: its caches hold keys and values of its tokens, from the first on. A step that was cut short may leave more
in them, which the next one clears away.
"""

import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

from offload.config import Drafting
from offload.engine.logprobs import TokenLogprob
from offload.errors import UserError
from offload.model.kv_cache import KVCache
from offload.planning.chains import ChainPolicy
from offload.sampling.sampler import Sampler
from offload.stats import Moved, Stats
from offload.tree.topology import DynamicShape, Shape, chain
from offload.verification.rules import Rule


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
    moved: Moved


class Limits(NamedTuple):
    """What ends a text."""

    max_new_tokens: int = sys.maxsize
    end_ids: frozenset[int] = frozenset()  # that of the end is part of the sequence, but not of its text


class Sequence:
    """One text, with the caches that were lent to it.

    Attributes:
        tokens: of the prompt, then all that were accepted; the last is the root of the next tree.
        shape: of the next tree.
        limits: what ends it.
        stats: of its steps since the shape was set.
        last_pass: its last step; None before the first.
        num_logprobs: how many of the likeliest tokens to note beside each new one; None notes nothing.
        logprobs: of the new tokens, where they are noted.
    """

    def __init__(
        self, tokens: Iterable[int], sampler: Sampler, rule: Rule, shape: Shape, limits: Limits,
        *, has_draft: bool = True,
    ) -> None:  # fmt: skip
        self._has_draft = has_draft
        self.tokens, self.sampler, self.rule, self.limits = list(tokens), sampler, rule, limits
        self.num_prompt_tokens = len(self.tokens)
        self._caches: Caches | None = None
        self._chains: ChainPolicy | None = None
        self._among: Callable[[int], Shape] | None = None
        self.last_pass: PassFigures | None = None
        self.num_logprobs: int | None = None
        self.logprobs = list[TokenLogprob]()
        self.set_shape(shape)

    def set_shape(self, shape: Shape) -> Stats:
        """Later trees have this one; returns the figures of their steps, which begin anew."""
        self.shape, self.stats = shape, Stats(num_prompt_tokens=self.num_prompt_tokens)
        self.stats.tree_num_nodes, self.stats.tree_depth = shape.num_nodes, shape.depth
        self.stats.is_tree_dynamic = isinstance(shape, DynamicShape)
        is_known = self.sampler.is_greedy or self.sampler.drafting is not Drafting.COUPLED
        self.stats.is_draft_known = is_known and self._has_draft
        return self.stats

    def follow(self, chains: ChainPolicy | None, among: Callable[[int], Shape] | None = None) -> None:
        """From the next step on its trees are chains of lengths that change as this says; None changes nothing.

        `among` is the shape of its tree beside others, by how many texts share the pass.
        """
        self._chains, self._among = chains, among

    def shape_among(self, num_texts: int) -> Shape:
        """Of the next tree, where so many texts share the pass."""
        is_fixed = num_texts == 1 or self._chains is not None or self._among is None
        return self.shape if is_fixed else self._among(num_texts)  # type: ignore[misc]

    @property
    def is_taken_in(self) -> bool:
        """Whether keys and values are there for all tokens but the last."""
        return self.caches.target.length >= len(self.tokens) - 1

    def lengthen(self) -> None:
        """A step is over: the next chain is as long as all steps so far suggest, and nobody has drawn for it yet."""
        if self._chains is None:
            return
        self.stats.chain_lengths.append(self.shape.depth)
        self.shape = chain(self._chains.length(self.stats.first_guess))
        self.stats.tree_depth = max(self.stats.tree_depth, self.shape.depth)
        self.stats.tree_num_nodes = 1 + self.stats.tree_depth

    @property
    def caches(self) -> Caches:
        """What the models keep of it. Raises `UserError` when they were taken away, by another one or for good."""
        if self._caches is None:
            raise UserError("this decoder has begun another generation or was closed: finish one before the next")
        return self._caches

    def hold(self, caches: Caches | None) -> None:
        """From now on these are its caches; None takes them away."""
        self._caches = caches

    @property
    def new_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_at_end_token(self) -> bool:
        """Whether the model has ended the text."""
        return len(self.tokens) > self.num_prompt_tokens and self.tokens[-1] in self.limits.end_ids

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to be written, as far as tokens tell."""
        is_whole = len(self.tokens) >= self.num_prompt_tokens + self.limits.max_new_tokens
        return is_whole or self.is_at_end_token or self.sampler.is_over

    def accept(self, tokens: list[int], logprobs: Iterable[TokenLogprob] = ()) -> list[int]:
        """Add newly accepted tokens up to where the text ends; returns those."""
        num_left = self.num_prompt_tokens + self.limits.max_new_tokens - len(self.tokens)
        end = next((index for index, token in enumerate(tokens) if token in self.limits.end_ids), len(tokens))
        counted = tokens[: min(end + 1, num_left)]
        counted = counted[: self.sampler.accept(counted)]
        self.tokens += counted
        self.logprobs += islice(logprobs, len(counted))
        return counted

    def cut(self, num_new: int) -> None:
        """Drop all but so many of its new tokens: behind them a stop string is complete."""
        del self.tokens[self.num_prompt_tokens + num_new :], self.logprobs[num_new:]
        self.sampler.cut(self.new_ids)
