"""One text being written: its tokens, how it goes on, and the caches that it needs.

Models hold weights only; all that is known of a text is in its `TokenSequence`. A `CachePool` lends
it its caches.

Invariants: the caches of a sequence hold keys and values of its tokens, from the first on (a step
that was cut short may leave more in them, which the next one removes). Log-probabilities are the
target's own, before anything was done to its logits, and asking for them changes no token.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from offload.errors import HostFault
from offload.model.kv_cache import KVCache
from offload.rules import ChildSampling
from offload.sampling.logits import Rows
from offload.sampling.sampler import Sampler
from offload.stats import Stats, Transfers
from offload.trees.topology import DynamicShape, Shape
from offload.trees.verification import Rule


class TokenLogprob(NamedTuple):
    """A new token and its score."""

    token: int
    # natural logarithm; of the softmax of the target's logits, before penalties, biases,
    # temperature and filters
    logprob: float
    # the likeliest tokens at its position with theirs, the likeliest first
    top: tuple[tuple[int, float], ...]


def token_logprob(logprob_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return a token with its log-probability, and this many of the likeliest, from one row."""
    logprob_K, token_K = logprob_V.topk(min(int(num_top), len(logprob_V)))
    top = tuple(zip(token_K.tolist(), logprob_K.tolist(), strict=True))
    return TokenLogprob(token, float(logprob_V[token]), top)


def path_logprobs(
    rows: Rows, nodes: Sequence[int], tokens: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """Return log-probabilities, by the target's own logits, of tokens emitted after nodes."""
    pairs = zip(nodes, tokens, strict=True)
    return [
        token_logprob(rows[node].float().log_softmax(0), token, num_top) for node, token in pairs
    ]


class Caches(NamedTuple):
    """The caches of both models for one text."""

    target: KVCache
    draft: Any  # a `DraftState`, whose kind only its drafter knows

    def clear(self, num_kept: int = 0) -> None:
        """Keep only the first tokens of the text."""
        self.target.clear(num_kept)
        self.draft.clear(num_kept)
        self.rejoin()

    def copy_from(self, other: "Caches", num_tokens: int) -> None:
        """Copy another text's cache rows of the tokens that both begin with."""
        self.target.copy_from(other.target, num_tokens)
        self.draft.copy_from(other.draft, num_tokens)

    def saved(self) -> dict[str, KVCache]:
        """Return the caches by model, the target's first; a drafter without a model has none."""
        parts = zip(self._fields, (self.target, self.draft.saved), strict=True)
        return {part: cache for part, cache in parts if cache is not None}

    def rejoin(self, most_lost: int = sys.maxsize) -> None:
        """Go back to where the drafter missed states, if the target's cache can.

        Recurrent layers have states at a few positions only. If they cannot go back, or more than
        `most_lost` rows are missing, these stay missing.
        """
        num_joined = self.draft.can_follow(self.target.length)
        is_near = num_joined < self.target.length <= num_joined + most_lost
        if is_near and self.target.reusable_prefix(num_joined) == num_joined:
            self.target.clear(num_joined)


class StepMetrics(NamedTuple):
    """Metrics of the last pass over the weights for one text."""

    parents: list[int]  # parents of its tree's nodes, in level order; the root's is -1
    tokens: list[int]  # tokens of the nodes
    accepted: list[int]  # nodes of the accepted path, root first
    num_texts: int  # texts that shared the pass
    draft_s: float
    sweep_s: float
    moved: Transfers


class StopCriteria(NamedTuple):
    """The ends of a text."""

    max_new_tokens: int = sys.maxsize
    # an end token is part of the sequence, but not of its text
    end_ids: frozenset[int] = frozenset()


@dataclass(eq=False, repr=False)
class TokenSequence:
    """One text, with the caches that were lent to it."""

    tokens: list[int]  # tokens of the prompt, then all accepted ones; the last is the next root
    sampler: Sampler
    rule: Rule
    shape: Shape  # shape of the next tree
    limits: StopCriteria
    # whether a draft ranks candidates
    is_ranked: bool = field(default=True, kw_only=True)
    last_pass: StepMetrics | None = field(default=None, init=False)  # None before the first pass
    # number of the likeliest tokens to note with each new one; None notes nothing
    num_logprobs: int | None = field(default=None, init=False)
    # the noted log-probabilities
    logprobs: list[TokenLogprob] = field(default_factory=list, init=False)
    _caches: Caches | None = field(default=None, init=False)
    _among: Callable[[int], Shape] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # the sampler keeps the prompt's tokens
        self.tokens = list(self.tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.set_shape(self.shape)

    def set_shape(self, shape: Shape) -> Stats:
        """Give later trees this shape; return the metrics of their steps, which start from zero."""
        self.stats = Stats(num_prompt_tokens=self.num_prompt_tokens)
        self._take_shape(shape)
        is_known = self.sampler.is_greedy or self.sampler.drafting is not ChildSampling.COUPLED
        self.stats.is_draft_known = is_known and self.is_ranked
        return self.stats

    def follow(self, among: Callable[[int], Shape]) -> None:
        """Let `among` say the shape of each tree by how many texts share the pass; it may learn."""
        self._among = among

    def next_shape(self, num_texts: int) -> Shape:
        """Return the shape of the next tree, where this many texts share the pass."""
        if self._among is not None:
            self._take_shape(self._among(num_texts))
        return self.shape

    def _take_shape(self, shape: Shape) -> None:
        self.shape = shape
        self.stats.tree_num_nodes = shape.num_nodes
        self.stats.tree_depth = shape.depth
        self.stats.is_tree_dynamic = isinstance(shape, DynamicShape)

    @property
    def caches(self) -> Caches:
        """Return the caches of the models. Raises `UserError` once they were taken away."""
        if self._caches is None:
            raise HostFault(
                "this decoder has begun another generation or was closed: finish one before the "
                "next"
            )
        return self._caches

    def hold(self, caches: Caches | None) -> None:
        """Use these caches from now on; None takes them away."""
        self._caches = caches

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def new_ids(self) -> list[int]:
        """Return a copy of the new tokens; for a long text it takes a while."""
        return self.new_ids_from(0)

    def new_ids_from(self, first: int) -> list[int]:
        """Return a copy of the new tokens from this index on."""
        return self.tokens[self.num_prompt_tokens + first :]

    @property
    def num_computed(self) -> int:
        """Return the number of its tokens in the target's cache; 0 once that was taken away."""
        return 0 if self._caches is None else self._caches.target.length

    @property
    def num_pending(self) -> int:
        """Return the number of its tokens that the target's cache lacks, the root excluded."""
        return len(self.tokens) - 1 - self.caches.target.length

    @property
    def is_at_end_token(self) -> bool:
        return self.num_new > 0 and self.tokens[-1] in self.limits.end_ids

    @property
    def has_ended(self) -> bool:
        """Return True if nothing more is to be written, as far as tokens show."""
        is_whole = self.num_new >= self.limits.max_new_tokens
        return is_whole or self.is_at_end_token or self.sampler.is_over

    def extend(self, tokens: list[int], logprobs: Iterable[TokenLogprob] = ()) -> list[int]:
        """Add newly accepted tokens up to the end of the text; return those added."""
        num_left = self.limits.max_new_tokens - self.num_new
        end = next(
            (index for index, token in enumerate(tokens) if token in self.limits.end_ids),
            len(tokens),
        )
        counted = tokens[: min(end + 1, num_left)]
        counted = counted[: self.sampler.accept(counted)]
        # tokens last: `recover` sees by their number what is missing
        self.logprobs += islice(logprobs, len(counted))
        self.tokens += counted
        return counted

    def recover(self) -> None:
        """Remove from caches and sampler what an interrupted step has left in them."""
        self.caches.clear(len(self.tokens) - 1)
        if self.sampler.num_accepted != self.num_new:
            self.cut(self.num_new)

    def cut(self, num_new: int) -> None:
        """Keep only this many of its new tokens: a stop string is complete there."""
        del self.tokens[self.num_prompt_tokens + num_new :], self.logprobs[num_new:]
        self.sampler.cut(self.new_ids)
