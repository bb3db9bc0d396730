"""The decoder of a pipeline's head; the target lies on other ranks.

Invariant: the text is that of the same seed in one process; runs on their way change only when it
comes.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from offload.distributed.head import Head
from offload.drafting.lookup import NO_SOURCES, LookupDrafter
from offload.engine.decoder import Decoder
from offload.engine.decoder_config import DecoderConfig
from offload.engine.hooks import Hooks
from offload.engine.request import Request
from offload.engine.sequence import TokenSequence
from offload.errors import UserError
from offload.stats import RankFigures, Transfers

_NO_SCORES = "stages tell tokens alone, and scores need logits"


def check_stages(request: Request) -> None:
    """Raise `UserError` for requests that need a text's past, or logits: no stage has them."""
    remedy = "leave them out, or use `ranks` shards"
    if request.sampling.is_adjusted:
        raise UserError(
            f"stages know of no penalties and biases, got {request.sampling.as_dict()}: {remedy}"
        )
    if request.num_logprobs is not None:
        raise UserError(
            f"stages tell tokens alone, got `num_logprobs` {request.num_logprobs}: {remedy}"
        )
    if request.num_prompt_logprobs is not None:
        raise UserError(f"{_NO_SCORES}: {remedy}")
    if request.grammar is not None:
        raise UserError(f"stages draw without a grammar, got {request.grammar}: {remedy}")


class NullCache:
    """Stands in for a cache; `length` tokens of the text before may be kept."""

    length = 0

    def reusable_prefix(self, num_positions: int) -> int:
        """Return the number of slots."""
        return min(num_positions, self.length)

    def clear(self, num_kept: int = 0) -> None:
        """Keep this many from now on."""
        self.length = num_kept


class RemoteTarget:
    """Stands in for the target: the head asks stages instead of scoring."""

    start_ids: tuple[int, ...] = ()
    peak_device_bytes = 0
    moved = Transfers()
    computing = nullcontext

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.stream = self.carrier = self
        self.note = self.experts = None

    def new_cache(self) -> NullCache:
        """Return the stand-in for a cache."""
        return NullCache()

    def turn(self, tokens: Sequence[int], cache: NullCache) -> None:
        """Do nothing: stages have no texts beyond a turning point."""

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor: it is used where it lies."""
        return tensor

    def figures(self) -> list[RankFigures]:
        """Return no figures: stages report none."""
        return []


class PipelineDecoder(Decoder):
    """A `Decoder` over the head of a pipeline, whose trees the draft rank guesses run by run.

    A step waits for tokens of runs on their way; `on_layer` is called for what arrives.
    """

    def __init__(
        self,
        head: Head,
        config: DecoderConfig,
        vocab_size: int,
        hooks: Hooks,
        *,
        resources: ExitStack,
        notes: list[str],
    ) -> None:
        elsewhere: Any = RemoteTarget(vocab_size)
        drafter = LookupDrafter(NO_SOURCES, float)
        super().__init__(elsewhere, drafter, config, resources=resources, notes=notes)
        self._head = head
        self._on_layer = hooks.on_layer
        self._last: TokenSequence | None = None
        self._is_under_way = False

    def _pass(self, sequences: Sequence[TokenSequence]) -> list[list[int] | Exception]:
        """Return the next tokens of the one text, which the head begins or continues."""
        (sequence,) = sequences
        kept = sequence.caches.target.length
        started = time.perf_counter()
        is_known = sequence is self._last
        if not (is_known and self._is_under_way):
            most = sequence.num_prompt_tokens + sequence.limits.max_new_tokens
            self._last = sequence
            self._head.listen = sequence.stats.runs.append
            most_kept = len(sequence.tokens) if is_known else kept
            sampling = sequence.sampler.sampling
            # a larger number means all, and may exceed the numbers in messages
            sampling = replace(sampling, top_k=min(sampling.top_k, self._vocab_size))
            end = min(most, self.plan.context)
            self._head.begin(sequence.tokens, sampling, end, most_kept)
        # if a step was cut short, the head may be ahead of the text
        self._is_under_way = False
        counted = sequence.extend(self._head.advance(self._on_layer))
        self._is_under_way = True
        # the head knows and bounds the part that stages keep
        sequence.caches.target.length = len(sequence.tokens) - 1
        if sequence.has_ended:
            self._head.end()
        took_s = time.perf_counter() - started
        sequence.stats.add_step(Transfers(), draft_s=0.0, sweep_s=took_s, verify_s=0.0)
        return [counted]

    def prepare(self, request: Request) -> Request:
        """Prepare as every decoder does. Raises `UserError` if stages cannot draw the text."""
        check_stages(request)
        return super().prepare(request)

    def _other_rule(self, name: str) -> NoReturn:
        raise UserError(
            f"stages draw by `rule` match alone, got {name}: leave it out, or use `ranks` shards"
        )

    def score_texts(self, *_: Any) -> NoReturn:
        """Raise `UserError`: scores need logits."""
        raise UserError(f"{_NO_SCORES}: use `ranks` shards")

    def save_session(self, *_: Any) -> NoReturn:
        """Raise `UserError`: keys and values lie on all ranks."""
        raise UserError(
            "sessions keep the keys and values of one process, and there are several: leave `ranks` out"
        )

    def load_session(self, *_: Any) -> NoReturn:
        """Raise `UserError`, as `save_session` does."""
        self.save_session()
