"""Sources of token trees. All of them grow the same `TokenTree`; which one did never changes what
is emitted.

A drafter holds weights, and what it has learned of them, but no text: what it keeps of one text is
a state that the text's sequence owns and lends it for every call.

No drafter: every sweep yields one token.

What is learned for every kind of sampling apart: what is certain at temperature 0 is not at 1.

A server's clients choose their settings freely, so only the kinds that were asked for last are
kept. Invariant: what is forgotten shapes later trees, never what is emitted.
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
    """What a drafter keeps of one text: a cache of keys and values, an index of what was said, or
    nothing.
    """

    def copy_from(self, other: Any, num_tokens: int) -> None:
        """Know what another one of its kind knows of the first tokens, and nothing else."""

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text but for its first tokens."""


class Drafted(NamedTuple):
    """A tree, and what its drafter has to know again when a path of it is accepted."""

    tree: TokenTree
    # cache row, counted from the committed length, of every node that was run
    row_of_node: dict[int, int]
    # of a dynamic tree: u_V of every node that was run, the root included
    score_of_node: dict[int, Tensor]


class DraftText(NamedTuple):
    """One of several texts that trees are wanted for."""

    # of its tree; several bounds are shared out among their texts, each giving what it has
    shape: Shape
    tokens: Sequence[int]
    sampler: Sampler
    state: Any


class Drafter(Protocol):
    """What a decoder asks of a drafter. A `state` is one of its own, of a kind that it alone knows."""

    def new_state(self) -> DraftState:
        """That of a text of which nothing is known yet."""

    def share_states(self, states: Sequence[Any]) -> None:
        """These new ones are of texts that will be grown together."""

    def grow(self, shape: Shape, tokens: Sequence[int], sampler: Sampler, state: Any) -> Drafted:
        """Propose a tree of this shape, or within these bounds, below the last of the committed
        `tokens`.
        """

    def grow_all(self, texts: Sequence[DraftText]) -> list[Drafted]:
        """The same for each of several texts, whose nodes may go where they are worth the most."""

    def commit(
        self,
        drafted: Drafted,
        nodes: Sequence[int],
        tokens: Sequence[int],
        sampler: Sampler,
        state: Any,
    ) -> None:
        """The accepted path of a tree, root first, and the token emitted after each of its nodes."""


class NoState:
    """Nothing is kept of a text."""

    def copy_from(self, other: "NoState", num_tokens: int) -> None:
        """There is nothing to know."""

    def clear(self, num_kept: int = 0) -> None:
        """There is nothing to forget."""


class NoDrafter:
    """Proposes nothing; its trees are the root alone."""

    def new_state(self) -> NoState:
        """Nothing."""
        return NoState()

    def share_states(self, states: Sequence[NoState]) -> None:
        """They are nothing."""

    def grow_all(self, texts: Sequence[DraftText]) -> list[Drafted]:
        """The root of each."""
        return [self.grow(*text) for text in texts]

    def grow(
        self, shape: Shape, tokens: Sequence[int], sampler: Sampler, state: NoState
    ) -> Drafted:
        """The root; a shape with more nodes cannot be filled."""
        assert shape.num_nodes == 1, "there is no drafter to fill a tree"
        return Drafted(TokenTree(chain(0), torch.tensor([tokens[-1]])), {}, {})

    def commit(
        self,
        drafted: Drafted,
        nodes: Sequence[int],
        tokens: Sequence[int],
        sampler: Sampler,
        state: NoState,
    ) -> None:
        """Nothing is kept."""


MOST_KINDS = 256
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByKind(OrderedDict[K, V]):
    """By kind; one that is not known begins with what `new` gives."""

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
