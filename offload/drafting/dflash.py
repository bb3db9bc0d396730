"""DFlash blocks: what follows is guessed for all positions of a block in one pass.

Keys are made of the target's states, of every committed token; the rows of a block are the last
token and masks behind it, which see each other both ways. So there is one distribution for each
position, whatever stands before it, and a tree is the best products of independent lists: ranked by
softmax(beta (log q + G)), where G is the noise of the position that the target draws with.
Names and forms: `checkpoint.heads`.

Invariant: rows of the cache are made of the target's states alone; those of a block are never kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload.drafting.base import DraftText, root_alone
from offload.drafting.dynamic import ranked_children
from offload.drafting.head_model import HeadModel, empty_linear, mixer_shapes, score_apart
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.model_drafter import DraftSetup
from offload.drafting.mtp import CarriedDraft, CarriedDrafter
from offload.drafting.static import fill, point_mass_scores
from offload.memory.sizes import PROMPT_ROWS
from offload.model.carried_model import CarriedCache, twin
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart, causal
from offload.model.taps import final_norm
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, GrownNode, Shape, grow_best_first


class BlockModel(HeadModel):
    """A block's layers: rows of committed tokens give keys alone, made of the target's states."""

    def _new_mixer(self, decoder: Any) -> nn.Module:
        mixer = _ContextMixer(final_norm(decoder), mixer_shapes(self.checkpoint))
        for layer in decoder.layers:
            layer.input_layernorm.register_forward_hook(mixer.place)
        return mixer

    def forward_parts(self, parts: Sequence[BatchPart], *, num_logits: int = 0) -> Tensor:
        """See `TreeModel`; rows whose states were taken out of the log are of committed tokens."""
        is_context = [
            torch.arange(len(part.token_T)) < part.cache.num_tapped(part)
            for part in parts
            if isinstance(part.cache, CarriedCache)
        ]
        self._is_context_T = self.send(torch.cat(is_context))
        return super().forward_parts(parts, num_logits=num_logits)

    def new_cache(self, num_slots: int, gather: Any = None) -> CarriedCache:
        """Return an empty cache, which has room for a block as well."""
        return super().new_cache(num_slots + self.block[0], gather)

    @property
    def block(self) -> tuple[int, int]:
        """Return the tokens of a block, and the id of those to be guessed."""
        assert self._carried.block is not None, "such a draft says so"
        return self._carried.block

    def _enter(self, embedded_1TD: Tensor, fed_1TD: Tensor) -> Tensor:
        self._mixer.context = (self._is_context_T[None, :, None], fed_1TD)
        return embedded_1TD


MODEL = BlockModel


class _ContextMixer(nn.Module):
    """Makes of states what every layer makes keys of.

    Attributes:
        context: of the pass that runs, which rows (1, T, 1) are of committed tokens, and their
            states (1, T, D).
    """

    context: tuple[Tensor, ...] = ()

    def __init__(self, norm: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        width, num_inputs = shapes["fc.weight"]
        self.fc = empty_linear(num_inputs, width, next(norm.parameters()).dtype)
        self.hidden_norm = twin(norm)

    def forward(self, tapped_TW: Tensor) -> Tensor:
        """Return (T, D) of the target's states."""
        mixed_TD: Tensor = self.hidden_norm(self.fc(tapped_TW))
        return mixed_TD

    def place(self, _: nn.Module, __: Any, normed_1TD: Tensor) -> Tensor:
        """Return keys and values of a layer's attention, from its own normed rows and context."""
        is_context_1T1, fed_1TD = self.context
        return torch.where(is_context_1T1, fed_1TD, normed_1TD)


@dataclass(frozen=True)
class _BlockDraft(CarriedDraft):
    """A block behind one text: deeper rows ask for scores that are there already."""

    _model: BlockModel
    _cache: CarriedCache
    _scores: list[Tensor] = field(default_factory=list)

    def block(self, tokens: Sequence[int]) -> Tensor:
        """Return scores (B - 1, V) of what follows, at each position of the block."""
        *chunks, last = self._missing(tokens).split(PROMPT_ROWS)
        for chunk in chunks:
            self._run_committed(chunk, num_logits=1)
        num_rows = len(last)
        size, mask = self._model.block
        token_T = torch.cat([last, torch.tensor([tokens[-1], *[mask] * (size - 1)])])
        sees_TT = causal(len(token_T))
        sees_TT[num_rows:] = True
        position_T = torch.arange(len(token_T)) + self._cache.length
        rows = BatchPart(token_T, position_T, sees_TT, self._cache)
        scores_DV = self.score_parts([rows], num_logits=size - 1)
        self._cache.commit(range(num_rows))
        return scores_DV

    def catch_up(self, tokens: Sequence[int]) -> Tensor:
        self._scores[:] = [self.block(tokens)]
        return self._scores[0][:1]

    def run(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> Tensor:
        # the first row behind the root is scored by the second row of the block
        depth_W = position_U[-len(token_W) :] - self._cache.length
        scores_DV = self._scores[0]
        return scores_DV[self._model.send(depth_W.clamp(max=len(scores_DV) - 1))]


class BlockDrafter(CarriedDrafter):
    """Grows trees with blocks, each text's by itself."""

    model: BlockModel

    def propose(
        self, batch: Sequence[DraftText], guesses: Sequence[Guesses] = ()
    ) -> list[TokenTree]:
        """Return a tree for each text; guesses take the place of what is less likely."""
        mixed = guesses or [NO_GUESSES] * len(batch)
        return [self._tree(text, guess) for text, guess in zip(batch, mixed, strict=True)]

    def cost(self, shape: Shape) -> Sequence[int]:
        """Return the rows of its one pass."""
        return (self.model.block[0],)

    def score(self, tokens: Sequence[int], start: int, state: KVCache) -> Iterator[Tensor]:
        """Yield logits (1, V), see `Proposer`."""
        return score_apart(self, tokens, start, state)

    def _tree(self, text: DraftText, guesses: Guesses) -> TokenTree:
        shape = text.shape
        draft = self._draft(text.state)
        if not shape.depth or not self._is_ready(text):
            return root_alone(text.tokens)
        if not isinstance(shape, DynamicShape):
            return fill(draft, shape, text.tokens, text.sampler)
        scores_DV = draft.block(text.tokens)[: shape.depth]
        sampler = text.sampler
        root = len(text.tokens) - 1
        scores_DV = sampler.adjusted(scores_DV, [()] * len(scores_DV))
        positions = range(root + 1, root + 1 + len(scores_DV))
        scores_DV = point_mass_scores(scores_DV, sampler, positions).float()
        log_pi_DV, token_DK = ranked_children(scores_DV, self.exponent(sampler))
        chances_DK = log_pi_DV.gather(1, token_DK).double().exp().tolist()
        chance_of = _best_paths(chances_DK, token_DK.tolist(), shape.num_nodes)
        for path, chance in _guessed(guesses, shape).items():
            chance_of[path] = max(chance, chance_of.get(path, 0.0))
        paths = sorted(chance_of, key=lambda path: (-chance_of[path], len(path)))
        chances = np.array([chance_of[path] for path in paths[1 : shape.num_nodes]])
        num_rows = self.policy(sampler).num_rows(chances, [self.model.block[0]])
        return _as_tree(paths[:num_rows], text.tokens[-1], scores_DV)

    def _draft(self, state: KVCache) -> "_BlockDraft":
        assert isinstance(state, CarriedCache), "a cache of this drafter's"
        return _BlockDraft(self.model, self._vocab_size, state)


_Path = tuple[int, ...]


def _best_paths(
    chances_DK: list[list[float]], tokens_DK: list[list[int]], num_nodes: int
) -> dict[_Path, float]:
    """Return the paths with the largest products of one chance a position, and these."""

    def child(node: GrownNode[_Path], rank: int) -> tuple[float, _Path] | None:
        depth = node.depth
        if depth == len(chances_DK) or rank == len(chances_DK[depth]):
            return None
        chance = node.score * chances_DK[depth][rank]
        return (chance, (*node.item, tokens_DK[depth][rank])) if chance else None

    root: _Path = ()
    grown = islice(grow_best_first(root, child), num_nodes)
    return {node.item: node.score for node in grown}


def _guessed(guesses: Guesses, shape: DynamicShape) -> dict[_Path, float]:
    """Return paths from other sources, and their chances."""
    chance_of = dict[_Path, float]()
    paths = list[_Path]()
    for guess in guesses.best(shape.num_nodes, shape.depth) if guesses else ():
        paths.append((*paths[guess.parent], guess.item[1]) if paths else ())
        chance_of[paths[-1]] = guess.score
    return chance_of


def _as_tree(paths: Sequence[_Path], root_token: int, scores_DV: Tensor) -> TokenTree:
    """Return the tree of paths, parents before their children; those of a block have scores."""
    place = {path: number for number, path in enumerate(paths)}
    return TokenTree.listed(
        [place.get(path[:-1], -1) if path else -1 for path in paths],
        [path[-1] if path else root_token for path in paths],
        score_of={
            number: scores_DV[len(path)]
            for path, number in place.items()
            if len(path) < len(scores_DV)
        },
    )


def open_proposer(setup: DraftSetup) -> BlockDrafter:
    """Return the drafter of a model that is bound for good."""
    return BlockDrafter(*setup)
