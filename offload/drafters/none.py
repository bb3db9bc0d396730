"""No drafter: every sweep yields one token."""

from collections.abc import Sequence

import torch

from offload.sampling import Sampler
from offload.topology import Topology
from offload.tree import TokenTree


class NoDrafter:
    """Proposes nothing; its trees are the root alone."""

    def reset(self) -> None:
        """Nothing is kept."""

    def grow(self, topology: Topology, tokens: Sequence[int], sampler: Sampler) -> TokenTree:
        """The root; a topology with more nodes cannot be filled."""
        assert topology.num_nodes == 1, "there is no drafter to fill a tree"
        return TokenTree(topology, torch.tensor([tokens[-1]]))

    def commit(self, nodes: Sequence[int]) -> None:
        """Nothing is kept."""
