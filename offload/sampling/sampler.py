"""From logits to tokens: penalties, temperature, top-k, top-p and min-p, and two kinds of chance.

Shared noise: the target's token at an absolute position is argmax(log p + G), with Gumbel noise G
keyed by (seed, position, token). It is a draw from p that does not depend on how the position was
reached; greedy is the case without noise. A drafter that ranks its candidates by log q + G guesses
the draw itself, not merely a likely token.

Fresh numbers: rules that test p(x) / q(x) need draws and coins of which nothing is known before.
They come from a counter-based generator whose place is (seed, how many numbers were taken so far).

Invariant: no fresh number is handed out twice, and none is a function of the shared noise; a ratio
test on shared noise is biased.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload.errors import HostFault, UserError
from offload.kernels.registry import REFERENCES, KernelSet
from offload.rules import ChildSampling
from offload.sampling.adjustments import Adjustment, Penalties
from offload.sampling.logits import AdjustedRows, Rows
from offload.sampling_options import NOISE_POSITIONS, Sampling

NOT_NUMBERS = (
    "a model's scores are not finite numbers, its values exceed the type that it computes in or its weights are damaged"
    ': try `dtype="float32"`, or see with `offload verify` what is damaged'
)
# stands for a token drawn from scores that are not finite
NO_TOKEN = -1
# in place of the text so far, which no warper reads
_NO_IDS = torch.empty(1, 0, dtype=torch.long)
# the generator's steps are 2^-53; it may give 0, which has no logarithm
_LEAST_UNIFORM = 2.0**-54


class Sampler:
    """The drawing rule of one generation; the target and every drafter use the same one.

    Args:
        drafting: how drafters choose children, which the rule of verification decides.
        kernels: how noise and draws are made on a device.
        send: brings small tensors to where scores are; it may be faster than a copy.
        adjustments: of logits, after the penalties of `sampling`.
        earlier: adjustments before the penalties.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        drafting: ChildSampling = ChildSampling.COUPLED,
        kernels: KernelSet = REFERENCES,
        send: Callable[[Tensor], Tensor] | None = None,
        *,
        adjustments: Iterable[Adjustment] = (),
        earlier: Iterable[Adjustment] = (),
    ) -> None:
        self.kernels = kernels
        self.sampling = sampling
        self._vocab_size = vocab_size
        self.is_greedy = sampling.is_greedy
        self.drafting = drafting
        self._send_by = send
        self._warpers = _warpers(sampling)
        # whether settings other than a temperature change the scores
        self._is_filtered = len(self._warpers) > 1
        self._noise: dict[int, Tensor] = {}
        self._fresh = np.random.Generator(np.random.Philox(key=sampling.seed))
        self._num_rows_taken = 0
        self._adjustments: list[Adjustment] = [*earlier]
        self._adjustments += [Penalties(sampling)] if sampling.is_adjusted else []
        self._adjustments += adjustments
        self._prompt_ids: Sequence[int] = ()
        # tokens of the text's own, and those that were accepted in vain
        self.num_accepted = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text with these prompt tokens."""
        self._prompt_ids = prompt_ids
        self.num_accepted = 0
        for adjustment in self._adjustments:
            adjustment.begin(prompt_ids)

    def accept(self, tokens: Sequence[int]) -> int:
        """Append accepted tokens; return the number that counts before the text is over.

        Raises `UserError` if not even the first may follow; a later one is reported by the next
        step.
        """
        if not self.is_adjusted:
            self.num_accepted += len(tokens)
            return len(tokens)
        for count, token in enumerate(tokens):
            if self.is_over:
                return count
            self.num_accepted += 1
            try:
                for adjustment in self._adjustments:
                    adjustment.accept([token])
            except UserError:
                if count == 0:
                    raise
                return count
        return len(tokens)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow the text so far, and the model has no token to say so."""
        return any(adjustment.is_over for adjustment in self._adjustments)

    def cut(self, new_ids: Sequence[int]) -> None:
        """Keep only these of the text's own tokens."""
        self.begin(self._prompt_ids)
        self.accept(new_ids)

    def draw(self, logits_V: Tensor, position: int) -> int:
        """Return the token at `position` by its logits (V). Raises `UserError` if not finite."""
        return require_token(self.token_at(logits_V, position))

    def token_at(self, logits_V: Tensor, position: int) -> int:
        """Return the drawn token, or `NO_TOKEN`."""
        scores_1V = self.perturbed(logits_V[None], position)
        return int(or_no_token(scores_1V.argmax(1), scores_1V))

    @property
    def draws_rows(self) -> bool:
        """Whether many rows are better drawn at once: not if each takes long by itself."""
        return (
            self.kernels.match_rows is not None and not self._is_filtered and not self.is_adjusted
        )

    def draw_rows(self, logits_NV: Tensor, position_N: Tensor) -> Tensor:
        """Draw rows at their own positions: int64 (N), on the device; `NO_TOKEN` for no numbers."""
        draw = self.kernels.match_rows
        assert draw is not None and self.draws_rows, "rows are drawn one by one here"
        token_N = draw(
            logits_NV,
            self.send(position_N, logits_NV),
            self.sampling.seed,
            temperature=self.sampling.temperature,
        )
        return or_no_token(token_N, logits_NV)

    def send(self, tensor: Tensor, scores: Tensor) -> Tensor:
        """Return a host tensor on the device of the scores; a copy would wait for queued layers."""
        return tensor.to(scores.device) if self._send_by is None else self._send_by(tensor)

    def perturbed(self, logits_TV: Tensor, position: int | Sequence[int]) -> Tensor:
        """Return log p + G except for a constant per row, float64; the logits when greedy."""
        if self.is_greedy:
            return logits_TV
        scores_TV = self._warped(logits_TV)
        device = logits_TV.device
        if isinstance(position, int):
            noise = self._noise_at(position, device)
        else:
            noise = torch.stack([self._noise_at(index, device) for index in position])
        # a sum of mixed types takes longer
        return scores_TV.double().add_(noise[..., : scores_TV.shape[1]])

    def distribution(self, logits_TV: Tensor) -> Tensor:
        """Return distributions to draw from, float32 (T, V), the first argmax when greedy; may be NaN."""
        if self.is_greedy:
            probs_TV = torch.nn.functional.one_hot(
                logits_TV.argmax(-1), logits_TV.shape[-1]
            ).float()
            return probs_TV.masked_fill_(_lack_numbers(logits_TV)[:, None], torch.nan)
        return self._warped(logits_TV).softmax(-1)

    def host_distribution(self, logits_V: Tensor) -> NDArray[np.float64]:
        """Return one row's distribution in host memory, float64. Raises as `draw` does."""
        probs_V = self.distribution(logits_V[None])[0].double().cpu().numpy()
        return probs_V / require_number(probs_V.sum())

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Return fresh numbers in the open interval (0, 1)."""
        return np.maximum(self._fresh.random(shape), _LEAST_UNIFORM)

    def take_rows(self, num_rows: int) -> int:
        """Return the first of `num_rows` rows of fresh hashed numbers; none is given twice."""
        self._num_rows_taken += num_rows
        return self._num_rows_taken - num_rows

    @property
    def is_adjusted(self) -> bool:
        return bool(self._adjustments)

    def adjusted(self, logits_TV: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return float32 logits adjusted by the text's past, or the given ones without adjustments.

        `paths` are each row's tokens behind the committed ones, itself included; none for the root.
        """
        for adjustment in self._adjustments:
            logits_TV = adjustment.adjust(logits_TV, paths, partial(self.send, scores=logits_TV))
        return logits_TV

    def adjusted_rows(self, path: Callable[[int], Sequence[int]], logits: Rows) -> Rows:
        """Return the adjusted rows of a tree's nodes, each computed when it is read.

        `path` gives the tokens from below the root down to a node.
        """
        if not self.is_adjusted:
            return logits
        return AdjustedRows(
            logits, lambda node, logits_V: self.adjusted(logits_V[None], [path(node)])[0]
        )

    def _warped(self, logits_TV: Tensor) -> Tensor:
        scores_TV = logits_TV.float()
        for warp in self._warpers:
            scores_TV = warp(_NO_IDS, scores_TV)
        return scores_TV

    def _noise_at(self, position: int, device: torch.device) -> Tensor:
        """Return a position's noise, for all rows; positions advance, so the oldest go first."""
        if position not in self._noise:
            if len(self._noise) >= NOISE_POSITIONS:
                del self._noise[min(self._noise)]
            self._noise[position] = self.kernels.keyed_gumbel(
                self.sampling.seed, position, self._vocab_size, device
            )
        return self._noise[position]


def or_no_token(token_T: Tensor, scores_TV: Tensor) -> Tensor:
    """Return tokens drawn from these scores, or `NO_TOKEN`, without waiting for the device."""
    return token_T.masked_fill(_lack_numbers(scores_TV), NO_TOKEN)


def require_token(token: int) -> int:
    """Return the token. Raises `UserError` for `NO_TOKEN`, drawn from NaN or infinity."""
    if token == NO_TOKEN:
        raise HostFault(NOT_NUMBERS)
    return token


def require_number(value: float) -> float:
    """Return the value, which comes from a model's scores. Raises `UserError` for NaN."""
    if math.isnan(value):
        raise HostFault(NOT_NUMBERS)
    return value


def _lack_numbers(scores_TV: Tensor) -> Tensor:
    """Return which rows have no largest number: NaN and infinity hide it."""
    return scores_TV.amax(1).isfinite().logical_not_()


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """Return the filters of a distribution, in the order of transformers."""
    warpers: list[LogitsProcessor] = []
    if not sampling.is_greedy:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
