"""Carried drafts as proposers, MTP layers first: models that start from the target's hidden states.

A carried draft differs from a `ModelDrafter` in three ways. A tree needs the target's state before
its root, so while the target still has to read a prompt, the tree is the root alone. A prompt's
states are taken in chunk by chunk. And no row of a tree is kept: it holds a guess's state, and is
computed again from the target's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.drafting.base import DraftText, root_alone
from offload.drafting.draft_model import SCORED_CHUNK, Draft
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.model_drafter import DraftSetup, ModelDrafter
from offload.memory.sizes import STATE_ROWS
from offload.model.carried_depths import DepthModel
from offload.model.carried_model import CarriedCache, CarriedModel
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.taps import Taps
from offload.trees.token_tree import TokenTree

MODEL = DepthModel


@dataclass(frozen=True)
class CarriedDraft(Draft):
    """The rows of a carried draft: row i has token i + 1, at position i."""

    _cache: CarriedCache

    @property
    def prompt_rows(self) -> int:
        """See `Draft`."""
        return STATE_ROWS

    def _missing(self, tokens: Sequence[int]) -> Tensor:
        missing = torch.tensor(tokens[self._cache.length + 1 :])
        self._cache.take_taps(len(missing))
        assert len(missing), "the root is cached already, and its scores are gone"
        return missing

    def run(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> Tensor:
        """See `Draft`."""
        return super().run(token_W, position_U - 1, ancestor_WU)

    def part(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> BatchPart:
        """See `Draft`."""
        return super().part(token_W, position_U - 1, ancestor_WU)


class CarriedDrafter(ModelDrafter):
    """Grows trees with a model that reads the target's states."""

    @property
    def needs(self) -> Taps:
        """Return which states its model reads."""
        assert isinstance(self.model, CarriedModel), "a model that reads any"
        return self.model.needs

    def new_state(self, target: KVCache | None = None) -> KVCache:
        """Return an empty cache that reads the log of the target's."""
        state = super().new_state()
        assert isinstance(state, CarriedCache), "a cache of this model's"
        state.target = target
        return state

    def observe(self, tokens: Sequence[int], state: KVCache) -> None:
        """Take in rows whose state and whose next token are known."""
        assert isinstance(state, CarriedCache), "a cache of this drafter's"
        num_rows = min(state.num_ready, len(tokens) - 1) - state.length
        if num_rows > 0:
            first = state.length
            state.take_taps(num_rows)
            token_T = torch.tensor(tokens[first + 1 : first + 1 + num_rows])
            for chunk in token_T.split(STATE_ROWS):
                self._draft(state)._run_committed(chunk, num_logits=1)

    def propose(
        self, batch: Sequence[DraftText], guesses: Sequence[Guesses] = ()
    ) -> list[TokenTree]:
        """Return a tree for each text; the root alone if its prompt is not read yet."""
        guesses = guesses or [NO_GUESSES] * len(batch)
        is_ready = [self.is_ready(text) for text in batch]
        texts = [text for text, ready in zip(batch, is_ready, strict=True) if ready]
        theirs = [guess for guess, ready in zip(guesses, is_ready, strict=True) if ready]
        trees = iter(super().propose(texts, theirs) if texts else [])
        return [
            next(trees) if ready else root_alone(text.tokens)
            for text, ready in zip(batch, is_ready, strict=True)
        ]

    def score(self, tokens: Sequence[int], start: int, state: KVCache) -> Iterator[Tensor]:
        """Yield logits (1, V), see `Proposer`; the target has read these tokens already."""
        assert isinstance(state, CarriedCache), "a cache of this drafter's"
        draft = self._draft(state)
        state.clear()
        while (first := state.length) < len(tokens) - 2:
            num_rows = min(state.num_ready, len(tokens) - 2, first + SCORED_CHUNK) - first
            assert num_rows > 0, "the target has run two tokens before"
            state.take_taps(num_rows)
            token_T = torch.tensor(tokens[first + 1 : first + 1 + num_rows])
            logits_TV = draft._run_committed(token_T, num_logits=num_rows)
            for row, logits_V in enumerate(logits_TV, first + 2):
                if row >= start:
                    yield logits_V[None, : self._vocab_size]

    def is_ready(self, text: DraftText) -> bool:
        """Return True if the target's states are there up to the root."""
        state = text.state
        return state.target is None or state.num_ready >= len(text.tokens) - 1 > state.length

    def _rows_to_keep(self, rows: list[int]) -> list[int]:
        return []

    def _draft(self, state: KVCache) -> Draft:
        assert isinstance(state, CarriedCache), "a cache of this drafter's"
        return CarriedDraft(self.model, self._vocab_size, state)


def open_proposer(setup: DraftSetup) -> CarriedDrafter:
    """Return the drafter of a model whose weights are bound."""
    return CarriedDrafter(*setup)
