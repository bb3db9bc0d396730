"""What draft heads with files of their own have in common: states mixed by `fc`, and fewer words.

Invariant: of a head with fewer words than the target, those that it has not are ruled out.

Shape letters, in this file only: W words that a head scores, or the width of all states tapped.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offload.checkpoint.carried import MIXER
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.heads import WORD_TYPES
from offload.checkpoint.tensors import TensorEntry
from offload.drafting.model_drafter import ModelDrafter
from offload.errors import UserError
from offload.model.carried_model import CarriedModel, add_mixer
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart


class HeadModel(CarriedModel):
    """A head, between the target's table and its own matrix of scores, or the target's."""

    def __init__(self, checkpoint: Checkpoint, *given: Any, **bound: Any) -> None:
        super().__init__(checkpoint, *given, **bound)
        ids = self._carried.ids
        self._id_W = None if ids is None else self.send(_word_ids(checkpoint, ids))
        self.vocab_size = int(checkpoint.config["vocab_size"])

    def forward_parts(self, parts: Sequence[BatchPart], *, num_logits: int = 0) -> Tensor:
        """See `TreeModel`; scores are as wide as the target's."""
        return self.widened(super().forward_parts(parts, num_logits=num_logits), -torch.inf)

    def widened(self, scores_TW: Tensor, outside: float) -> Tensor:
        """Return numbers (T, V) of all of the target's words; those that a head lacks get one."""
        if self._id_W is None:
            return scores_TW
        wide_TV = scores_TW.new_full((len(scores_TW), self.vocab_size), outside)
        return wide_TV.index_copy_(1, self._id_W, scores_TW)

    def _new_mixer(self, decoder: Any) -> nn.Module:
        """Return a function from states (T, W) to (T, D), and let layers read its result."""
        raise NotImplementedError

    def _adapt(self, meta_model: Any) -> None:
        decoder = meta_model.get_decoder()
        add_mixer(decoder, self._new_mixer(decoder))
        scores = self.checkpoint.tensors.get("lm_head.weight")
        if scores is not None:
            head = meta_model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.new_empty(scores.shape), requires_grad=False)
            head.out_features = scores.shape[0]

    @torch.inference_mode()
    def _encode(self, tapped_TW: Tensor) -> Tensor:
        fed_TD: Tensor = self._mixer(tapped_TW)
        return fed_TD


def mixer_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what mixes, by its parts' names."""
    return {
        name.removeprefix(MIXER): entry.shape
        for name, entry in checkpoint.tensors.items()
        if name.startswith(MIXER)
    }


def stored_numbers(checkpoint: Checkpoint, entry: TensorEntry) -> NDArray[np.int64]:
    """Return a vector of whole numbers as files have it; shorter where a file ends before."""
    path = checkpoint.shards[entry.shard]
    dtype = WORD_TYPES[entry.dtype]
    return np.fromfile(path, dtype, entry.shape[0], offset=entry.lo).astype(np.int64)


def score_apart(
    drafter: ModelDrafter, tokens: Sequence[int], start: int, state: KVCache
) -> Iterator[Tensor]:
    """Yield logits (1, V), see `Proposer`: each from a pass of its own, as drafts without a chain need."""
    state.clear()
    for end in range(max(start, 2), len(tokens)):
        yield drafter._draft(state).catch_up(tokens[:end])


def empty_linear(
    num_inputs: int, num_outputs: int, dtype: torch.dtype, *, has_bias: bool = False
) -> nn.Linear:
    """Return a product that has no weights yet."""
    return nn.Linear(num_inputs, num_outputs, bias=has_bias, device="meta", dtype=dtype)


def _word_ids(checkpoint: Checkpoint, entry: TensorEntry) -> Tensor:
    """Return the target's ids of the scored words. Raises `UserError` for invalid ids."""
    step_W = stored_numbers(checkpoint, entry)
    id_W = step_W + np.arange(len(step_W))
    num_words = int(checkpoint.config["vocab_size"])
    is_rising = len(id_W) == entry.shape[0] and bool((np.diff(id_W) > 0).all())
    if not is_rising or id_W[0] < 0 or id_W[-1] >= num_words:
        requirement = f"{checkpoint.name}: d2t must lead to rising ids below {num_words}"
        raise UserError(f"{requirement}, it does not: take a head that is whole")
    return torch.from_numpy(id_W)
