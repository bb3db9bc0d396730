"""A made-up drafter, all of it: it recalls where the target was in a like state, and guesses what came after."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.checkpoint import Checkpoint
from offload.drafting.base import DraftText, WithoutModel, root_alone
from offload.drafting.model_drafter import DraftSetup
from offload.model.kv_cache import KVCache
from offload.model.taps import Taps
from offload.sampling.sampler import Sampler
from offload.trees.token_tree import TokenTree
from offload.trees.topology import chain
from offload.trees.verification import Acceptance

LAYER = "model.layers.0."


def first_layer(target: Checkpoint, value: str) -> Checkpoint:
    """Return a checkpoint of the target's first layer: something with weights of its own."""
    tensors = {
        name: value
        for name, value in target.tensors.items()
        if not name.startswith("model.layers.") or name.startswith(LAYER)
    }
    return replace(target, config={**target.config, "num_hidden_layers": 1}, tensors=tensors)


@dataclass
class Memory:
    target: KVCache | None
    rows: list[Tensor] = field(default_factory=list)  # states that the target has shown, one a token
    saved: KVCache | None = None

    def take(self) -> None:
        log = self.target and self.target.taps
        if log and log.end > len(self.rows):
            self.rows += log.take(len(self.rows), log.end)

    def can_follow(self, num_positions: int) -> int:
        log = self.target and self.target.taps
        return num_positions if log and log.first <= len(self.rows) else min(num_positions, len(self.rows))

    def clear(self, num_kept: int = 0) -> None:
        del self.rows[num_kept:]

    def copy_from(self, other: "Memory", num_tokens: int) -> None:
        self.rows = other.rows[:num_tokens]


class Recalling(WithoutModel):
    needs = Taps(is_normed=True)

    def __init__(self, setup: DraftSetup) -> None:
        self.num_bytes = setup.model.own_bytes

    def new_state(self, target: KVCache | None = None) -> Memory:
        return Memory(target)

    def observe(self, tokens: Sequence[int], state: Any) -> None:
        state.take()

    def propose(self, batch: Sequence[DraftText]) -> list[TokenTree]:
        return [self._tree(text) for text in batch]

    def _tree(self, text: DraftText) -> TokenTree:
        text.state.take()
        rows = text.state.rows
        if len(rows) < len(text.tokens) - 1 or len(rows) < 2 or text.shape.depth < 1:
            return root_alone(text.tokens)
        *before, last_D = rows
        like = int((torch.stack(before) - last_D).norm(dim=1).argmin())
        guesses = text.tokens[like + 2 : like + 2 + text.shape.depth]
        return TokenTree(chain(len(guesses)), torch.tensor([text.tokens[-1], *guesses]))

    def accepted(self, tree: TokenTree, path: Acceptance, sampler: Sampler, state: Any) -> None:
        pass


def open_proposer(setup: DraftSetup) -> Recalling:
    return Recalling(setup)
