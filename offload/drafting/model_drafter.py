"""A resident draft model that grows token trees, of a fixed shape or as its own scores suggest.

Both kinds of tree share one model and one cache, so they may alternate from step to step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from offload.drafting.base import DraftCalibration, DraftText, PerKindLRU, root_alone
from offload.drafting.draft_model import Draft
from offload.drafting.dynamic import DraftPassPolicy, GrowingTree, grow_forest
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.static import fill
from offload.kernels.registry import REFERENCES, KernelSet
from offload.model.kv_cache import KVCache
from offload.model.taps import Taps
from offload.model.tree_model import TreeModel
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, Shape
from offload.trees.verification import Acceptance

# kind of sampling: its settings except the seed
_Kind = tuple[Sampling, ChildSampling]


class DraftSetup(NamedTuple):
    """Parts of a proposer with a draft model.

    Args:
        model: has its weights bound permanently.
        vocab_size: V of the target.
        num_slots: of a cache: committed positions plus the most rows that growing a tree takes.
    """

    model: TreeModel
    vocab_size: int
    num_slots: int
    kernels: KernelSet = REFERENCES
    new_policy: Callable[[], DraftPassPolicy] = DraftPassPolicy


class ModelDrafter:
    """Grows trees with a resident model; the state of a text is a KV cache of `num_slots` slots."""

    def __init__(
        self,
        model: TreeModel,
        vocab_size: int,
        num_slots: int,
        kernels: KernelSet = REFERENCES,
        new_policy: Callable[[], DraftPassPolicy] = DraftPassPolicy,
        *,
        is_in_tiers: bool = False,
    ) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._kv_commit = kernels.kv_commit
        self._calibration = PerKindLRU[_Kind, DraftCalibration](DraftCalibration)
        self._policy = PerKindLRU[_Kind, DraftPassPolicy](new_policy)
        self._is_in_tiers = is_in_tiers
        self.widths: Sequence[int] = ()

    @property
    def needs(self) -> Taps | None:
        """Return none: it reads tokens alone."""
        return None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the model's weights."""
        return self.model.own_bytes

    def cost(self, shape: Shape) -> Sequence[int]:
        """Return the rows of each level; the root is scored with the committed tokens."""
        return shape.draft_widths

    def new_state(self, target: KVCache | None = None) -> KVCache:
        """Return an empty cache."""
        return self.model.new_cache(self._num_slots, self._kv_commit)

    def share_states(self, states: Sequence[KVCache]) -> None:
        """Let the states share passes. Raises `UserError` if this model's cannot."""
        self.model.share_passes()
        KVCache.side_by_side(states)

    def observe(self, tokens: Sequence[int], state: KVCache) -> None:
        """Do nothing: a prompt is read when a tree is grown."""

    def propose(
        self, batch: Sequence[DraftText], guesses: Sequence[Guesses] = ()
    ) -> list[TokenTree]:
        """Return a tree for each text; dynamic ones pool their nodes, and guesses are mixed in."""
        guesses = guesses or [NO_GUESSES] * len(batch)
        grown = dict[int, TokenTree]()
        widths = list[int]()
        growing = dict[int, GrowingTree]()
        for index, (shape, tokens, sampler, state) in enumerate(batch):
            draft = self._draft(state)
            if not isinstance(shape, DynamicShape):
                grown[index] = fill(draft, shape, tokens, sampler)
                widths += self.cost(shape)
            elif not shape.depth:
                grown[index] = root_alone(tokens)
            else:
                growing[index] = self.growing(batch[index], guesses[index])
        if growing:
            pooled = [batch[index].shape for index in growing]
            shapes = [shape for shape in pooled if isinstance(shape, DynamicShape)]
            num_nodes = sum(shape.num_nodes for shape in shapes)
            depth = max(shape.depth for shape in shapes)
            policy, *others = (self.policy(tree.sampler) for tree in growing.values())
            forest = grow_forest(
                [*growing.values()],
                replace(shapes[0], num_nodes=num_nodes, depth=depth),
                policy.together_with(others) if others else policy,
                widths,
            )
            num_rows = sum(tree.num_nodes for tree in forest)
            for tree in growing.values():
                self.policy(tree.sampler).has_grown(num_rows, widths)
            grown |= zip(growing, forest, strict=True)
        self.widths = widths
        return [grown[index] for index in range(len(batch))]

    def growing(self, text: DraftText, guesses: Guesses = NO_GUESSES) -> GrowingTree:
        """Return the tree of one text, of which nothing was run yet."""
        depth = text.shape.depth
        exponent = self.exponent(text.sampler)
        draft = self._draft(text.state)
        return GrowingTree(
            draft, depth, text.tokens, text.sampler, exponent, guesses, self._is_in_tiers
        )

    def is_ready(self, text: DraftText) -> bool:
        """Return True if a tree can be grown: tokens are all that it needs."""
        return True

    def accepted(self, tree: TokenTree, path: Acceptance, sampler: Sampler, state: KVCache) -> None:
        """Keep the cache rows of the accepted path and learn from the emitted tokens."""
        self.keep(path, tree.row_of_node, tree.score_of_node, sampler, state)

    def keep(
        self,
        path: Acceptance,
        row_of_node: Mapping[int, int],
        score_of_node: Mapping[int, Tensor],
        sampler: Sampler,
        state: KVCache,
    ) -> None:
        """Do what `accepted` does, by the rows and the scores (V,) of the path's nodes that were run."""
        state.commit(
            self._rows_to_keep(
                [row_of_node[node] for node in path.nodes[1:] if node in row_of_node]
            )
        )
        emitted_after = dict(zip(path.nodes, path.tokens, strict=True))
        seen = [node for node in path.nodes if node in score_of_node]
        if seen:
            scores_TV = torch.stack([score_of_node[node] for node in seen])
            token_T = sampler.send(torch.tensor([emitted_after[node] for node in seen]), scores_TV)
            self._calibration[_kind(sampler)].learn(scores_TV, token_T)
            self.policy(sampler).learn(len(path.tokens))

    def _rows_to_keep(self, rows: list[int]) -> list[int]:
        return rows

    def _draft(self, state: KVCache) -> Draft:
        return Draft(self.model, self._vocab_size, state)

    def score(self, tokens: Sequence[int], start: int, state: KVCache) -> Iterator[Tensor]:
        """Yield logits (1, V) for `tokens[start]` and every later one, each given all before it."""
        return self._draft(state).score(tokens, start)

    def policy(self, sampler: Sampler) -> DraftPassPolicy:
        """Return the policy that decides how many nodes are worth their rows."""
        return self._policy[_kind(sampler)]

    def exponent(self, sampler: Sampler) -> float:
        """Return the exponent of the draft's distribution, see `DraftCalibration`."""
        return self._calibration[_kind(sampler)].exponent


def open_proposer(setup: DraftSetup) -> ModelDrafter:
    """Return the drafter of a model whose weights are bound; a copy scores guesses, see `tiers`."""
    held = setup.model.checkpoint.held
    return ModelDrafter(*setup, is_in_tiers=held is not None and held.is_copy)


def _kind(sampler: Sampler) -> _Kind:
    return sampler.sampling.kind, sampler.drafting
