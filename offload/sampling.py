"""From logits to tokens: temperature, top-k and top-p, and noise that both models share.

The target's token at an absolute position is argmax(log p + G), with Gumbel noise G keyed by (seed, position, token).
It is a draw from p, and it does not depend on how the position was reached; greedy is the case without noise. A drafter
that knows G ranks its candidates by log q + G and so guesses the draw itself, not merely a likely token.
"""

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload.config import Sampling
from offload.kernels.keyed_gumbel import keyed_gumbel

_KEPT_POSITIONS = 256  # a tree's depth and then some


class Sampler:
    """The drawing rule of one generation; the target and every drafter use the same one."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._sampling, self._vocab_size = sampling, vocab_size
        self._warpers = _warpers(sampling)
        self._noise: dict[int, Tensor] = {}

    def draw(self, logits_V: Tensor, position: int) -> int:
        """The token at `position`, given the target's logits there."""
        return int(self.perturbed(logits_V[None], position).argmax())

    def perturbed(self, logits_TV: Tensor, position: int) -> Tensor:
        """log p + G up to a constant per row, for rows that all predict the token at `position`; fp32 without noise."""
        if self._sampling.is_greedy:
            return logits_TV
        nothing = torch.empty(len(logits_TV), 0, dtype=torch.long)
        scores_TV = self._warpers(nothing, logits_TV.float())
        return scores_TV + self._noise_at(position, scores_TV.device)[: scores_TV.shape[1]]

    def _noise_at(self, position: int, device: torch.device) -> Tensor:
        """One vector per position, shared by all rows; positions only advance, so the oldest go first."""
        if position not in self._noise:
            if len(self._noise) >= _KEPT_POSITIONS:
                del self._noise[min(self._noise)]
            self._noise[position] = keyed_gumbel(self._sampling.seed, position, self._vocab_size, device)
        return self._noise[position]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """The adjustments in the order in which transformers applies them."""
    warpers = LogitsProcessorList()
    if not sampling.is_greedy:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
