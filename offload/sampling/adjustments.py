"""Penalties and biases: changes of logits by a text's own past, before anything is drawn.

A row of a tree has a past of its own: the committed tokens, then those of its path. Draft and
target adjust their logits by the same past, so guesses stay as good as they were, and any rule is
exact for the adjusted target.

Invariant: a row's adjusted logits depend on its past alone, bit for bit, and not on which part of
it is committed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from offload.sampling_options import Sampling

Send = Callable[[Tensor], Tensor]


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged, for logits on the host."""
    return tensor


class Adjustment(Protocol):
    """A change of logits, and what it remembers of one text."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text with these tokens; the one before is forgotten."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Note that the text continues with these tokens."""

    def adjust(self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send) -> Tensor:
        """Return adjusted logits, float32; the given ones are never changed.

        Args:
            paths: for every row the tokens behind the accepted ones, down to the row itself; they
                may be any tokens.
            send: brings a tensor of the host to where logits are.
        """

    @property
    def is_over(self) -> bool:
        """Whether the text ends here: nothing may follow, and no token says so."""


class Penalties:
    """The biases and penalties of `Sampling`, in this order.

    A bias is added, as transformers' `SequenceBiasLogitsProcessor` does. Tokens of the prompt or
    the new text then have positive logits divided and others multiplied by the repeat penalty, as
    its `RepetitionPenaltyLogitsProcessor` does. At last a token that is new text `num` times loses
    num * frequency + (num > 0) * presence, as OpenAI documents it. Tokens of the past are few
    beside the vocabulary, so only theirs are looked at.
    """

    is_over = False

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        pairs = dict(sampling.logit_bias)
        self._biased_C = torch.tensor([*pairs], dtype=torch.long)
        self._bias_C = torch.tensor([*pairs.values()])
        self.begin(())

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Count the prompt's tokens as seen, but not as new."""
        self._num_new = Counter[int](
            dict.fromkeys(prompt_ids, 0) if self._sampling.repeat_penalty != 1 else {}
        )
        # `_num_new` as tensors, made when they are asked for
        self._said_C: Tensor | None = None
        self._num_C = torch.empty(0, dtype=torch.long)

    def accept(self, tokens: Sequence[int]) -> None:
        """Count each token as seen and new."""
        self._num_new.update(tokens)
        self._said_C = None

    def adjust(
        self, logits_TV: Tensor, paths: Sequence[Sequence[int]], send: Send = unchanged
    ) -> Tensor:
        """Return biased and penalised logits, see `Adjustment`."""
        scores_TV = logits_TV.to(torch.float32, copy=True)
        scores_TV[:, send(self._biased_C)] += send(self._bias_C)
        if self._said_C is None:
            self._said_C = torch.tensor([*self._num_new], dtype=torch.long)
            self._num_C = torch.tensor([*self._num_new.values()], dtype=torch.long)
        said_C = send(self._said_C)
        row_R, token_R, num_R = self._on_paths(paths)
        at_R = (send(row_R), send(token_R))
        # taken from the scores before these are penalised
        on_paths_R = self._penalised(scores_TV[at_R], send(self._lost(num_R)))
        scores_TV[:, said_C] = self._penalised(scores_TV[:, said_C], send(self._lost(self._num_C)))
        scores_TV[at_R] = on_paths_R
        return scores_TV

    def _on_paths(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, the distinct tokens of their paths, and how often each is new by then."""
        counts = [
            (row, token, self._num_new[token] + num)
            for row, path in enumerate(paths)
            for token, num in Counter(path).items()
        ]
        row_R, token_R, num_R = torch.tensor(counts, dtype=torch.long).view(-1, 3).unbind(1)
        return row_R, token_R, num_R

    def _penalised(self, scores: Tensor, lost_C: Tensor) -> Tensor:
        """Return the scores (..., C) of seen tokens, less `lost_C` for being new text."""
        sampling = self._sampling
        return (
            torch.where(
                scores < 0, scores * sampling.repeat_penalty, scores / sampling.repeat_penalty
            )
            - lost_C
        )

    def _lost(self, num_C: Tensor) -> Tensor:
        """Return the penalties of tokens, by their counts in the new text."""
        sampling = self._sampling
        return (
            num_C.double() * sampling.frequency_penalty + (num_C > 0) * sampling.presence_penalty
        ).float()
