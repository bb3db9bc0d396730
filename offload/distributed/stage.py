"""The service of a stage: its layers over every run, in the order in which the head issues them.

    DATA     Reset, RunOrder, Commit: done and passed on to the next stage; what need not be computed
             is passed on first
    CONTROL  Cancel, heard by a thread: a run that is not needed is passed on without activations,
             so that order holds
    RESULT   Drawn, from the last stage: it draws with the noise of the position

Every row of a run takes its place among the uncommitted rows, computed or not, so that rows have
the same numbers on all stages. Invariant: a row's draw depends on its path and position alone, see
`match`; runs on their way, cancelled or late, only change when it is drawn.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor

from offload.checkpoint.cuts import Section
from offload.distributed.orders import (
    HEAD,
    Cancel,
    Commit,
    Drawn,
    Order,
    Reset,
    RunOrder,
    Stop,
    as_bytes,
    packed,
)
from offload.distributed.section import SectionModel, load_section
from offload.distributed.service import Acts, obey
from offload.distributed.transport import Channel, Transport
from offload.engine.setup import Setup
from offload.errors import RankError, ensure, reason
from offload.memory.plan import MemoryPlan
from offload.model.parts import BatchPart, causal
from offload.rank_roles import TIMED_ROWS
from offload.sampling.logits import Logits
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.streaming.layers import LayerStream
from offload.timer import timed

_NUM_TIMES = 2
_LONG_S = 1.0  # seconds; a longer pass is timed for one row alone
# returns whether the run is no longer needed; called before it and after every layer
Cancelled = Callable[[], bool]


class _CancelledError(Exception):
    """Ends a pass between two layers."""


class PipelineStage:
    """A section of the target, its cache of one text, and the sampler of its draws.

    Args:
        model: has its weights around the layers bound permanently.
        plan: the section's; it has room for as many uncommitted rows as its tree has nodes.
    """

    def __init__(self, model: SectionModel, stream: LayerStream, plan: MemoryPlan) -> None:
        self.model = model
        self.stream = stream
        self._max_logits = plan.num_logits_rows
        self._num_slots = plan.cache_slots
        self._cache = model.new_cache(plan.cache_slots)
        # rows of cancelled runs, which were never computed
        self._cache.fix()
        self._position_U = torch.empty(0, dtype=torch.long)
        self._is_whole_U = torch.empty(0, dtype=torch.bool)
        self._is_cancelled: Cancelled = lambda: False
        self.reset(0, Sampling())
        model.stream_layers(stream, self._go_on)

    @property
    def num_uncommitted(self) -> int:
        return len(self._position_U)

    def reset(self, num_kept: int, sampling: Sampling) -> None:
        """Begin a text that shares its first positions with the text before."""
        self._cache.clear(num_kept)
        self._position_U = self._position_U[:0]
        self._is_whole_U = self._is_whole_U[:0]
        self.sampler = Sampler(sampling, self.model.vocab_size, send=self.model.send)

    def commit(self, path: Sequence[int], kept: Sequence[int]) -> None:
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

    def run(self, run: RunOrder, is_cancelled: Cancelled) -> Tensor | None:
        """Return activations for the next stage, (W, D), or drawn tokens; None where cancelled.

        Raises `ValueError` for impossible rows, and `ReadError`.
        """
        lo = self.num_uncommitted
        token_W, position_W, sees_WU = run.rows(lo)
        ensure(
            self._cache.length + lo + len(token_W) <= self._num_slots,
            f"run {run.number} of {len(token_W)} rows does not fit behind {lo}",
        )
        rows_W = token_W
        if not (run.is_dead or self.model.section.has_table):
            rows_W = run.activations(self.model.width, self.model.dtype)
        self._position_U = torch.cat([self._position_U, position_W])
        self._is_cancelled = is_cancelled
        out = None
        if run.is_dead or is_cancelled():
            self._cache.reserve(lo, len(token_W))
        else:
            out = self._pass(rows_W, sees_WU, run.num_drawn)
        self._is_whole_U = torch.nn.functional.pad(
            self._is_whole_U, (0, len(token_W)), value=out is not None
        )
        return out

    def _pass(self, rows_W: Tensor, sees_WU: Tensor, num_drawn: int) -> Tensor | None:
        """Run ids or hidden states through the layers; return None if the run was cancelled."""
        self.stream.begin_sweep()
        rows = (rows_W, self._position_U, sees_WU, self._cache)
        try:
            if not self.model.section.has_head:
                return self.model.forward(*rows).cpu().contiguous()
            # 0 would mean all of them
            num_logits = max(1, num_drawn)
            part = BatchPart(*rows)
            logits = self.model.score([part], num_logits=num_logits, max_rows=self._max_logits)
        except _CancelledError:
            return None
        return self._draw(logits, self._position_U[len(self._position_U) - num_drawn :])

    def pass_times(self) -> list[float]:
        """Time a pass over one row, and over more and more rows while that is quick."""
        seconds = [timed(partial(self._try_out, 1))]
        for num_rows in TIMED_ROWS[1:] if seconds[0] < _LONG_S else ():
            seconds[0] = min(seconds[0], timed(partial(self._try_out, 1)))
            seconds.append(min(timed(partial(self._try_out, num_rows)) for _ in range(_NUM_TIMES)))
        return seconds

    def _try_out(self, num_rows: int) -> None:
        """Run a pass over `num_rows` of an empty text, for timing."""
        self.reset(0, Sampling())
        zeros_WD = torch.zeros(num_rows, self.model.width, dtype=self.model.dtype)
        run = RunOrder(
            0,
            [0] * num_rows,
            list(range(num_rows)),
            packed(causal(num_rows)),
            num_drawn=num_rows,
            hidden=None if self.model.section.has_table else as_bytes(zeros_WD).numpy().data,
        )
        self.run(run, lambda: False)
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

    def _go_on(self, layer: int) -> None:
        if self._is_cancelled() and self._may_stop(layer):
            raise _CancelledError

    def _may_stop(self, layer: int) -> bool:
        """Return True if a cancelled pass may stop after this layer.

        Not if the slots, which stopping empties, hold all that is left to stream.
        """
        streamed = self.stream.carrier.streamed
        if not streamed:
            return layer + 1 < self.model.num_layers
        return sum(streamed_layer > layer for streamed_layer in streamed) > len(
            self.stream.cycle.slots
        )


def load_stage(
    setup: Setup, section: Section, plan: MemoryPlan, resources: ExitStack
) -> PipelineStage:
    """Return the stage of this section, whose stream has begun; it is open as long as `resources`."""
    has_host_table = setup.device.has_own_memory
    model, stream = load_section(
        setup, setup.files.target, section, plan, resources, has_host_table=has_host_table
    )
    return PipelineStage(model, stream, plan)


def serve_stage(transport: Transport, before: int, after: int | None, stage: PipelineStage) -> None:
    """Carry out orders on DATA until one says stop.

    `before` is the rank that issues runs, or has the layers before; `after`, if any, the one with
    the layers behind. Raises `RankError` if a peer is lost, and what a pass raises.
    """
    service = _StageService(transport, after, stage, _Cancellations(transport))
    acts: Acts = {Reset: service.reset, RunOrder: service.run, Commit: service.commit}
    obey(transport, before, Channel.DATA, acts)
    service.pass_on(Stop())


@dataclass(slots=True)
class _StageService:
    _transport: Transport
    _after: int | None
    _stage: PipelineStage
    _cancellations: "_Cancellations"

    def reset(self, order: Reset) -> None:
        self.pass_on(order)
        self._stage.reset(order.num_kept, order.sampling)

    def commit(self, order: Commit) -> None:
        order.require_rows(self._stage.num_uncommitted)
        self.pass_on(order)
        self._stage.commit(order.path, order.kept)

    def run(self, order: RunOrder) -> None:
        number = order.number
        self._cancellations.forget_before(number)
        out = self._stage.run(order, partial(self._is_cancelled, number))
        self._transport.note_work("stage", is_under_way=False)
        if self._after is None:
            tokens = [] if out is None else out.tolist()
            self._transport.send(HEAD, Channel.RESULT, Drawn(number, out is None, tokens))
            return
        hidden = None if out is None else as_bytes(out).numpy().data
        self.pass_on(msgspec.structs.replace(order, is_dead=out is None, hidden=hidden))

    def _is_cancelled(self, number: int) -> bool:
        # so that a slow service does not look like one that hangs
        self._transport.note_work("stage", is_under_way=True)
        return number in self._cancellations

    def pass_on(self, order: Order) -> None:
        if self._after is not None:
            self._transport.send(self._after, Channel.DATA, order)


class _Cancellations:
    """Runs that are no longer needed, received by a thread; earlier ones are dropped."""

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
            obey(self._transport, HEAD, Channel.CONTROL, {Cancel: self._add})
        except RankError:  # the loop that waits for work is woken as well
            return
        except ValueError as error:
            self._transport.fail(reason(error))

    def _add(self, order: Cancel) -> None:
        with self._lock:
            self._dead.update(order.runs)
