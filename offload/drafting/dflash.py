"""DFlash and DSpark blocks: what follows is guessed for all positions of a block in one pass.

Keys are made of the target's states, of every committed token; the rows of a block are the last
token and masks behind it, which see each other both ways. So there is one distribution for each
position, whatever stands before it, and a tree is the best products of independent lists: ranked by
softmax(beta (log q + G)), where G is the noise of the position that the target draws with. A head
that corrects scores by the tokens before (`corrections`) makes them lists by node.
Names and forms: `checkpoint.blocks`.

Invariant: rows of the cache are made of the target's states alone; those of a block are never kept.

Shape letters, in this file only: F nodes of a level, Z numbers of a state that corrects.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.drafting.base import DraftText, root_alone
from offload.drafting.block_model import BlockModel
from offload.drafting.corrections import BlockOutput
from offload.drafting.dynamic import ranked_children
from offload.drafting.head_model import score_apart
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.model_drafter import DraftSetup
from offload.drafting.mtp import CarriedDraft, CarriedDrafter
from offload.drafting.static import fill, point_mass_scores
from offload.model.carried_model import CarriedCache, parent_of
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart, causal
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, Shape

MODEL = BlockModel


@dataclass(frozen=True)
class _BlockDraft(CarriedDraft):
    """A block behind one text: deeper rows ask for scores that are there already."""

    _model: BlockModel
    _cache: CarriedCache
    _outputs: list[BlockOutput] = field(default_factory=list)
    _states: list[Tensor] = field(default_factory=list)  # of the root, and of rows behind it

    def block(self, tokens: Sequence[int]) -> BlockOutput:
        """Return guesses behind these tokens, at each position of the block."""
        *chunks, last = self._missing(tokens).split(self.prompt_rows)
        for chunk in chunks:
            self._run_committed(chunk, num_logits=1)
        num_rows = len(last)
        block = self._model.block
        masked = [block.mask] * (block.size - 1)
        token_T = torch.cat([last, torch.tensor([tokens[-1], *masked])])
        sees_TT = causal(len(token_T))
        sees_TT[num_rows:] = True
        position_T = torch.arange(len(token_T)) + self._cache.length
        rows = BatchPart(token_T, position_T, sees_TT, self._cache)
        scores_DV = self.score_parts([rows], num_logits=self._model.num_guesses)
        self._cache.commit(range(num_rows))
        return self._model.output(scores_DV)

    def catch_up(self, tokens: Sequence[int]) -> Tensor:
        output = self.block(tokens)
        root_1 = torch.tensor([tokens[-1]])
        scores_1V, state_1Z = self._model.below(
            output, torch.zeros_like(root_1), root_1, self._model.before(output, tokens)
        )
        self._outputs[:] = [output]
        self._states[:] = [state_1Z]
        return scores_1V

    def run(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> Tensor:
        # the first row behind the root is scored by the second guess of the block
        depth_W = position_U[-len(token_W) :] - self._cache.length
        num_known = ancestor_WU.shape[1]
        parents = [parent_of(ancestor_WU, row, num_known) for row in range(len(token_W))]
        state_UZ = torch.cat(self._states)
        scores_WV, state_WZ = self._model.below(
            self._outputs[0], depth_W, token_W, state_UZ[torch.tensor(parents) + 1]
        )
        self._states.append(state_WZ)
        return scores_WV


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
        return (self.model.block.size,)

    def score(self, tokens: Sequence[int], start: int, state: KVCache) -> Iterator[Tensor]:
        """Yield logits (1, V), see `Proposer`."""
        return score_apart(self, tokens, start, state)

    def _tree(self, text: DraftText, guesses: Guesses) -> TokenTree:
        """Return the tree of one text: its block's best paths, and guesses that are likelier."""
        shape = text.shape
        draft = self._draft(text.state)
        if not shape.depth or not self.is_ready(text):
            return root_alone(text.tokens)
        if not isinstance(shape, DynamicShape):
            return fill(draft, shape, text.tokens, text.sampler)
        lists = _Lists(draft, text, self.exponent(text.sampler))
        chance_of = _best_paths(lists, shape.num_nodes, min(shape.depth, self.model.num_guesses))
        for path, chance in _guessed_paths(guesses, shape).items():
            chance_of[path] = max(chance, chance_of.get(path, 0.0))
        paths = sorted(chance_of, key=lambda path: (-chance_of[path], len(path)))
        chances = np.array([chance_of[path] for path in paths[1 : shape.num_nodes]])
        num_rows = self.policy(text.sampler).num_rows(chances, [self.model.block.size])
        return _as_tree(paths[:num_rows], text.tokens[-1], lists)

    def _draft(self, state: KVCache) -> "_BlockDraft":
        assert isinstance(state, CarriedCache), "a cache of this drafter's"
        return _BlockDraft(self.model, self._vocab_size, state)


_Path = tuple[int, ...]


class _Lists:
    """What follows paths below the root of one text, by how likely the target is to draw it."""

    def __init__(self, draft: _BlockDraft, text: DraftText, exponent: float) -> None:
        self._model = draft._model
        self._root_token = text.tokens[-1]
        self._first = len(text.tokens)  # the position behind the root
        self._sampler = text.sampler
        self._exponent = exponent
        self._output = draft.block(text.tokens)
        self._state_of: dict[_Path, Tensor] = {(): self._model.before(self._output, text.tokens)}
        self._score_of = dict[_Path, Tensor]()
        if self._model.corrections is None:
            # the same below every path
            self._score_DV = self._drawn(self._output.scores_DV, [()] * self._model.num_guesses)
            self._ranked = self._rank(self._score_DV)

    def score_below(self, path: _Path) -> Tensor | None:
        """Return the scores (V) of what follows; None where they were not asked for."""
        if self._model.corrections is not None:
            return self._score_of.get(path)
        return self._score_DV[len(path)] if len(path) < len(self._score_DV) else None

    def below(self, paths: Sequence[_Path]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return chances and tokens (F, K) below paths of one length, or (1, K) for them all."""
        depth = len(paths[0])
        if self._model.corrections is None:
            chance_DK, token_DK = self._ranked
            return chance_DK[depth : depth + 1], token_DK[depth : depth + 1]
        token_F = torch.tensor([path[-1] if path else self._root_token for path in paths])
        state_FZ = torch.cat([self._state_of[path[:-1]] for path in paths])
        depth_F = torch.full_like(token_F, depth)
        score_FV, state_FZ = self._model.below(self._output, depth_F, token_F, state_FZ)
        score_FV = self._drawn(score_FV, paths)
        self._state_of |= zip(paths, state_FZ.split(1), strict=True)
        self._score_of |= zip(paths, score_FV, strict=True)
        return self._rank(score_FV)

    def _drawn(self, score_FV: Tensor, paths: Sequence[_Path]) -> Tensor:
        """Return the scores that the draw would maximise if the block were the target."""
        first = self._first
        is_shared = self._model.corrections is None
        positions = [first + (row if is_shared else len(path)) for row, path in enumerate(paths)]
        adjusted_FV = self._sampler.adjusted(score_FV, paths)
        return point_mass_scores(adjusted_FV, self._sampler, positions).float()

    def _rank(self, score_FV: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        log_pi_FV, token_FK = ranked_children(score_FV, self._exponent)
        chance_FK = log_pi_FV.gather(1, token_FK).double().exp()
        return chance_FK.cpu().numpy(), token_FK.cpu().numpy()


def _best_paths(lists: _Lists, num_nodes: int, depth: int) -> dict[_Path, float]:
    """Return the paths with the largest products of chances, and these, level by level.

    Below a path that is not among the best there is none that is.
    """
    root: _Path = ()
    paths = [root]
    chance_C = np.ones(1)
    level_F = np.zeros(1, dtype=np.int64)
    for _ in range(depth):
        chance_FK, token_FK = lists.below([paths[place] for place in level_F.tolist()])
        chance_FK = chance_C[level_F, None] * chance_FK
        token_FK = np.broadcast_to(token_FK, chance_FK.shape)
        every = np.concatenate([chance_C, chance_FK.reshape(-1)])
        # ties go to the shallower ones
        kept = np.sort(np.argsort(-every, kind="stable")[:num_nodes])
        kept = kept[every[kept] > 0]
        old = kept[kept < chance_C.size]
        above, rank = np.divmod(kept[old.size :] - chance_C.size, chance_FK.shape[1])
        places = zip(level_F[above].tolist(), token_FK[above, rank].tolist(), strict=True)
        paths = [paths[place] for place in old.tolist()] + [
            (*paths[place], token) for place, token in places
        ]
        chance_C = every[kept]
        level_F = np.arange(old.size, kept.size)
        if not level_F.size:
            break
    return dict(zip(paths, chance_C.tolist(), strict=True))


def _guessed_paths(guesses: Guesses, shape: DynamicShape) -> dict[_Path, float]:
    """Return paths from other sources, and their chances."""
    chance_of = dict[_Path, float]()
    paths = list[_Path]()
    for guess in guesses.best(shape.num_nodes, shape.depth) if guesses else ():
        paths.append((*paths[guess.parent], guess.item[1]) if paths else ())
        chance_of[paths[-1]] = guess.score
    return chance_of


def _as_tree(paths: Sequence[_Path], root_token: int, lists: _Lists) -> TokenTree:
    """Return the tree of paths, parents before their children; those of a block have scores."""
    place = {path: number for number, path in enumerate(paths)}
    below = {number: lists.score_below(path) for path, number in place.items()}
    return TokenTree.listed(
        [place.get(path[:-1], -1) if path else -1 for path in paths],
        [path[-1] if path else root_token for path in paths],
        score_of={number: score_V for number, score_V in below.items() if score_V is not None},
    )


def open_proposer(setup: DraftSetup) -> BlockDrafter:
    """Return the drafter of a model that is bound for good."""
    return BlockDrafter(*setup)
