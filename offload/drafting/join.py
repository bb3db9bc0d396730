"""A draft model and sources of guesses in one tree, where both compete for the same nodes.

In a dynamic tree the draft scores the guessed paths in one pass, and a mixture of both opinions
ranks every candidate. A static tree gives up its least likely nodes to likelier guesses, which are
grafted on as point masses behind the children that were drawn.

Invariant: which nodes are given up is settled before anything is drawn, and a guess hangs from what
was drawn before it; so growth stays predictable, and the tree exact with every rule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from offload.drafting.base import DraftText
from offload.drafting.lookup import (
    DraftVerdict,
    Guess,
    GuessSources,
    GuessState,
    confidence,
)
from offload.drafting.model_drafter import ModelDrafter
from offload.model.kv_cache import KVCache
from offload.model.taps import Taps
from offload.model.tree_model import TreeModel
from offload.sampling.sampler import Sampler
from offload.trees.token_tree import TokenTree
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    DynamicShape,
    Shape,
    Topology,
    path_chances,
)
from offload.trees.verification import Acceptance

# A static tree shrinks in steps of an eighth: each size has its own schedule, and few are kept.
_STEPS = 8


@dataclass(frozen=True)
class JoinedState:
    """What the draft model and the sources keep of one text."""

    cache: Any  # that of the draft, see `DraftState`
    text: GuessState

    @property
    def saved(self) -> KVCache | None:
        """Return the tensors that a session keeps of the draft."""
        kept: KVCache | None = self.cache.saved
        return kept

    def can_follow(self, num_positions: int) -> int:
        """Return the draft's answer, see `DraftState`."""
        return int(self.cache.can_follow(num_positions))

    def copy_from(self, other: "JoinedState", num_tokens: int) -> None:
        """Take over the first `num_tokens` tokens of another text."""
        self.cache.copy_from(other.cache, num_tokens)
        self.text.copy_from(other.text, num_tokens)

    def clear(self, num_kept: int = 0) -> None:
        """Forget the text beyond its first `num_kept` tokens."""
        self.cache.clear(num_kept)
        self.text.clear(num_kept)


class JoinedDrafter:
    """Grows trees with a draft model and with guesses."""

    def __init__(self, model: ModelDrafter, sources: GuessSources) -> None:
        self._model = model
        self._sources = sources

    @property
    def needs(self) -> Taps | None:
        """Return the target's states that the draft reads."""
        return self._model.needs

    @property
    def model(self) -> TreeModel:
        """Return the draft."""
        return self._model.model

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the draft."""
        return self._model.num_bytes

    def cost(self, shape: Shape) -> Sequence[int]:
        """Return the draft's passes; those that score guesses depend on what is found."""
        return self._model.cost(shape)

    @property
    def widths(self) -> Sequence[int]:
        """Return the rows of the draft's passes for the last trees."""
        return self._model.widths

    def new_state(self, target: KVCache | None = None) -> JoinedState:
        """Return an empty cache, and the state of a text that was not read yet."""
        return JoinedState(self._model.new_state(target), GuessState())

    def observe(self, tokens: Sequence[int], state: JoinedState) -> None:
        """Let the draft take in a prompt, see `Proposer`."""
        self._model.observe(tokens, state.cache)

    def score(self, tokens: Sequence[int], start: int, state: JoinedState) -> Iterator[Tensor]:
        """Yield the draft's logits, see `Proposer`."""
        return self._model.score(tokens, start, state.cache)

    def share_states(self, states: Sequence[JoinedState]) -> None:
        """Let the draft's passes be shared, see `ModelDrafter`."""
        self._model.share_states([state.cache for state in states])

    def propose(self, batch: Sequence[DraftText]) -> list[TokenTree]:
        """Return a tree within each text's shape; dynamic trees are grown together."""
        guesses = [self._sources.ask(text, text.state.text) for text in batch]
        grafts = list[Sequence[Guess]]()
        texts = list[DraftText]()
        for text, trie in zip(batch, guesses, strict=True):
            shape = text.shape
            likeliest: Sequence[Guess] = []
            if trie and not isinstance(shape, DynamicShape):
                likeliest = trie.best(shape.num_nodes - 1, shape.depth)[1:]
                shape = _without_least(shape, likeliest) if likeliest else shape
            grafts.append(likeliest)
            texts.append(text._replace(shape=shape, state=text.state.cache))
        trees = zip(self._model.propose(texts, guesses), grafts, batch, strict=True)
        return [
            graft(tree, grafted, text.shape.num_nodes) if grafted else tree
            for tree, grafted, text in trees
        ]

    def accepted(
        self, tree: TokenTree, path: Acceptance, sampler: Sampler, state: JoinedState
    ) -> None:
        """Keep the accepted path, and learn how good the draft and the guesses were."""
        judged = list(self._judged(tree, path, sampler))
        state.text.guesses.learn(path.tokens, judged)
        self._model.accepted(tree, path, sampler, state.cache)

    def _judged(
        self, tree: TokenTree, accepted: Acceptance, sampler: Sampler
    ) -> Iterator[DraftVerdict | None]:
        """Yield a verdict on the draft for each emitted token, None for one without scores."""
        exponent = self._model.exponent(sampler)
        for node, token in zip(accepted.nodes, accepted.tokens, strict=True):
            score_V = tree.score_of_node.get(node)
            if score_V is None:
                yield None
            else:
                pi_V = (exponent * score_V).softmax(0)
                yield DraftVerdict(float(pi_V[token]), confidence(float(pi_V.max())))


def graft(tree: TokenTree, guesses: Sequence[Guess], num_nodes: int) -> TokenTree:
    """Hang guesses, those behind the root, into a tree until it has `num_nodes`; what is there stays."""
    nodes = [0]  # of the tree, by the order of guesses
    parents = tree.topology.parent_N.tolist()
    tokens = list(tree.tokens)
    for guess in guesses:
        if len(parents) >= num_nodes:
            break
        above = nodes[guess.parent]
        _, token = guess.item
        child = tree.child(above, token) if above < tree.num_nodes else None
        if child is None:
            child = len(parents)
            parents.append(above)
            tokens.append(token)
        nodes.append(child)
    return TokenTree.listed(parents, tokens, tree.proposals, tree.row_of_node, tree.score_of_node)


def _without_least(shape: Topology, guesses: Sequence[Guess]) -> Topology:
    """Drop the shape's least likely nodes, one for each likelier guess, rounded to a few sizes."""
    score_N = path_chances(shape, np.array(DEFAULT_ACCEPTANCE))
    falling_N = np.sort(score_N)[::-1]
    chances = [guess.score for guess in guesses]
    num_likelier = next(
        (n for n, chance in enumerate(chances) if chance <= falling_N[-1 - n]), len(chances)
    )
    step = -(-shape.num_nodes // _STEPS)
    num_kept = shape.num_nodes - min(num_likelier // step, _STEPS - 1) * step
    kept = np.sort(np.argsort(-score_N, kind="stable")[: max(num_kept, 1)])
    return Topology.from_parents([-1, *np.searchsorted(kept, shape.parent_N[kept[1:]]).tolist()])
