"""Trees without a draft model: what sources guess, as much of it as pays.

A guess costs nothing beside a sweep, but each of its rows is computed. The tree of a step is cut where one more node
would cost more than it is expected to bring: the n that maximises (1 + sum of the n best chances) / seconds of a sweep
over n rows, Sequoia's optimiser (2402.12374, Eq. 1) with the chances of this very step. Where nothing is found that is
the root alone. Any shape is exact with any rule: the nodes are point masses that the context settles.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from offload.drafting.base import Drafted, DraftText
from offload.drafting.guesses import Guess, Guesses
from offload.drafting.sources import Asked, Sources, SourcesState
from offload.drafting.trust import Trusts
from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree, children_of
from offload.tree.topology import DynamicShape, Shape, Topology, in_level_order, level_order

PassSeconds = Callable[[int], float]  # of a sweep over so many rows


class LookupDrafter:
    """Grows trees of guesses alone."""

    def __init__(self, sources: Sources, pass_s: PassSeconds) -> None:
        self._sources, self._pass_s, self._trusts = sources, pass_s, Trusts()

    def new_state(self) -> SourcesState:
        """That of the sources."""
        return self._sources.new_state()

    def share_states(self, states: Sequence[SourcesState]) -> None:
        """They have nothing in common."""

    def grow_all(self, texts: Sequence[DraftText]) -> list[Drafted]:
        """Each by itself."""
        return [self.grow(*text) for text in texts]

    def grow(self, shape: Shape, tokens: Sequence[int], sampler: Sampler, state: SourcesState) -> Drafted:
        """A tree below `tokens[-1]`: within bounds as large as pays, or as much of a shape as guesses fill."""
        asked = Asked(shape.num_nodes - 1, shape.depth)
        if not asked.num_nodes:
            return Drafted(as_tree([], tokens[-1]), {}, {})
        guesses = self._sources.ask(tokens, asked, self._trusts.of(sampler), state)
        if isinstance(shape, DynamicShape):
            return Drafted(as_tree(self._worth(guesses.best(*asked)), tokens[-1]), {}, {})
        return Drafted(as_tree(fill_with(guesses, shape), tokens[-1]), {}, {})

    def commit(
        self, drafted: Drafted, nodes: Sequence[int], tokens: Sequence[int], sampler: Sampler, state: SourcesState
    ) -> None:
        """Learn how good the guesses were."""
        state.said.learn(tokens, [None] * len(tokens))

    def _worth(self, found: Sequence[Guess]) -> Sequence[Guess]:
        yields = 1 + np.cumsum([0.0, *(guess.chance for guess in found)])
        rates = yields / [self._pass_s(num_rows) for num_rows in range(1, len(found) + 2)]
        return found[: int(np.argmax(rates))]


def fill_with(guesses: Guesses, topology: Topology) -> list[Guess]:
    """The nodes of a shape for which there are guesses: the child of rank k is the k-th likeliest."""
    found: list[Guess] = []
    waiting = [(0, -1, Guess(-1, -1, 0, 1.0, guesses.root))]
    for node, index, above in waiting:  # grows while it is read: level by level
        chances = guesses.children(above.place)[0]
        ranked = sorted(chances.items(), key=lambda one: -one[1])
        for child, (token, chance) in zip(children_of(topology)[node], ranked, strict=False):
            guess = Guess(index, token, above.depth + 1, above.chance * chance, guesses.follow(above.place, token))
            waiting.append((child, len(found), guess))
            found.append(guess)
    return found


def as_tree(found: Sequence[Guess], root_token: int) -> TokenTree:
    """The tree of guesses, of which parents come first, as point masses."""
    parents = [-1, *(guess.parent + 1 for guess in found)]
    tokens = [root_token, *(guess.token for guess in found)]
    return TokenTree(in_level_order(parents), torch.tensor([tokens[one] for one in level_order(parents)]))
