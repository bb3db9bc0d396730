"""What a decoder asks of a proposer: anything that guesses what comes next.

Proposers differ in how they find candidates; all of them grow a `TokenTree`, and none changes what
is emitted. One that reads the target's hidden states says which (`needs`); they lie in the log of
the target's cache (`TapLog`), from which its state takes them. A proposer holds
weights and what it has learned of acceptance, but no text: what it keeps of one text is a state,
which the text's sequence owns and lends it for every call.

Invariant: what is learned or forgotten here shapes later trees, never the emitted tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from offload.model.kv_cache import KVCache
from offload.model.taps import Taps
from offload.model.tree_model import TreeModel
from offload.sampling.sampler import Sampler
from offload.trees.token_tree import TokenTree
from offload.trees.topology import Shape, chain
from offload.trees.verification import Acceptance


class DraftState(Protocol):
    """The state of a proposer for one text: a KV cache, an index of its tokens, or nothing."""

    @property
    def saved(self) -> KVCache | None:
        """Return the tensors that a session keeps of it."""

    def copy_from(self, other: Any, num_tokens: int) -> None:
        """Copy the state of another text for the first `num_tokens` tokens."""

    def can_follow(self, num_positions: int) -> int:
        """Count the target's positions behind which it can go on, this many at most."""

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


class Proposer(Protocol):
    """What a decoder asks of a proposer; a `state` is always one that this proposer made."""

    @property
    def needs(self) -> Taps | None:
        """The hidden states of the target that it reads, or None."""

    @property
    def model(self) -> TreeModel | None:
        """The draft model that ranks candidates, or None."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that its weights take beside the target's."""

    def cost(self, shape: Shape) -> Sequence[int]:
        """Return the rows of each of its own passes that a tree of this shape takes."""

    @property
    def widths(self) -> Sequence[int]:
        """Return the rows of each of its own passes that the last trees took."""

    def new_state(self, target: KVCache | None = None) -> Any:
        """Return the state of a new text, see `DraftState`.

        `target` has the text's keys and values; without one it is a state to time passes with.
        """

    def share_states(self, states: Sequence[Any]) -> None:
        """Prepare these new states for texts that will be drafted together."""

    def observe(self, tokens: Sequence[int], state: Any) -> None:
        """Take in what the target has logged of a prompt so far, before more of it comes."""

    def propose(self, batch: Sequence[DraftText]) -> list[TokenTree]:
        """Return a tree below each text's last token; dynamic trees compete for pooled nodes."""

    def accepted(self, tree: TokenTree, path: Acceptance, sampler: Sampler, state: Any) -> None:
        """Learn from the accepted path of a text that goes on, and its emitted tokens."""

    def score(self, tokens: Sequence[int], start: int, state: Any) -> Iterator[Tensor]:
        """Yield the draft model's logits (1, V) for `tokens[start]` and every later one."""


class WithoutModel:
    """What proposers have in common that need neither a model nor the target's states."""

    needs: Taps | None = None
    model: TreeModel | None = None
    num_bytes: int = 0
    widths: Sequence[int] = ()

    def cost(self, shape: Shape) -> Sequence[int]:
        """Return no pass: nothing is computed."""
        return ()

    def share_states(self, states: Sequence[Any]) -> None:
        """Do nothing; texts share no state."""

    def observe(self, tokens: Sequence[int], state: Any) -> None:
        """Do nothing; only tokens are read."""

    def score(self, tokens: Sequence[int], start: int, state: Any) -> Iterator[Tensor]:
        """Fail: only a model ranks candidates."""
        raise AssertionError("only a model ranks candidates")


def root_alone(tokens: Sequence[int]) -> TokenTree:
    """Return the tree without a guess behind these tokens."""
    return TokenTree(chain(0), torch.tensor(tokens[-1:]))


# a server's clients choose their settings freely, so only the latest kinds are kept
MOST_KINDS = 256
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PerKindLRU(OrderedDict[K, V]):
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


_GRID = (0.5, 0.63, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0, 10.0, 12.7, 16.0)
_START = 1.6  # the exponent before anything was observed
# prior loss of other exponents: this many nats times the squared log of their ratio to `_START`
_PRIOR_LOSS = 4.0
_KEPT = 0.998  # share of all losses that is kept from one token to the next


class DraftCalibration:
    """The exponent beta that best foretells what the target emits, for one kind of sampling.

    The chance of a child is taken to be the draft's distribution to the power beta, normalised; a
    distilled draft is less sure than it should be, so beta is mostly above one. For each emitted
    token every exponent of a grid pays its log-loss, old losses fade, and the one that has paid
    least is used next.
    """

    def __init__(self) -> None:
        self._loss_G = _PRIOR_LOSS * (torch.tensor(_GRID) / _START).log().square()

    @property
    def exponent(self) -> float:
        return _GRID[int(self._loss_G.argmin())]

    def learn(self, score_TV: Tensor, token_T: Tensor) -> None:
        """Note tokens emitted at these scores; one that the draft ruled out tells nothing."""
        losses = [-(beta * score_TV).log_softmax(1).gather(1, token_T[:, None]) for beta in _GRID]
        for loss_G in torch.cat(losses, 1).cpu():
            if torch.isfinite(loss_G).all():
                self._loss_G = _KEPT * self._loss_G + loss_G
