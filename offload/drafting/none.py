"""No drafter: every sweep yields one token."""

from collections.abc import Sequence

import torch

from offload.drafting.base import Drafted, DraftText
from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree
from offload.tree.topology import Shape, chain


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

    def grow(self, shape: Shape, tokens: Sequence[int], sampler: Sampler, state: NoState) -> Drafted:
        """The root; a shape with more nodes cannot be filled."""
        assert shape.num_nodes == 1, "there is no drafter to fill a tree"
        return Drafted(TokenTree(chain(0), torch.tensor([tokens[-1]])), {}, {})

    def commit(
        self, drafted: Drafted, nodes: Sequence[int], tokens: Sequence[int], sampler: Sampler, state: NoState
    ) -> None:
        """Nothing is kept."""
