"""What a decoder asks of a drafter, and the drafter that proposes nothing.

Drafters differ in how they find candidates; all of them grow a `TokenTree`, and none changes what
is emitted. A drafter holds weights and what it has learned of acceptance, but no text: what it
keeps of one text is a state, which the text's sequence owns and lends it for every call.

Invariant: what is learned or forgotten here shapes later trees, never the emitted tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from offload.sampling.sampler import Sampler
from offload.trees.token_tree import TokenTree
from offload.trees.topology import Shape, chain


class DraftState(Protocol):
    """What a drafter keeps of one text: a KV cache, an index of its tokens, or nothing."""

    def copy_from(self, other: Any, num_tokens: int) -> None:
        """Take over what `other` knows of the first `num_tokens` tokens, and nothing else."""

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text beyond its first `num_kept` tokens."""


class Drafted(NamedTuple):
    """A tree, and what its drafter needs to know when a path of it is accepted."""

    tree: TokenTree
    # cache row, counted from the committed length, of every node that was run
    row_of_node: dict[int, int]
    # for a dynamic tree: the scores u_V after every node that was run, the root included
    score_of_node: dict[int, Tensor]


class DraftText(NamedTuple):
    """One text of a batch that is drafted together."""

    # or the bounds of a dynamic tree; those of several texts are pooled, and their nodes go where
    # they are worth most
    shape: Shape
    tokens: Sequence[int]
    sampler: Sampler
    state: Any


class Drafter(Protocol):
    """What a decoder asks of a drafter; a `state` is always one that this drafter made."""

    def new_state(self) -> DraftState:
        """Return the state of a text of which nothing is known yet."""

    def share_states(self, states: Sequence[Any]) -> None:
        """Prepare these new states for texts that will be drafted together."""

    def grow(self, batch: Sequence[DraftText]) -> list[Drafted]:
        """Return a tree for each text, below its last token.

        Dynamic trees compete for their pooled nodes.
        """

    def commit(
        self,
        drafted: Drafted,
        nodes: Sequence[int],
        tokens: Sequence[int],
        sampler: Sampler,
        state: Any,
    ) -> None:
        """Note the accepted path, root first, and the token emitted after each of its nodes."""


class NoState:
    """The state of a drafter that keeps nothing of a text."""

    def copy_from(self, other: "NoState", num_tokens: int) -> None:
        """Do nothing."""

    def clear(self, num_kept: int = 0) -> None:
        """Do nothing."""


class NoDrafter:
    """A drafter whose trees are the root alone: every weight pass yields one token."""

    def new_state(self) -> NoState:
        """Return a state that keeps nothing."""
        return NoState()

    def share_states(self, states: Sequence[NoState]) -> None:
        """Do nothing."""

    def grow(self, batch: Sequence[DraftText]) -> list[Drafted]:
        """Return the root of each text; a shape with more nodes is refused."""
        assert all(text.shape.num_nodes == 1 for text in batch), "nothing fills a tree"
        return [
            Drafted(TokenTree(chain(0), torch.tensor(text.tokens[-1:])), {}, {}) for text in batch
        ]

    def commit(
        self,
        drafted: Drafted,
        nodes: Sequence[int],
        tokens: Sequence[int],
        sampler: Sampler,
        state: NoState,
    ) -> None:
        """Do nothing."""


# a server's clients choose their settings freely, so only the latest kinds are kept
MOST_KINDS = 256
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByKind(OrderedDict[K, V]):
    """What was learned for each kind of sampling, the latest `MOST_KINDS` of them.

    Kinds are kept apart because what is certain at temperature 0 is not at temperature 1. A kind
    that is not known starts with `new()`.
    """

    def __init__(self, new: Callable[[], V]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, kind: K) -> V:
        while len(self) >= MOST_KINDS:
            self.popitem(last=False)
        self[kind] = self._new()
        return self[kind]

    def __getitem__(self, kind: K) -> V:
        value = super().__getitem__(kind)
        self.move_to_end(kind)
        return value
