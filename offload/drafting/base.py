"""Sources of token trees. All of them grow the same `TokenTree`; which one did never changes what is emitted.

A drafter holds weights, and what it has learned of them, but no text: what it keeps of one text is a state that the
text's sequence owns and lends it for every call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree
from offload.tree.topology import Shape


class DraftState(Protocol):
    """What a drafter keeps of one text: a cache of keys and values, an index of what was said, or nothing."""

    def copy_from(self, other: Any, num_tokens: int) -> None:
        """Know what another one of its kind knows of the first tokens, and nothing else."""

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text but for its first tokens."""


class Drafted(NamedTuple):
    """A tree, and what its drafter has to know again when a path of it is accepted."""

    tree: TokenTree
    row_of_node: dict[int, int]  # cache row, counted from the committed length, of every node that was run
    score_of_node: dict[int, Tensor]  # of a dynamic tree: u_V of every node that was run, the root included


class DraftText(NamedTuple):
    """One of several texts that trees are wanted for."""

    shape: Shape  # of its tree; several bounds are shared out among their texts, each giving what it has
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
        """Propose a tree of this shape, or within these bounds, below the last of the committed `tokens`."""

    def grow_all(self, texts: Sequence[DraftText]) -> list[Drafted]:
        """The same for each of several texts, whose nodes may go where they are worth the most."""

    def commit(
        self, drafted: Drafted, nodes: Sequence[int], tokens: Sequence[int], sampler: Sampler, state: Any
    ) -> None:
        """The accepted path of a tree, root first, and the token emitted after each of its nodes."""
