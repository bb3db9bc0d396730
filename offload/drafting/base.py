"""What a decoder asks of a drafter.

Drafters differ in how they find candidates; all of them grow a `TokenTree`, and none changes what
is emitted. A drafter holds weights and what it has learned of acceptance, but no text: what it
keeps of one text is a state, which the text's sequence owns and lends it for every call.

Invariant: what is learned or forgotten here shapes later trees, never the emitted tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from offload.sampling.sampler import Sampler
from offload.trees.token_tree import TokenTree
from offload.trees.topology import Shape, chain
from offload.trees.verification import Acceptance


class DraftState(Protocol):
    """What a drafter keeps of one text: a KV cache, an index of its tokens, or nothing."""

    def copy_from(self, other: Any, num_tokens: int) -> None:
        """Take over what `other` knows of the first `num_tokens` tokens, and nothing else."""

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text beyond its first `num_kept` tokens."""


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

    def grow(self, batch: Sequence[DraftText]) -> list[TokenTree]:
        """Return a tree below each text's last token; dynamic trees compete for pooled nodes."""

    def commit(self, tree: TokenTree, accepted: Acceptance, sampler: Sampler, state: Any) -> None:
        """Note the accepted path, as far as its text goes on, and what was emitted there."""


def root_alone(tokens: Sequence[int]) -> TokenTree:
    """Return the tree without a guess behind these tokens."""
    return TokenTree(chain(0), torch.tensor(tokens[-1:]))


# a server's clients choose their settings freely, so only the latest kinds are kept
MOST_KINDS = 256
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByKind(OrderedDict[K, V]):
    """What was learned for each kind of sampling, the latest `MOST_KINDS`; it starts with `new()`.

    Kinds are kept apart because what is certain at temperature 0 is not at temperature 1.
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
