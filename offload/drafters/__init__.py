"""Sources of token trees. All of them grow the same `TokenTree`; which one did never changes what is emitted."""

from collections.abc import Sequence
from typing import Protocol

from offload.sampling import Sampler
from offload.topology import Topology
from offload.tree import TokenTree


class Drafter(Protocol):
    """What a decoder asks of a drafter."""

    def reset(self) -> None:
        """A new sequence begins."""

    def grow(self, topology: Topology, tokens: Sequence[int], sampler: Sampler) -> TokenTree:
        """Propose a tree of this shape below the last of the committed `tokens`."""
        ...

    def commit(self, nodes: Sequence[int]) -> None:
        """The accepted path of the tree grown last, root first."""
