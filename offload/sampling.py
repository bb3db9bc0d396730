"""From logits to tokens: temperature, top-k and top-p, and the two kinds of chance.

Shared noise: the target's token at an absolute position is argmax(log p + G), with Gumbel noise G keyed by (seed,
position, token). It is a draw from p, and it does not depend on how the position was reached; greedy is the case
without noise. A drafter that knows G ranks its candidates by log q + G and so guesses the draw itself, not merely a
likely token.

Fresh numbers: rules that test p(x) / q(x) need draws and coins of which nothing is known before. They come from a
counter-based generator whose place is (seed, how many numbers were taken so far).

Invariant: no fresh number is handed out twice, and none is a function of the shared noise; a ratio test on shared noise
is biased.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload.config import Drafting, Sampling
from offload.kernel_set import TWINS, KernelSet

_LEAST_KEPT, _KEPT_BYTES = 32, 32 << 20  # of noise: positions, which a tree has, and more where they are small
_LEAST_UNIFORM = 2.0**-54  # the generator's steps are 2^-53; it may give 0, of which there is no logarithm


class Sampler:
    """The drawing rule of one generation; the target and every drafter use the same one.

    Attributes:
        sampling: its settings.
        is_greedy: whether no chance enters at all.
        drafting: how drafters choose children, which the rule of verification decides.
        kernels: how noise and draws are made on a device.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        drafting: Drafting = Drafting.COUPLED,
        kernels: KernelSet = TWINS,
    ) -> None:
        self.kernels, self.sampling, self._vocab_size = kernels, sampling, vocab_size
        self.is_greedy, self.drafting = sampling.is_greedy, drafting
        self._warpers = _warpers(sampling)
        self._is_filtered = len(self._warpers) > 1  # by more than a temperature
        self._noise: dict[int, Tensor] = {}
        self._fresh = np.random.Generator(np.random.Philox(key=sampling.seed))
        self._num_rows_taken = 0

    def draw(self, logits_V: Tensor, position: int) -> int:
        """The token at `position`, given the target's logits there."""
        return int(self.perturbed(logits_V[None], position).argmax())

    @property
    def draws_rows(self) -> bool:
        """Whether many rows are better drawn at once than the few that a walk visits one by one.

        Where top-p or top-k are asked for they are not: every row would be sorted.
        """
        return self.kernels.match_rows is not None and not self._is_filtered

    def draw_rows(self, logits_NV: Tensor, position_N: Tensor) -> Tensor:
        """`draw` for many rows at once, each at its own position: tokens (int64, N) on the device of the logits."""
        draw = self.kernels.match_rows
        assert draw is not None and self.draws_rows, "rows are drawn one by one here"
        return draw(logits_NV, position_N, self.sampling.seed, temperature=self.sampling.temperature)

    def perturbed(self, logits_TV: Tensor, position: int | Sequence[int]) -> Tensor:
        """log p + G up to a constant per row; fp32 without noise.

        Args:
            position: of the token that each row predicts, or of all of them.
        """
        if self.is_greedy:
            return logits_TV
        scores_TV = self._warped(logits_TV)
        positions = [position] if isinstance(position, int) else position
        noise_TV = torch.stack([self._noise_at(one, scores_TV.device) for one in positions])
        return scores_TV + noise_TV[:, : scores_TV.shape[1]]

    def law(self, logits_TV: Tensor) -> Tensor:
        """The distributions that are drawn from, float32 (T, V); when greedy, all on the argmax (ties: lowest id)."""
        if self.is_greedy:
            return torch.nn.functional.one_hot(logits_TV.argmax(-1), logits_TV.shape[-1]).float()
        return self._warped(logits_TV).softmax(-1)

    def host_law(self, logits_V: Tensor) -> NDArray[np.float64]:
        """One row's distribution in host memory, to be calculated with in float64."""
        law_V = self.law(logits_V[None])[0].double().cpu().numpy()
        return law_V / law_V.sum()

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Fresh numbers in the open interval (0, 1)."""
        return np.maximum(self._fresh.random(shape), _LEAST_UNIFORM)

    def take_rows(self, num_rows: int) -> int:
        """Number of the first of so many rows of fresh hashed numbers; no row is handed out twice."""
        self._num_rows_taken += num_rows
        return self._num_rows_taken - num_rows

    def _warped(self, logits_TV: Tensor) -> Tensor:
        nothing = torch.empty(len(logits_TV), 0, dtype=torch.long)
        return self._warpers(nothing, logits_TV.float())

    def _noise_at(self, position: int, device: torch.device) -> Tensor:
        """One vector per position, shared by all rows; positions only advance, so the oldest go first."""
        if position not in self._noise:
            if len(self._noise) >= max(_LEAST_KEPT, _KEPT_BYTES // (8 * self._vocab_size)):
                del self._noise[min(self._noise)]
            self._noise[position] = self.kernels.keyed_gumbel(self.sampling.seed, position, self._vocab_size, device)
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
