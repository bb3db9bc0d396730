"""A resident draft model that grows token trees, of a fixed shape or as its own scores suggest.

Both kinds of tree share one model and one cache, so they may alternate from step to step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload.drafting.base import ByKind, Drafted, DraftText
from offload.drafting.draft_model import Draft
from offload.drafting.dynamic import (
    DraftCalibration,
    DraftPassPolicy,
    GrowingTree,
    grow_forest,
)
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.static import fill
from offload.kernels.registry import REFERENCES, KernelSet
from offload.model.kv_cache import KVCache
from offload.model.streamed import StreamedModel
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, chain

# the kind of sampling: its settings apart from the seed
_Kind = tuple[Sampling, ChildSampling]


class ModelDrafter:
    """Grows trees with a resident model; the state of a text is a KV cache of `num_slots` slots."""

    def __init__(
        self,
        model: StreamedModel,
        vocab_size: int,
        num_slots: int,
        kernels: KernelSet = REFERENCES,
        new_policy: Callable[[], DraftPassPolicy] = DraftPassPolicy,
    ) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._kv_commit = kernels.kv_commit
        self._calibration = ByKind[_Kind, DraftCalibration](DraftCalibration)
        self._policy = ByKind[_Kind, DraftPassPolicy](new_policy)

    def new_state(self) -> KVCache:
        """Return an empty cache."""
        return self.model.new_cache(self._num_slots, self._kv_commit)

    def share_states(self, states: Sequence[KVCache]) -> None:
        """Let the states' passes be shared. Raises `UserError` where this model's cannot be."""
        self.model.share_passes()
        KVCache.side_by_side(states)

    def grow(self, batch: Sequence[DraftText], guesses: Sequence[Guesses] = ()) -> list[Drafted]:
        """Return a tree for each text; dynamic trees are grown together and pool their nodes.

        `guesses`, one for each text, are mixed into dynamic trees.
        """
        guesses = guesses or [NO_GUESSES] * len(batch)
        grown = dict[int, Drafted]()
        growing = dict[int, GrowingTree]()
        for index, (shape, tokens, sampler, state) in enumerate(batch):
            draft = Draft(self.model, self._vocab_size, state)
            if not isinstance(shape, DynamicShape):
                grown[index] = fill(draft, shape, tokens, sampler)
            elif not shape.depth:
                grown[index] = Drafted(TokenTree(chain(0), torch.tensor(tokens[-1:])), {}, {})
            else:
                growing[index] = GrowingTree(
                    draft, shape.depth, tokens, sampler, self.exponent(sampler), guesses[index]
                )
        if growing:
            pooled = [batch[index] for index in growing]
            forest = grow_forest([*growing.values()], _bounds_of(pooled), self._policy_of(pooled))
            grown |= zip(growing, forest, strict=True)
        return [grown[index] for index in range(len(batch))]

    def _policy_of(self, texts: Sequence[DraftText]) -> DraftPassPolicy:
        first, *others = (self._policy[_kind(text.sampler)] for text in texts)
        return first.together_with(others) if others else first

    def commit(
        self,
        drafted: Drafted,
        nodes: Sequence[int],
        tokens: Sequence[int],
        sampler: Sampler,
        state: KVCache,
    ) -> None:
        """Keep the cache rows of the accepted path and learn from the emitted tokens."""
        state.commit(
            [drafted.row_of_node[node] for node in nodes[1:] if node in drafted.row_of_node]
        )
        emitted_after = dict(zip(nodes, tokens, strict=True))
        seen = [node for node in nodes if node in drafted.score_of_node]
        if seen:
            scores_TV = torch.stack([drafted.score_of_node[node] for node in seen])
            token_T = sampler.send(torch.tensor([emitted_after[node] for node in seen]), scores_TV)
            self._calibration[_kind(sampler)].learn(scores_TV, token_T)
            self._policy[_kind(sampler)].learn(len(tokens))

    def score(self, tokens: Sequence[int], start: int, state: KVCache) -> Iterator[Tensor]:
        """Yield logits (1, V) for `tokens[start]` and every later one, each given all before it.

        Many positions share a pass.
        """
        return Draft(self.model, self._vocab_size, state).score(tokens, start)

    def exponent(self, sampler: Sampler) -> float:
        """Return the exponent of the draft's distribution, see `DraftCalibration`."""
        return self._calibration[_kind(sampler)].exponent


def _kind(sampler: Sampler) -> _Kind:
    return replace(sampler.sampling, seed=0), sampler.drafting


def _bounds_of(texts: Sequence[DraftText]) -> DynamicShape:
    """Return the bounds of these dynamic trees together."""
    shapes = [text.shape for text in texts if isinstance(text.shape, DynamicShape)]
    num_nodes = sum(shape.num_nodes for shape in shapes)
    return replace(shapes[0], num_nodes=num_nodes, depth=max(shape.depth for shape in shapes))
