"""From logits to tokens: what a text's own past changes, temperature, top-k, top-p and min-p, and
two kinds of chance.

Shared noise: the target's token at an absolute position is argmax(log p + G), with Gumbel noise G
keyed by (seed, position, token). It is a draw from p that does not depend on how the position was
reached; greedy is the case without noise. A drafter that ranks its candidates by log q + G guesses
the draw itself, not merely a likely token.

Fresh numbers: rules that test p(x) / q(x) need draws and coins of which nothing is known before.
They come from a counter-based generator whose place is (seed, how many numbers were taken so far).

Invariant: no fresh number is handed out twice, and none is a function of the shared noise; a ratio
test on shared noise is biased.

Logits of a tree's nodes, a chunk of rows at a time: those of 768 rows and 128,000 tokens take 200
MB in bf16.

A walk down a tree looks at a handful of rows. So the last hidden states of all nodes are kept,
which are small, and the head is applied to the chunk with the node that is looked at. Invariant: at
most one chunk is held, and it is let go before the next one is computed; since a path's nodes lie
behind one another, none is computed twice.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

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

from offload.errors import UserError
from offload.kernels.registry import REFERENCES, KernelSet
from offload.sampling.adjustments import Adjustment, Penalties
from offload.units import NOISE_POSITIONS, ChildSampling, Sampling


class Logits:
    """Scores of N nodes, at most `max_rows` at once: the first chunk is given, `score` computes
    rows [lo, hi).
    """

    def __init__(
        self, num_rows: int, max_rows: int, first_CV: Tensor, score: Callable[[int, int], Tensor]
    ) -> None:
        assert len(first_CV) == min(num_rows, max_rows), (
            f"{len(first_CV)} rows scored, {num_rows} in all"
        )
        self._num_rows = num_rows
        self._max_rows = max_rows
        self._score = score
        self._lo = 0
        self._chunk_CV = first_CV

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, node: int) -> Tensor:
        lo, chunk_CV = self.chunk_with(node)
        return chunk_CV[node - lo]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[node] for node in range(len(self)))

    def chunk_with(self, node: int) -> tuple[int, Tensor]:
        """The chunk in which a node lies: its first row, and its logits (C, V)."""
        assert 0 <= node < len(self), f"node {node} of {len(self)}"
        lo = node - node % self._max_rows
        if lo != self._lo:
            del self._chunk_CV
            self._lo, self._chunk_CV = lo, self._score(lo, min(lo + self._max_rows, len(self)))
        return self._lo, self._chunk_CV

    def part(self, lo: int, hi: int) -> "Logits":
        """Rows [lo, hi), such as one text's among several, over the same chunks."""
        return _Part(self, lo, hi)

    def whole(self) -> Tensor:
        """All of them, (N, V), for whoever has the room."""
        return torch.cat([self.chunk_with(lo)[1] for lo in range(0, len(self), self._max_rows)])


class _Part(Logits):
    """Some rows of others."""

    def __init__(self, whole: Logits, lo: int, hi: int) -> None:
        assert 0 <= lo <= hi <= len(whole), f"rows {lo} to {hi} of {len(whole)}"
        self._whole, self._first, self._num_rows, self._max_rows = (
            whole,
            lo,
            hi - lo,
            whole._max_rows,
        )

    def chunk_with(self, node: int) -> tuple[int, Tensor]:
        assert 0 <= node < len(self), f"node {node} of {len(self)}"
        lo, chunk_CV = self._whole.chunk_with(self._first + node)
        first = max(lo, self._first)
        last = min(lo + len(chunk_CV), self._first + len(self))
        return first - self._first, chunk_CV[first - lo : last - lo]

    def whole(self) -> Tensor:
        return torch.stack(list(self))


class AdjustedRows:
    """Rows of which each is adjusted when it is looked at, as `adjust` says by node and logits (V)."""

    def __init__(self, rows: "Rows", adjust: Callable[[int, Tensor], Tensor]) -> None:
        self._rows = rows
        self._adjust = adjust

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, node: int) -> Tensor:
        return self._adjust(node, self._rows[node])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[node] for node in range(len(self)))

    def chunk_with(self, node: int) -> tuple[int, Tensor]:
        """The row alone: others may never be looked at."""
        return node, self[node][None]


# what a rule verifies by: logits (N, V), or such as are computed on the way
Rows = Tensor | Logits | AdjustedRows


def chunk_with(logits: Rows, node: int) -> tuple[int, Tensor]:
    """See `Logits.chunk_with`; a tensor is one chunk."""
    return (0, logits) if isinstance(logits, Tensor) else logits.chunk_with(node)


NOT_NUMBERS = (
    "a model's scores are not finite numbers, its values exceed the type that it computes in or its weights are damaged"
    ": try `dtype` bfloat16 or float32, or see with `offload verify` what is damaged"
)
NO_TOKEN = -1  # in place of a token that was drawn from scores that are not finite
_NO_IDS = torch.empty(1, 0, dtype=torch.long)  # of the text so far, which no warper looks at
# the generator's steps are 2^-53; it may give 0, of which there is no logarithm
_LEAST_UNIFORM = 2.0**-54


class TreePaths(Protocol):
    """A tree of tokens."""

    def path(self, node: int) -> Sequence[int]:
        """The tokens from below the root down to a node."""


class Sampler:
    """The drawing rule of one generation; the target and every drafter use the same one.

    Args:
        drafting: how drafters choose children, which the rule of verification decides.
        kernels: how noise and draws are made on a device.
        send: brings small tensors to where scores are; it may be faster than a copy.
        adjustments: to logits, behind the penalties of `sampling`.
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
    ) -> None:
        self.kernels = kernels
        self.sampling = sampling
        self._vocab_size = vocab_size
        self.is_greedy = sampling.is_greedy
        self.drafting = drafting
        self._send_by = send
        self._warpers = _warpers(sampling)
        self._is_filtered = len(self._warpers) > 1  # by more than a temperature
        self._noise: dict[int, Tensor] = {}
        self._fresh = np.random.Generator(np.random.Philox(key=sampling.seed))
        self._num_rows_taken = 0
        self._adjustments: list[Adjustment] = [Penalties(sampling)] if sampling.is_adjusted else []
        self._adjustments += adjustments
        self._prompt_ids: Sequence[int] = ()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A text begins with these tokens, and has none of its own."""
        self._prompt_ids = prompt_ids
        for adjustment in self._adjustments:
            adjustment.begin(prompt_ids)

    def accept(self, tokens: Sequence[int]) -> int:
        """The text goes on with these, up to where it is over; returns how many that are."""
        for count, token in enumerate(tokens if self.is_adjusted else ()):
            if self.is_over:
                return count
            for adjustment in self._adjustments:
                adjustment.accept([token])
        return len(tokens)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow the text so far, and the model has no token to say so."""
        return any(adjustment.is_over for adjustment in self._adjustments)

    def cut(self, new_ids: Sequence[int]) -> None:
        """Of the text's own tokens these are left."""
        self.begin(self._prompt_ids)
        self.accept(new_ids)

    def draw(self, logits_V: Tensor, position: int) -> int:
        """The token at `position`, given the logits there. Raises `UserError` where the largest is
        not finite.
        """
        scores_1V = self.perturbed(logits_V[None], position)
        return require_token(int(or_no_token(scores_1V.argmax(1), scores_1V)))

    @property
    def draws_rows(self) -> bool:
        """Whether many rows are better drawn at once: not where filters or adjustments would take
        each of them long.
        """
        return (
            self.kernels.match_rows is not None and not self._is_filtered and not self.is_adjusted
        )

    def draw_rows(self, logits_NV: Tensor, position_N: Tensor) -> Tensor:
        """`draw` for many rows, each at its own position: int64 (N), on the device; `NO_TOKEN`
        where none can be.
        """
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
        """A small tensor of the host where these scores are: a plain copy would wait for layers
        that are queued.
        """
        return tensor.to(scores.device) if self._send_by is None else self._send_by(tensor)

    def perturbed(self, logits_TV: Tensor, position: int | Sequence[int]) -> Tensor:
        """log p + G up to a constant per row, float64, for a token at one position or one per row;
        greedy: logits.
        """
        if self.is_greedy:
            return logits_TV
        scores_TV = self._warped(logits_TV)
        place = logits_TV.device
        if isinstance(position, int):
            noise = self._noise_at(position, place)
        else:
            noise = torch.stack([self._noise_at(one, place) for one in position])
        # a sum of mixed types takes longer
        return scores_TV.double().add_(noise[..., : scores_TV.shape[1]])

    def distribution(self, logits_TV: Tensor) -> Tensor:
        """What is drawn from, float32 (T, V): all on the first argmax when greedy, NaN where the
        logits are no use.
        """
        if self.is_greedy:
            probs_TV = torch.nn.functional.one_hot(
                logits_TV.argmax(-1), logits_TV.shape[-1]
            ).float()
            return probs_TV.masked_fill_(_lack_numbers(logits_TV)[:, None], torch.nan)
        return self._warped(logits_TV).softmax(-1)

    def host_distribution(self, logits_V: Tensor) -> NDArray[np.float64]:
        """One row's distribution in host memory, to be calculated with in float64. Raises as `draw`
        does.
        """
        probs_V = self.distribution(logits_V[None])[0].double().cpu().numpy()
        return probs_V / require_number(probs_V.sum())

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Fresh numbers in the open interval (0, 1)."""
        return np.maximum(self._fresh.random(shape), _LEAST_UNIFORM)

    def take_rows(self, num_rows: int) -> int:
        """Number of the first of so many rows of fresh hashed numbers; no row is handed out twice."""
        self._num_rows_taken += num_rows
        return self._num_rows_taken - num_rows

    @property
    def is_adjusted(self) -> bool:
        """Whether logits depend on what the text has said before, or are biased."""
        return bool(self._adjustments)

    def adjusted(self, logits_TV: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits after whatever looks at a text's own past, float32; the same tensor where nothing
        does.

        Args:
            paths: for every row the tokens behind the committed ones, down to the row itself; none
                for the root.
        """
        for adjustment in self._adjustments:
            logits_TV = adjustment.adjust(logits_TV, paths, partial(self.send, scores=logits_TV))
        return logits_TV

    def adjusted_rows(self, tree: TreePaths, logits: Rows) -> Rows:
        """The same for the nodes of a tree, each when it is looked at."""
        if not self.is_adjusted:
            return logits
        return AdjustedRows(
            logits, lambda node, logits_V: self.adjusted(logits_V[None], [tree.path(node)])[0]
        )

    def _warped(self, logits_TV: Tensor) -> Tensor:
        scores_TV = logits_TV.float()
        for warp in self._warpers:
            scores_TV = warp(_NO_IDS, scores_TV)
        return scores_TV

    def _noise_at(self, position: int, device: torch.device) -> Tensor:
        """One vector per position, shared by all rows; positions only advance, so the oldest go
        first.
        """
        if position not in self._noise:
            if len(self._noise) >= NOISE_POSITIONS:
                del self._noise[min(self._noise)]
            self._noise[position] = self.kernels.keyed_gumbel(
                self.sampling.seed, position, self._vocab_size, device
            )
        return self._noise[position]


def or_no_token(token_T: Tensor, scores_TV: Tensor) -> Tensor:
    """The tokens that were drawn from these scores, `NO_TOKEN` where nothing can be; the host looks
    at neither.
    """
    return token_T.masked_fill(_lack_numbers(scores_TV), NO_TOKEN)


def require_token(token: int) -> int:
    """The same token; what is drawn from NaN or infinity is nonsense. Raises `UserError` for
    `NO_TOKEN`.
    """
    if token == NO_TOKEN:
        raise UserError(NOT_NUMBERS)
    return token


def require_number(value: float) -> float:
    """The same value, which comes from a model's scores. Raises `UserError` for NaN."""
    if math.isnan(value):
        raise UserError(NOT_NUMBERS)
    return value


def _lack_numbers(scores_TV: Tensor) -> Tensor:
    """Which rows have no largest number: a NaN is the largest of its row, infinity hides the
    largest.
    """
    return scores_TV.amax(1).isfinite().logical_not_()


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """What filters a distribution, in the order of transformers."""
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
