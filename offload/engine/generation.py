"""One generation under way: bursts of accepted tokens become text, until something ends it.

A sweep accepts several tokens at once, so the end (an end-of-sequence token, a stop string, the
wanted length) may lie inside a burst; what was accepted beyond it is dropped and never counted.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from offload.calibration.trial import ComparisonOutcome, rows_of
from offload.engine.sequence import StepMetrics, TokenLogprob, TokenSequence
from offload.engine.text_stream import TextStream, plain_text
from offload.engine.token_decoder import TokenDecoder
from offload.machine import peak_rss_bytes
from offload.memory.plan import MemoryPlan
from offload.planning.choice import TreeChoice
from offload.sampling_options import Sampling
from offload.stats import Stats

_TEXT_SHOWN = 60  # characters of a text in the repr of a result
# the result of an unfinished run is "interrupted"
FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Generation:
    """The result: new tokens only, without the prompt."""

    token_ids: list[int]  # that of the end included, where the model ended the text
    text: str  # up to a stop string, or to the end that the model set
    # "stop": the model's end or a stop string; "length": as many tokens as were asked for
    finish_reason: FinishReason
    sampling: Sampling
    rule: str
    stats: Stats
    plan: MemoryPlan
    tree_choice: TreeChoice
    comparisons: tuple[ComparisonOutcome, ...]  # of kernels, where it ran on a GPU
    is_invariant: bool  # whether the text is bit for bit that of every other tree
    lenience: float = 1.0
    logprobs: list[TokenLogprob] | None = None  # of the new tokens, where they were asked for
    stopped_by: str = ""  # the stop string that has ended the text
    # the text with special tokens, which a model's form is read by
    segments: tuple[str, ...] = field(default=(), compare=False)
    # what a token adds to a text; None without a tokenizer
    text_of: Callable[[int], str | None] = field(default=lambda _: None, compare=False)

    @property
    def is_exact(self) -> bool:
        """Return True if the text is the target's own, or is distributed like that."""
        return self.lenience == 1 and self.plan.kv_dtype == "auto"

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _TEXT_SHOWN else f"{self.text[:_TEXT_SHOWN]}..."
        stats = self.stats
        ended = f"finish_reason={self.finish_reason!r}, rule={self.rule!r}"
        ended += "" if self.lenience == 1 else f", NOT exact (lenience {self.lenience:g})"
        coded = self.plan.kv_dtype
        ended += "" if coded == "auto" else f", NOT exact (keys and values in {coded})"
        speed = f"{stats.tokens_per_s:.2f} tokens/s, {stats.tokens_per_sweep:.2f} tokens per pass"
        return f"Generation({text!r}\n  {len(self.token_ids)} tokens, {ended}, {speed}\n  {self.sampling})"

    def logprobs_dicts(self) -> list[dict[str, object]]:
        """Return the log-probabilities as objects, with the texts of their tokens."""
        return [
            {
                **logprob._asdict(),
                "text": self.text_of(logprob.token),
                "top_texts": [self.text_of(token) for token, _ in logprob.top],
            }
            for logprob in self.logprobs or ()
        ]

    def as_dict(self) -> dict[str, object]:
        """Return the object that `offload generate --json` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "num_prompt_tokens": self.stats.num_prompt_tokens,
            "num_kept_tokens": self.stats.num_kept_tokens,  # of these, by a session
            "num_new_tokens": len(self.token_ids),
            **({} if self.logprobs is None else {"logprobs": self.logprobs_dicts()}),
            "finish_reason": self.finish_reason,
            "seed": self.sampling.seed,
            "sampling": self.sampling.as_dict(),
            "rule": self.rule,
            "is_exact": self.is_exact,
            **({} if self.lenience == 1 else {"lenience": self.lenience}),
            "is_invariant": self.is_invariant,
            "plan": self.plan.as_dict(),
            "tree_choice": self.tree_choice.as_dict(),
            **({"kernels": rows_of(self.comparisons)} if self.comparisons else {}),
            "stats": self.stats.as_dict(),
        }


class OutputDelta(NamedTuple):
    """What a text has gained by a pass, or by several where it was not fetched in between."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # of these tokens, where the request asks for them
    last_pass: StepMetrics | None  # of the last one; None where several passes are put together
    segments: tuple[str, ...] = ()  # the text with special tokens between

    def joined(self, other: "OutputDelta") -> "OutputDelta":
        """Return this piece with the one behind it."""
        return OutputDelta(
            self.text + other.text,
            self.token_ids + other.token_ids,
            self.logprobs + other.logprobs,
            None,
            self.segments + other.segments,
        )


@dataclass(eq=False, repr=False)
class Run:
    """Iterate for pieces of text as they are accepted; `result()` returns the text so far.

    A run that was left or interrupted goes on when iterated again; a finished one gives nothing
    more.
    """

    _decoder: TokenDecoder
    sequence: TokenSequence
    _text: TextStream
    tree_choice: TreeChoice
    # None until it is finished, also where it was left or cut off
    finish_reason: FinishReason | None = None
    _started: float = field(default_factory=time.perf_counter)
    _elapsed_s: float = 0.0

    def __repr__(self) -> str:
        ended = f"finish_reason={self.finish_reason!r}" if self.is_finished else "not finished"
        return f"Run({self.sequence.num_new} tokens so far, {ended})"

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces():
            yield piece.text

    def pieces(self) -> Iterator[OutputDelta]:
        """Yield what iterating gives, with special tokens, ids and figures."""
        started = time.perf_counter() - self._elapsed_s
        while not self.is_finished:
            # a step and its text: several threads may iterate over one run
            with self._decoder.lock.taken():
                self._started = started
                if self.is_writing:
                    self._decoder.step(self.sequence)
                piece = self.take()
            yield piece

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_writing(self) -> bool:
        return not self.is_finished and not self.sequence.has_ended

    def begin_with(self, likeliest: TokenLogprob) -> None:
        """Take what a score of the prompt says is next, where that is all that is wanted."""
        sampler = self.sequence.sampler
        is_likeliest = sampler.is_greedy and not sampler.is_adjusted
        if is_likeliest and self.sequence.limits.max_new_tokens == 1:
            logprobs = [] if self.sequence.num_logprobs is None else [likeliest]
            self.sequence.extend([likeliest.token], logprobs)

    def take(self) -> OutputDelta:
        """Return the gain of a pass, see `Decoder.step_all`, and note if the text ends there."""
        sequence = self.sequence
        num_before = len(self._text.tokens)
        num_segments = self._text.num_segments
        gained = sequence.new_ids_from(num_before)
        is_at_end = sequence.is_at_end_token
        text, has_stopped = self._text.push(gained[:-1] if is_at_end else gained)
        if has_stopped:
            sequence.cut(len(self._text.tokens))
        if has_stopped or is_at_end or sequence.sampler.is_over:
            self.finish_reason = "stop"
        elif sequence.has_ended:
            self.finish_reason = "length"
        if self.is_finished and not has_stopped:
            text += self._text.finish()
        token_ids = sequence.new_ids_from(num_before)
        if gained or self.finish_reason != "length":
            self._count(len(token_ids))
        return OutputDelta(
            text,
            token_ids,
            sequence.logprobs[num_before:],
            sequence.last_pass,
            self._text.segments_from(num_segments),
        )

    def _count(self, num_accepted: int) -> None:
        """Count a pass in the figures, and the time until then."""
        stats = self.sequence.stats
        self._elapsed_s = time.perf_counter() - self._started
        if stats.num_first_tokens == 0:
            stats.begin_decoding(num_accepted, self._elapsed_s)
        else:
            stats.accepted_per_sweep.append(num_accepted)
            stats.decode_s = self._elapsed_s - stats.ttft_s

    def result(self) -> Generation:
        """Return the generation so far."""
        stats = self.sequence.stats
        token_ids = self.sequence.new_ids
        stats.num_new_tokens = len(token_ids)
        stats.peak_rss_bytes = peak_rss_bytes()
        logprobs = None if self.sequence.num_logprobs is None else list(self.sequence.logprobs)
        is_stopped = self.finish_reason == "stop"
        segments = self._text.segments_from(0) if is_stopped else self._text.whole_segments()
        return Generation(
            token_ids=token_ids,
            text=plain_text(segments),
            segments=segments,
            stopped_by=self._text.stopped_by,
            finish_reason=self.finish_reason or "interrupted",
            sampling=self.sequence.sampler.sampling,
            rule=self.sequence.rule.name,
            stats=stats,
            logprobs=logprobs,
            text_of=self._text.text_of,
            plan=self._decoder.plan,
            tree_choice=self.tree_choice,
            comparisons=self._decoder.comparisons,
            # asked at the end: a product may have been refused under way
            is_invariant=self._decoder.invariance.holds and self.sequence.rule.is_exact,
            lenience=self.sequence.rule.lenience,
        )
