"""The service of a stage: its layers over every run, in the order in which the head issues them.

    DATA     RESET, RUN, COMMIT: done and passed on to the next stage; what need not be computed is
             passed on first
    CONTROL  CANCEL, heard by a thread: a run that is not needed is passed on without activations,
             so that order holds
    RESULT   DRAWN, from the last stage, 8 bytes a row: it draws with the noise of the position;
             ERROR, from any

Every row of a run takes its place among the uncommitted rows, also where it was not computed, so
that rows have the same numbers on all stages. Invariant: a row's draw depends on its path and
position alone, see `match`; which runs are on their way, cancelled or late, changes when it is
drawn and nothing else.
"""

import threading
import time
from collections import abc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from offload.checkpoint.cuts import Section
from offload.distributed.orders import (
    HEAD,
    RunMessage,
    error_message,
    read_commit,
    read_run,
    sampling_of,
)
from offload.distributed.section import SectionModel, load_section
from offload.distributed.transport import Channel, Kind, Message, Transport
from offload.engine.resolve import ResolvedRun
from offload.errors import RankError, ensure
from offload.memory.plan import MemoryPlan
from offload.model.parts import BatchPart, causal
from offload.rank_roles import TIMED_ROWS
from offload.sampling.logits import Logits
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.streaming.layers import LayerStream
from offload.timer import timed

_ENDS = (Kind.STOP, Kind.ERROR)
_NUM_TIMES = 2
_LONG_S = 1.0  # a pass that takes longer is timed for one row alone
# tells whether the run is no longer needed
Cancelled = Callable[[], bool]


class _CancelledError(Exception):
    """Ends a pass between two layers."""


class PipelineStage:
    """A section of the target, its cache of one text, and the sampler of its draws.

    Args:
        model: what lies around its layers is bound for good.
        plan: of the section; its tree's nodes are the uncommitted rows that there is room for.
        slow_layer_s: seconds that every layer takes longer, for studies.
    """

    def __init__(
        self,
        model: SectionModel,
        stream: LayerStream,
        plan: MemoryPlan,
        *,
        slow_layer_s: float = 0.0,
    ) -> None:
        self.model = model
        self.stream = stream
        self._max_logits = plan.num_logits_rows
        self._slow_layer_s = slow_layer_s
        self._cache = model.new_cache(plan.cache_slots)
        # rows of cancelled runs are never computed
        self._cache.fix()
        self._position_U = torch.empty(0, dtype=torch.long)
        self._is_whole_U = torch.empty(0, dtype=torch.bool)
        self._is_cancelled: Cancelled = lambda: False
        self.reset(0, Sampling())
        model.stream_layers(stream.acquire, self._release)

    @property
    def num_uncommitted(self) -> int:
        return len(self._position_U)

    def reset(self, num_kept: int, sampling: Sampling) -> None:
        """Begin a text whose first positions are those of the text before."""
        self._cache.clear(num_kept)
        self._position_U = self._position_U[:0]
        self._is_whole_U = self._is_whole_U[:0]
        self.sampler = Sampler(sampling, self.model.vocab_size, send=self.model.send)

    def commit(self, path: abc.Sequence[int], kept: abc.Sequence[int]) -> None:
        """Commit rows, see `KVCache.commit`.

        Rows of a cancelled run may be kept: the cancellation may have come before this commit's
        turn. Raises `ValueError` for a path through such a run.
        """
        ensure(
            bool(self._is_whole_U[list(path)].all()),
            "a commit has rows of a run that was cancelled",
        )
        self._cache.commit(path, kept)
        self._position_U = self._position_U[list(kept)]
        self._is_whole_U = self._is_whole_U[list(kept)]

    def run(
        self, run: RunMessage, hidden_WD: Tensor | None, is_cancelled: Cancelled
    ) -> Tensor | None:
        """Return what the next stage gets, (W, D), or the drawn tokens; None where cancelled.

        `hidden_WD` is what the stage before gives; the first takes ids. Raises `ReadError`.
        """
        lo = self.num_uncommitted
        self._position_U = torch.cat([self._position_U, run.position_W])
        self._is_cancelled = is_cancelled
        out = None
        if run.is_dead or is_cancelled():
            self._cache.place(lo, len(run.token_W))
        else:
            out = self._pass(run, run.token_W if hidden_WD is None else hidden_WD)
        self._is_whole_U = torch.nn.functional.pad(
            self._is_whole_U, (0, len(run.token_W)), value=out is not None
        )
        return out

    def _pass(self, run: RunMessage, rows_W: Tensor) -> Tensor | None:
        """Run ids or hidden states through the layers; None where the run was cancelled."""
        self.stream.begin_sweep()
        rows = (rows_W, self._position_U, run.sees_WU, self._cache)
        try:
            if not self.model.section.has_head:
                return self.model.forward(*rows).cpu().contiguous()
            # 0 would be all of them
            num_logits = max(1, run.num_drawn)
            part = BatchPart(*rows)
            logits = self.model.score([part], num_logits=num_logits, max_rows=self._max_logits)
        except _CancelledError:
            return None
        return self._draw(logits, run.position_W[len(run.position_W) - run.num_drawn :])

    def pass_times(self) -> list[float]:
        """Time a pass over one row, and over ever more where it does not take long."""
        seconds = [timed(partial(self._try_out, 1))]
        for num_rows in TIMED_ROWS[1:] if seconds[0] < _LONG_S else ():
            seconds[0] = min(seconds[0], timed(partial(self._try_out, 1)))
            seconds.append(min(timed(partial(self._try_out, num_rows)) for _ in range(_NUM_TIMES)))
        return seconds

    def _try_out(self, num_rows: int) -> None:
        """Run a pass over `num_rows` of an empty text, for timing."""
        self.reset(0, Sampling())
        row_W = torch.arange(num_rows)
        zeros_WD = torch.zeros(num_rows, self.model.width, dtype=self.model.dtype)
        run = RunMessage(0, False, num_rows, torch.zeros_like(row_W), row_W, causal(num_rows))
        self.run(run, None if self.model.section.has_table else zeros_WD, lambda: False)
        self.reset(0, Sampling())

    def _draw(self, logits: Logits, position_K: Tensor) -> Tensor:
        """Return the target's tokens as `match` draws them, or `NO_TOKEN`."""
        tokens = list[int]()
        while len(tokens) < len(position_K):
            lo, chunk_CV = logits.chunk_with(len(tokens))
            position_C = position_K[lo : lo + len(chunk_CV)] + 1
            if self.sampler.draws_rows:
                tokens += self.sampler.draw_rows(chunk_CV, position_C).tolist()
                continue
            for logits_V, position in zip(chunk_CV, position_C.tolist(), strict=True):
                tokens.append(self.sampler.token_at(logits_V, position))
        return torch.tensor(tokens, dtype=torch.long)

    def _release(self, layer: int) -> None:
        self.stream.release(layer)
        if self._slow_layer_s:
            time.sleep(self._slow_layer_s)
        if self._may_stop(layer) and self._is_cancelled():
            raise _CancelledError

    def _may_stop(self, layer: int) -> bool:
        """Return whether to stop a cancelled pass behind this layer.

        Not where the slots, which stopping throws away, hold all that is left to stream.
        """
        streamed = self.stream.carrier.streamed
        if not streamed:
            return layer + 1 < self.model.num_layers
        return sum(one > layer for one in streamed) > len(self.stream.stage.slots)


def load_stage(
    run: ResolvedRun, section: Section, plan: MemoryPlan, resources: ExitStack
) -> PipelineStage:
    """Return the stage of this section, whose stream has begun; it is open as long as `resources`."""
    has_host_table = run.device.has_own_memory
    model, stream = load_section(
        run, run.files.target, section, plan, resources, has_host_table=has_host_table
    )
    return PipelineStage(model, stream, plan, slow_layer_s=run.options.slow_layer_s)


def serve_stage(transport: Transport, before: int, after: int | None, stage: PipelineStage) -> None:
    """Do what arrives on DATA until the head says STOP, or an ERROR of a stage before passes.

    `before` is the rank that issues runs, or has the layers before; `after`, if any, those behind.
    Raises `RankError` where a peer is lost; other errors end the head and the stages behind.
    """
    service = _StageService(transport, after, stage, _Cancellations(transport))
    try:
        while service.do(transport.receive(before, Channel.DATA)):
            pass
    except RankError:
        raise
    except Exception as error:
        service.fail(error)


@dataclass(slots=True)
class _StageService:
    _transport: Transport
    _after: int | None
    _stage: PipelineStage
    _cancellations: "_Cancellations"

    def do(self, message: Message) -> bool:
        """Carry out a message; return whether the service goes on."""
        if message.kind == Kind.RUN:
            self._run(message)
        elif message.kind == Kind.COMMIT:
            commit = read_commit(message.numbers, self._stage.num_uncommitted)
            self._pass_on(message)
            self._stage.commit(*commit)
        elif message.kind == Kind.RESET:
            self._pass_on(message)
            self._stage.reset(message.numbers[0], sampling_of(message))
        elif message.kind in _ENDS:
            self._pass_on(message)
        else:
            raise ValueError(f"a stage was told to {message.kind.name}")
        return message.kind not in _ENDS

    def fail(self, error: Exception) -> NoReturn:
        """Tell why, the head first: it tells the user."""
        message = error_message(error)
        self._transport.send(HEAD, Channel.RESULT, message)
        self._pass_on(message)
        raise error

    def _run(self, message: Message) -> None:
        run = read_run(message.numbers, self._stage.num_uncommitted)
        self._cancellations.forget_before(run.number)
        hidden_WD = None if run.is_dead else self._received(message.payload, len(run.token_W))
        out = self._stage.run(run, hidden_WD, lambda: run.number in self._cancellations)
        is_dead = out is None
        if self._after is not None:
            numbers = [run.number, int(is_dead), *message.numbers[2:]]
            self._pass_on(Message(Kind.RUN, numbers, out))
        else:
            drawn = [run.number, int(is_dead), *([] if out is None else out.tolist())]
            self._transport.send(HEAD, Channel.RESULT, Message(Kind.DRAWN, drawn))

    def _received(self, payload: Tensor | None, num_rows: int) -> Tensor | None:
        """Return what the stage before has computed. Raises `ValueError` for anything else."""
        model = self._stage.model
        given = None if payload is None else (tuple(payload.shape), payload.dtype)
        wanted = None if model.section.has_table else ((num_rows, model.width), model.dtype)
        if given != wanted:
            raise ValueError(f"a run has activations {given}, they must be {wanted}")
        return payload

    def _pass_on(self, message: Message) -> None:
        if self._after is not None:
            self._transport.send(self._after, Channel.DATA, message)


class _Cancellations:
    """Runs no longer needed, as a thread hears of them; earlier ones are forgotten."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._dead = set[int]()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="offload-cancel", daemon=True).start()

    def __contains__(self, run: int) -> bool:
        with self._lock:
            return run in self._dead

    def forget_before(self, run: int) -> None:
        with self._lock:
            self._dead = {number for number in self._dead if number >= run}

    def _listen(self) -> None:
        try:
            while (message := self._transport.receive(HEAD, Channel.CONTROL)).kind == Kind.CANCEL:
                with self._lock:
                    self._dead.update(message.numbers)
        except RankError:
            # the loop that waits for work hears of it as well
            return
