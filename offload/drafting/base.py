"""Sources of token trees. All of them grow the same `TokenTree`; which one did never changes what is emitted."""

from collections.abc import Sequence
from typing import Protocol

from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree
from offload.tree.topology import Shape


class Drafter(Protocol):
    """What a decoder asks of a drafter."""

    def reset(self, num_kept: int = 0) -> None:
        """A new sequence begins, with the same `num_kept` tokens as the one before."""

    def grow(self, shape: Shape, tokens: Sequence[int], sampler: Sampler) -> TokenTree:
        """Propose a tree of this shape, or within these bounds, below the last of the committed `tokens`."""
        ...

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """The accepted path of the tree grown last, root first, and the token emitted after each of its nodes."""
