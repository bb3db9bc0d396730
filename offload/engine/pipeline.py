"""A decoder whose target lies on other ranks: a step waits for tokens of runs that are on their way anyway.

Invariant: the text is that of the same seed in one process; what runs are on their way changes when it comes.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from offload.drafting.none import NoDrafter, NoState
from offload.engine.decoder import Decoder, Settled
from offload.engine.sequence import Sequence
from offload.errors import UserError
from offload.ranks.head import Head
from offload.ranks.timings import RunEvent
from offload.stats import RankFigures


class _Nowhere(NoState):
    """What stands for a cache here: the stages have those of the target."""

    length = 0


class _Elsewhere:
    """What stands for the target: the head asks stages instead of scoring."""

    start: tuple[int, ...] = ()
    peak_device_bytes = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.stream = vocab_size, self
        self.note, self.bytes_read, self.stall_s = None, 0, 0.0

    def new_cache(self) -> _Nowhere:
        """Nothing."""
        return _Nowhere()

    def send(self, tensor: Tensor) -> Tensor:
        """It is where it is used."""
        return tensor

    def figures(self) -> list[RankFigures]:
        """Stages do not tell theirs."""
        return []


class Pipe(NamedTuple):
    """A pipeline as its decoder knows it."""

    head: Head
    events: list[RunEvent]  # that the head adds to
    vocab_size: int
    on_layer: Callable[[], None] = lambda: None  # called when ranks have computed anything


class PipelineDecoder(Decoder):
    """A `Decoder` over the head of a pipeline; its trees are made of what the draft rank guesses, run by run."""

    def __init__(self, pipe: Pipe, settled: Settled, *, resources: ExitStack, notes: list[str]) -> None:
        elsewhere: Any = _Elsewhere(pipe.vocab_size)
        super().__init__(elsewhere, NoDrafter(), settled, resources=resources, notes=notes)
        self._pipe, self._head, self._events, self._begun = pipe, pipe.head, pipe.events, list[Sequence]()

    def _step(self, sequence: Sequence) -> list[int]:
        sequence.caches  # noqa: B018  # refuses a text that was overtaken
        started = time.perf_counter()
        if sequence not in self._begun:
            self._events.clear()
            most = sequence.num_prompt_tokens + sequence.limits.max_new_tokens
            self._head.begin(sequence.tokens, sequence.sampler.sampling, min(most, self.plan.context))
            self._begun = [sequence]
        counted = sequence.accept(self._head.advance(self._pipe.on_layer))
        if sequence.has_ended:
            self._head.end()
        took_s = time.perf_counter() - started
        sequence.stats.add_step(draft_s=0.0, sweep_s=took_s, verify_s=0.0, stall_s=0.0, num_bytes=0)
        sequence.stats.runs = list(self._events)
        return counted

    def save_session(self, *_: Any) -> NoReturn:
        """Refused: keys and values lie on all ranks."""
        raise UserError("sessions keep the keys and values of one process, and there are several: leave `ranks` out")

    def load_session(self, *_: Any) -> NoReturn:
        """Refused like `save_session`."""
        self.save_session()
