"""A resident draft model that grows token trees: of a fixed shape (`filled`) or as its scores suggest (`grown`).

Both ways share one model and one cache, so that trees of both kinds may alternate. Invariant: between steps the cache
holds committed tokens only, in their order.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload.config import Drafting, Sampling
from offload.drafting.confidence import Sharpness
from offload.drafting.draft_model import Draft
from offload.drafting.dynamic import grow_best
from offload.drafting.static import fill
from offload.kernels.registry import REFERENCES, KernelSet
from offload.model.weights import StreamedModel
from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree
from offload.tree.topology import DynamicShape, Shape


class ModelDrafter:
    """Grows trees with a resident model.

    Args:
        model: its weights are bound for good.
        vocab_size: V of the target; a draft may pad its vocabulary further, what lies beyond is never proposed.
        num_slots: capacity of its cache, committed positions plus nodes of the largest tree.
        kernels: of which the cache takes its own.
    """

    def __init__(self, model: StreamedModel, vocab_size: int, num_slots: int, kernels: KernelSet = REFERENCES) -> None:
        self._draft = Draft(model, vocab_size, num_slots, kernels)
        self._row_of_node: dict[int, int] = {}
        self._score_of_node: dict[int, Tensor] = {}  # of a dynamic tree, to learn from
        self._sharpness: defaultdict[tuple[Sampling, Drafting], Sharpness] = defaultdict(Sharpness)
        self._learner = Sharpness()  # the one of the tree grown last

    def reset(self, num_kept: int = 0) -> None:
        """Forget the sequence but for its first tokens."""
        self._draft.reset(num_kept)

    def grow(self, shape: Shape, tokens: Sequence[int], sampler: Sampler) -> TokenTree:
        """A tree below `tokens[-1]`, of this very shape or within these bounds."""
        if isinstance(shape, DynamicShape):
            self._learner = self._sharpness[replace(sampler.sampling, seed=0), sampler.drafting]
            tree, self._row_of_node, self._score_of_node = grow_best(
                self._draft, shape, tokens, sampler, self._learner.exponent
            )
            return tree
        tree, self._row_of_node = fill(self._draft, shape, tokens, sampler)
        self._score_of_node = {}
        return tree

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep the rows of the accepted path as far as it was run; the rest is run again as committed tokens.

        Args:
            tokens: what was emitted after each of `nodes`, from which the shape of later trees is learned.
        """
        self._draft.commit([self._row_of_node[node] for node in nodes[1:] if node in self._row_of_node])
        emitted_after = dict(zip(nodes, tokens, strict=True))
        seen = [node for node in nodes if node in self._score_of_node]
        if seen:
            scores_TV = torch.stack([self._score_of_node[node] for node in seen])
            self._learner.learn(scores_TV, [emitted_after[node] for node in seen])
        self._score_of_node = {}

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Tensor]:
        """Logits (1, V) for `tokens[start]` and every later one, each given all before it; many positions per pass."""
        return self._draft.score(tokens, start)
