"""One generation under way: bursts of accepted tokens become text, until something ends it.

A sweep accepts several tokens at once, so the end (an end-of-sequence token, a stop string, the wanted length) may lie
inside a burst; what was accepted beyond it is dropped and never counted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from offload.calibration.kernel_comparison import Outcome, rows_of
from offload.config import Sampling
from offload.engine.text import TextStream
from offload.machine import peak_rss_bytes
from offload.memory.plan import MemoryPlan
from offload.planning.tree_policy import TreeChoice
from offload.stats import Stats

FinishReason = Literal["stop", "length", "interrupted"]


class Setup(NamedTuple):
    """How a text is written: all of a result that is known before its first token."""

    sampling: Sampling
    rule: str
    plan: MemoryPlan
    tree_choice: TreeChoice
    comparisons: tuple[Outcome, ...]  # of kernels, where it runs on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The result: new tokens only, without the prompt."""

    token_ids: list[int]  # that of the end included, where the model ended the text
    text: str  # up to a stop string, or to the end that the model set
    finish_reason: FinishReason  # "stop": the model's end or a stop string; "length": as many tokens as were asked for
    sampling: Sampling
    rule: str
    stats: Stats = field(repr=False)
    plan: MemoryPlan = field(repr=False)
    tree_choice: TreeChoice = field(repr=False)
    comparisons: tuple[Outcome, ...] = field(repr=False)  # of kernels, where it ran on a GPU

    def as_dict(self) -> dict[str, object]:
        """The object that `offload generate --json` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "num_prompt_tokens": self.stats.num_prompt_tokens,
            "num_new_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.sampling.seed,
            "rule": self.rule,
            "plan": self.plan.as_dict(),
            "tree_choice": self.tree_choice.as_dict(),
            **({"kernels": rows_of(self.comparisons)} if self.comparisons else {}),
            "stats": self.stats.as_dict(),
        }


class Run:
    """Iterate to get pieces of text as they are accepted; `result()` tells at any time what there is so far.

    A run that was left or interrupted goes on when it is iterated again; one that is finished gives nothing more.

    Args:
        step: takes the committed tokens, returns those that one more sweep has accepted.
        setup: for the result.
        end_ids: tokens that end the sequence; they are part of it but not of its text.
        stats: filled by `step` and here.
    """

    def __init__(
        self,
        step: Callable[[list[int]], list[int]],
        prompt_ids: Sequence[int],
        text: TextStream,
        setup: Setup,
        *,
        max_new_tokens: int,
        end_ids: frozenset[int],
        stats: Stats,
    ) -> None:
        self._step, self._text, self._setup = step, text, setup
        self._max_new_tokens, self._end_ids, self._stats = max_new_tokens, end_ids, stats
        self._prompt_ids = list(prompt_ids)
        self._new_ids: list[int] = []
        self.finish_reason: FinishReason = "interrupted"
        self._elapsed_s = 0.0
        stats.num_prompt_tokens = len(prompt_ids)

    @property
    def tree_choice(self) -> TreeChoice:
        """The tree of this run, and why."""
        return self._setup.tree_choice

    def __iter__(self) -> Iterator[str]:
        started = time.perf_counter() - self._elapsed_s
        while self.finish_reason == "interrupted" and len(self._new_ids) < self._max_new_tokens:
            num_before = len(self._new_ids)
            piece = self._take(self._step(self._prompt_ids + self._new_ids))
            self._count(len(self._new_ids) - num_before, time.perf_counter() - started)
            yield piece
        if self.finish_reason == "interrupted":
            self.finish_reason = "length"
            yield self._text.finish()

    def result(self) -> Generation:
        """What has been generated so far."""
        self._stats.num_new_tokens, self._stats.peak_rss_bytes = len(self._new_ids), peak_rss_bytes()
        return Generation(
            token_ids=list(self._new_ids),
            text=self._text.text if self.finish_reason == "stop" else self._text.whole(),
            finish_reason=self.finish_reason,
            stats=self._stats,
            **self._setup._asdict(),
        )

    def _take(self, burst: list[int]) -> str:
        """Add what counts of a burst, and note if the text stops in it; returns its piece of the text."""
        burst = burst[: self._max_new_tokens - len(self._new_ids)]
        end = next((index for index, token in enumerate(burst) if token in self._end_ids), None)
        burst = burst if end is None else burst[: end + 1]
        piece, has_stopped = self._text.push(burst if end is None else burst[:-1])
        self._new_ids = self._text.tokens if has_stopped else self._new_ids + burst
        if has_stopped or end is not None:
            self.finish_reason = "stop"
        return piece + (self._text.finish() if end is not None and not has_stopped else "")

    def _count(self, num_accepted: int, elapsed_s: float) -> None:
        self._elapsed_s = elapsed_s
        if self._stats.num_first_tokens == 0:
            self._stats.begin_decoding(num_accepted, elapsed_s)
        else:
            self._stats.accepted_per_sweep.append(num_accepted)
            self._stats.decode_s = elapsed_s - self._stats.ttft_s
