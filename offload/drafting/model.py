"""A resident draft model that grows token trees: static ones of a fixed shape, or dynamic ones as
its scores suggest.

Both ways share one model and one cache, so that trees of both kinds may alternate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload.drafting.base import ByKind, Drafted, DraftText
from offload.drafting.draft_model import Draft
from offload.drafting.dynamic import (
    CandidateRanking,
    DraftCalibration,
    DraftEntry,
    DraftPassPolicy,
    grow_best,
    grow_forest,
)
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.static import fill
from offload.kernels.registry import REFERENCES, KernelSet
from offload.model.kv_cache import KVCache
from offload.model.streamed import StreamedModel
from offload.sampling.sampler import Sampler
from offload.trees.topology import DynamicShape, Shape
from offload.units import ChildSampling, Sampling

_Kind = tuple[Sampling, ChildSampling]  # of sampling, whatever the seed


class ModelDrafter:
    """Grows trees with a resident model; what it keeps of a text is a cache of `num_slots` keys and
    values.
    """

    def __init__(
        self,
        model: StreamedModel,
        vocab_size: int,
        num_slots: int,
        kernels: KernelSet = REFERENCES,
        new_worth: Callable[[], DraftPassPolicy] = DraftPassPolicy,
    ) -> None:
        self.model, self._vocab_size, self._num_slots, self._gather = (
            model,
            vocab_size,
            num_slots,
            kernels.kv_commit,
        )
        self._sharpness = ByKind[_Kind, DraftCalibration](DraftCalibration)
        self._worth = ByKind[_Kind, DraftPassPolicy](new_worth)

    def new_state(self) -> KVCache:
        """An empty cache."""
        return self.model.new_cache(self._num_slots, self._gather)

    def share_states(self, states: Sequence[KVCache]) -> None:
        """See `Drafter`. Raises `UserError` where this model's passes cannot be shared."""
        self.model.share_passes()
        KVCache.side_by_side(states)

    def grow(
        self,
        shape: Shape,
        tokens: Sequence[int],
        sampler: Sampler,
        state: KVCache,
        guesses: Guesses = NO_GUESSES,
    ) -> Drafted:
        """A tree below `tokens[-1]`, of this very shape, or within these bounds, and then with
        guesses mixed in.
        """
        draft = Draft(self.model, self._vocab_size, state)
        if isinstance(shape, DynamicShape):
            mixture = CandidateRanking(self.exponent(sampler), guesses)
            return grow_best(draft, shape, tokens, sampler, mixture, self._worth[_kind(sampler)])
        return fill(draft, shape, tokens, sampler)

    def grow_all(
        self, texts: Sequence[DraftText], guesses: Sequence[Guesses] = ()
    ) -> list[Drafted]:
        """A tree for each: those within bounds are one forest, with the nodes that all bounds have
        together.
        """
        known = dict(enumerate(guesses))
        free = [
            index
            for index, text in enumerate(texts)
            if isinstance(text.shape, DynamicShape) and text.shape.depth
        ]
        grown = dict(
            zip(free, self._forest({index: texts[index] for index in free}, known), strict=True)
        )
        others = {index: text for index, text in enumerate(texts) if index not in grown}
        grown |= {index: self.grow(*text) for index, text in others.items()}
        return [grown[index] for index in range(len(texts))]

    def _forest(
        self, texts: Mapping[int, DraftText], guesses: Mapping[int, Guesses]
    ) -> list[Drafted]:
        if not texts:
            return []
        plots = [
            DraftEntry(
                Draft(self.model, self._vocab_size, text.state),
                text.shape.depth,
                text.tokens,
                text.sampler,
                CandidateRanking(self.exponent(text.sampler), guesses.get(index, NO_GUESSES)),
            )
            for index, text in texts.items()
        ]
        shapes = [text.shape for text in texts.values() if isinstance(text.shape, DynamicShape)]
        bounds = replace(
            shapes[0],
            num_nodes=sum(one.num_nodes for one in shapes),
            depth=max(one.depth for one in shapes),
        )
        first, *others = (self._worth[_kind(text.sampler)] for text in texts.values())
        return grow_forest(plots, bounds, first.together_with(others) if others else first)

    def commit(
        self,
        drafted: Drafted,
        nodes: Sequence[int],
        tokens: Sequence[int],
        sampler: Sampler,
        state: KVCache,
    ) -> None:
        """Keep the rows of the accepted path as far as it was run, and learn from what was emitted
        after each node.
        """
        state.commit(
            [drafted.row_of_node[node] for node in nodes[1:] if node in drafted.row_of_node]
        )
        emitted_after = dict(zip(nodes, tokens, strict=True))
        seen = [node for node in nodes if node in drafted.score_of_node]
        if seen:
            scores_TV = torch.stack([drafted.score_of_node[node] for node in seen])
            token_T = sampler.send(torch.tensor([emitted_after[node] for node in seen]), scores_TV)
            self._sharpness[_kind(sampler)].learn(scores_TV, token_T)
            self._worth[_kind(sampler)].learn(len(tokens))

    def score(self, tokens: Sequence[int], start: int, state: KVCache) -> Iterator[Tensor]:
        """Logits (1, V) for `tokens[start]` and every later one, each given all before it; many
        positions per pass.
        """
        return Draft(self.model, self._vocab_size, state).score(tokens, start)

    def exponent(self, sampler: Sampler) -> float:
        """Of the draft's distribution, see `DraftCalibration`."""
        return self._sharpness[_kind(sampler)].exponent


def _kind(sampler: Sampler) -> _Kind:
    return replace(sampler.sampling, seed=0), sampler.drafting
