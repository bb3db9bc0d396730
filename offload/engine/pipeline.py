"""A decoder whose target lies on other ranks: a step waits for tokens of runs that are on their way anyway.

Invariant: the text is that of the same seed in one process; what runs are on their way changes when it comes.
"""

import time
from collections import abc
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NoReturn

from torch import Tensor

from offload.drafting.none import NoDrafter, NoState
from offload.engine.decoder import Decoder, Settled
from offload.engine.generation import Run
from offload.engine.request import Request
from offload.engine.sequence import Sequence
from offload.errors import UserError
from offload.ranks.head import Head
from offload.stats import Moved, RankFigures


def check_stages(request: Request) -> None:
    """Refuse what needs a text's past, or logits, where tokens are drawn: a stage has neither. Raises `UserError`."""
    remedy = "leave them out, or use `ranks` shards"
    if request.sampling.is_adjusted:
        raise UserError(f"stages know of no penalties and biases, got {request.sampling.as_dict()}: {remedy}")
    if request.num_logprobs is not None:
        raise UserError(f"stages tell tokens alone, got `num_logprobs` {request.num_logprobs}: {remedy}")
    if request.grammar is not None:
        raise UserError(f"stages draw without a grammar, got {request.grammar}: {remedy}")


class _Nowhere(NoState):
    """What stands for a cache here: the stages have those of the target.

    Attributes:
        length: tokens that a text may keep of the one before.
    """

    length = 0

    def clear(self, num_kept: int = 0) -> None:
        """From now on so many."""
        self.length = num_kept


class _Elsewhere:
    """What stands for the target: the head asks stages instead of scoring."""

    start: tuple[int, ...] = ()
    peak_device_bytes, computing = 0, nullcontext

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.stream = vocab_size, self
        self.note = self.experts = None

    def new_cache(self) -> _Nowhere:
        """Nothing."""
        return _Nowhere()

    def send(self, tensor: Tensor) -> Tensor:
        """It is where it is used."""
        return tensor

    def figures(self) -> list[RankFigures]:
        """Stages do not tell theirs."""
        return []


class PipelineDecoder(Decoder):
    """A `Decoder` over the head of a pipeline; its trees are made of what the draft rank guesses, run by run.

    `on_layer` is called when ranks have computed anything.
    """

    def __init__(
        self, head: Head, vocab_size: int, settled: Settled, *, resources: ExitStack, notes: list[str],
        on_layer: Callable[[], None],
    ) -> None:  # fmt: skip
        elsewhere: Any = _Elsewhere(vocab_size)
        super().__init__(elsewhere, NoDrafter(), settled, resources=resources, notes=notes)
        self._head, self._on_layer = head, on_layer
        self._last, self._is_under_way = list[Sequence](), False

    def _pass(self, sequences: abc.Sequence[Sequence]) -> list[list[int]]:
        (sequence,) = sequences
        kept, started = sequence.caches.target.length, time.perf_counter()
        is_known = sequence in self._last
        if not (is_known and self._is_under_way):
            most = sequence.num_prompt_tokens + sequence.limits.max_new_tokens
            self._last, self._head.listen = [sequence], sequence.stats.runs.append
            most_kept = len(sequence.tokens) if is_known else kept
            self._head.begin(sequence.tokens, sequence.sampler.sampling, min(most, self.plan.context), most_kept)
        self._is_under_way = False  # where a step is cut short, the head may have gone further than the text
        counted = sequence.accept(self._head.advance(self._on_layer))
        self._is_under_way = True
        if sequence.has_ended:
            self._head.end()
        took_s = time.perf_counter() - started
        sequence.stats.add_step(Moved(), draft_s=0.0, sweep_s=took_s, verify_s=0.0)
        return [counted]

    def start(
        self, request: Request, *, tree: str | None = None, rule: str | None = None, continues: bool = False
    ) -> Run:
        """Like every decoder's, where stages can draw the text. Raises `UserError` as well where they cannot."""
        check_stages(request)
        return super().start(request, tree=tree, rule=rule, continues=continues)

    def _other_rule(self, name: str) -> NoReturn:
        raise UserError(f"stages draw by `rule` match alone, got {name}: leave it out, or use `ranks` shards")

    def save_session(self, *_: Any) -> NoReturn:
        """Refused: keys and values lie on all ranks."""
        raise UserError("sessions keep the keys and values of one process, and there are several: leave `ranks` out")

    def load_session(self, *_: Any) -> NoReturn:
        """Refused like `save_session`."""
        self.save_session()
