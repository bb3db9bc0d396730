"""No drafter: every sweep yields one token."""

from collections.abc import Sequence

import torch

from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree
from offload.tree.topology import Shape, chain


class NoDrafter:
    """Proposes nothing; its trees are the root alone."""

    def reset(self, num_kept: int = 0) -> None:
        """Nothing is kept."""

    def grow(self, shape: Shape, tokens: Sequence[int], sampler: Sampler) -> TokenTree:
        """The root; a shape with more nodes cannot be filled."""
        assert shape.num_nodes == 1, "there is no drafter to fill a tree"
        return TokenTree(chain(0), torch.tensor([tokens[-1]]))

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Nothing is kept."""
