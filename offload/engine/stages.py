"""A pipeline of ranks: who has which layers, loading on all of them, and the head's decoder.

Invariant: every rank plans, refuses and loads by itself; what one of them refuses ends all, with its line.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import NamedTuple

import torch

from offload.calibration.invariance import Invariance
from offload.calibration.kernel_selection import NO_KERNELS
from offload.calibration.link import link_bytes_per_s
from offload.calibration.quick import timed
from offload.calibration.startup import pick_threads, trees_of
from offload.checkpoint.encoder_decoder import has_encoder
from offload.checkpoint.section import Section, checkpoint_of
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.config import parse_size
from offload.engine.build import Words, check_vocabulary, end_ids_of, resident_model
from offload.engine.decoder import Settled
from offload.engine.meeting import meet
from offload.engine.pipeline import Pipe, PipelineDecoder
from offload.engine.session import Models
from offload.engine.team import Given
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import Files
from offload.model.section import SectionModel
from offload.planning.pipeline import PipelineOptions
from offload.planning.roles import Roles
from offload.planning.shares import Load, RankCapacity, stage_layers
from offload.ranks.agreement import agree_on, hear_head, tell_all
from offload.ranks.draft import serve_draft
from offload.ranks.draft_tree import DraftTree
from offload.ranks.head import Head, RowPrice
from offload.ranks.stage import Neighbours, Stage, serve_stage
from offload.ranks.timings import RunEvent
from offload.ranks.transport import Transport
from offload.streaming.layers import open_layers
from offload.threads.policy import Mode, Modes, ThreadPolicy
from offload.verification.rules import find_rule

_ROOMY = 1 << 50
_TIMED_ROWS, _LONG_S, _FREE = (1, 4, 8, 16, 32), 1.0, 1.15
_MOST_FREE = 32
_LEAST_UNCOMMITTED, _MOST_UNCOMMITTED = 64, 1024


class _Rank(NamedTuple):
    """What one rank knows before it loads."""

    given: Given
    transport: Transport
    roles: Roles
    pipeline: PipelineOptions
    layers: tuple[range, ...] = ()  # of the stages, in their order

    @property
    def stage(self) -> int | None:
        """Which one it is, if it is one."""
        return next((index for index, rank in enumerate(self.roles.stages) if rank == self.transport.rank), None)

    @property
    def drafts(self) -> bool:
        return self.pipeline.speculates and self.transport.rank == self.roles.draft

    @property
    def num_uncommitted(self) -> int:
        """Rows that every cache has room for behind the committed ones."""
        wanted = 2 * self.pipeline.num_runs(len(self.roles.stages)) * self.pipeline.num_rows(_MOST_FREE)
        return min(max(wanted, _LEAST_UNCOMMITTED), _MOST_UNCOMMITTED)

    def section(self, index: int, layers: range) -> Section:
        """Of a stage with these layers."""
        return Section(layers.start, layers.stop, index == 0, index == len(self.roles.stages) - 1)

    def plan(self, index: int, layers: range, ram: str | int) -> MemoryPlan:
        """What this rank takes as that stage, the draft beside it included if it drafts. Raises `UserError`."""
        files = self.given.files
        own = checkpoint_of(files.target, self.section(index, layers))
        room = replace(self.given.room, ram=ram)
        return room.plan(Files(own, files.draft if self.drafts else None), self.num_uncommitted)


def open_pipeline(given: Given, resources: ExitStack, transport: Transport | None = None) -> PipelineDecoder:
    """The head's decoder, once all ranks have loaded. On any other rank: serve to the end, then raise `SystemExit`.

    Raises `UserError` where ranks do not come or do not fit, and `ReadError`.
    """
    roles, pipeline = given.options.pipeline_roles(has_draft=given.files.draft is not None)
    if has_encoder(given.files.target.config):
        raise UserError(
            f"{given.files.target.directory.name}: it has an encoder, and stages have none: leave `ranks` out"
        )
    met = meet(given, resources, transport)
    rank = _with_layers(_Rank(given, met.transport, roles, pipeline))
    plan = _agreed_plan(rank)
    services = _load(rank, plan, resources)
    price = _price(rank, services)
    if rank.transport.rank:
        services.run()
        raise SystemExit(0)
    events = list[RunEvent]()
    head = Head(rank.transport, roles, pipeline, rank.num_uncommitted, price=price, listen=events.append)
    services.start(resources)
    resources.callback(head.stop)
    notes = [f"layers by stage: {', '.join(f'{one.start} to {one.stop - 1}' for one in rank.layers)}", *met.notes]
    pipe = Pipe(head, events, config_sizes(given.files.target)["vocab_size"], given.hooks.on_layer)
    return PipelineDecoder(pipe, _settled(rank, plan), resources=resources.pop_all(), notes=notes)


def _settled(rank: _Rank, plan: MemoryPlan) -> Settled:
    """What a decoder has to know; of trees that there are none."""
    files, options, index = rank.given.files, rank.given.options, rank.stage or 0
    own = Files(checkpoint_of(files.target, rank.section(index, rank.layers[index])))
    trees = trees_of(own, replace(options, tree="none", profile="none"), rank.given.room)
    models = Models(*files, options.dtype, plan.context, plan.has_longest_context)
    mode = Mode(torch.get_num_threads())
    threads, invariance = ThreadPolicy([mode.num_threads], Modes(mode, mode)), Invariance(reason="several ranks run it")
    text = load_tokenizer(files.target.directory), end_ids_of(files.target)
    return Settled(plan, models, trees, find_rule(options.rule), threads, NO_KERNELS, *text, invariance)


def _with_layers(rank: _Rank) -> _Rank:
    """Measure, and share layers out so that the slowest stage is as quick as can be."""
    agree_on(rank.transport, _refusal(rank))  # links are measured at one time: they may be the same
    everybody = tell_all(rank.transport, None if rank.stage is None else _capacity(rank, rank.stage))
    shape = model_shape(rank.given.files.target, rank.given.options.dtype)
    whole = replace(rank.given.room, ram=_ROOMY).plan(rank.given.files, rank.num_uncommitted)
    capacities = [RankCapacity(*everybody[one]) for one in rank.roles.stages]
    layers = stage_layers(capacities, Load(shape.layer_bytes, whole.kv_bytes))
    bounds = hear_head(rank.transport, [(one.start, one.stop) for one in layers])
    return rank._replace(layers=tuple(range(*one) for one in bounds))


def _refusal(rank: _Rank) -> str | None:
    """What this rank has against taking even one layer."""
    try:
        if rank.stage is not None:
            rank.plan(rank.stage, range(1), rank.given.room.ram)
    except UserError as error:
        return str(error)
    return None


def _capacity(rank: _Rank, index: int) -> RankCapacity:
    given, room = rank.given, rank.given.room
    num_layers = config_sizes(given.files.target)["num_hidden_layers"]
    roomy = rank.plan(index, range(num_layers), _ROOMY)
    link = link_bytes_per_s(given.files.target.shards, limit_bytes_per_s=given.options.limit_bytes_per_s)
    return RankCapacity(parse_size(room.ram, "`ram`") - roomy.fixed_bytes + roomy.kv_bytes, link)


def _agreed_plan(rank: _Rank) -> MemoryPlan:
    """Of this rank, when all others have one as well. Raises `UserError` where one has not."""
    refusal = plan = None
    try:
        plan = _plan_of(rank)
    except UserError as error:
        refusal = str(error)
    agree_on(rank.transport, refusal)
    assert plan is not None, "it was agreed on"
    return plan


def _plan_of(rank: _Rank) -> MemoryPlan:
    if rank.stage is not None:
        return rank.plan(rank.stage, rank.layers[rank.stage], rank.given.room.ram)
    draft = rank.given.files.draft
    assert draft is not None, "a rank without layers drafts"
    plan = rank.given.room.plan(Files(draft), rank.num_uncommitted)
    if plan.streamed_bytes:
        roomy = replace(rank.given.room, ram=_ROOMY).plan(Files(draft), rank.num_uncommitted)
        raise UserError(
            f"needs {roomy.total_bytes >> 20} MiB of RAM to hold the draft, budget is {plan.ram_bytes >> 20} MiB: "
            "raise `ram`, or take a smaller draft"
        )
    return plan


class _Services:
    """What this rank does for the head, each in a thread where it does more than one thing."""

    def __init__(self, stage: Stage | None, work: list[Callable[[], None]]) -> None:
        self.stage, self._work = stage, work
        self._errors = list[BaseException]()

    def start(self, resources: ExitStack) -> None:
        """Serve beside whoever calls; on closing, all have ended."""
        for thread in [Thread(target=self._guarded, args=(one,), daemon=True) for one in self._work]:
            thread.start()
            resources.callback(thread.join)

    def run(self) -> None:
        """Serve to the end. Raises what a service has raised."""
        with ExitStack() as threads:
            self.start(threads)
        if self._errors:
            raise self._errors[0]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised by `run`; the head has been told
            self._errors.append(error)


def _load(rank: _Rank, plan: MemoryPlan, resources: ExitStack) -> _Services:
    work, stage = list[Callable[[], None]](), None
    if rank.stage is not None:
        stage = _load_stage(rank, rank.stage, plan, resources)
        before = rank.roles.stages[rank.stage - 1] if rank.stage else 0
        after = rank.roles.stages[rank.stage + 1] if rank.stage + 1 < len(rank.roles.stages) else None
        work.append(partial(serve_stage, rank.transport, Neighbours(before, after), stage))
    if rank.drafts:
        work.append(_load_draft(rank, plan))
    agree_on(rank.transport, None)
    return _Services(stage, work)


def _load_stage(rank: _Rank, index: int, plan: MemoryPlan, resources: ExitStack) -> Stage:
    given, target = rank.given, rank.given.files.target
    section = rank.section(index, rank.layers[index])
    place = torch.device("cpu") if given.device is None else given.device.place
    model = SectionModel(target, section, given.options.dtype, place, has_host_table=given.device is not None)
    resources.callback(model.close)
    limit = given.options.limit_bytes_per_s
    store = given.open_source(target.shards, stamps=target.stamps, rate_limit_bytes_per_s=limit)
    resources.callback(store.close)
    model.bind_rest(store.fetch(model.rest_layout))
    torch.set_num_threads(given.options.threads or pick_threads(model, None).start.sweep.num_threads)
    stream = open_layers(store, model.layer_layouts, plan, given.device, resources)
    stream.load_resident()
    return Stage(model, stream, plan, slow_layer_s=given.options.slow_layer_s)


def _load_draft(rank: _Rank, plan: MemoryPlan) -> Callable[[], None]:
    files, dtype = rank.given.files, rank.given.options.dtype
    assert files.draft is not None, "there is one to load"
    model, vocab_size = resident_model(files.draft, dtype), config_sizes(files.target)["vocab_size"]
    check_vocabulary(load_tokenizer(files.target.directory), files.draft, Words(vocab_size), model)
    tree = DraftTree(model, vocab_size, plan.context, rank.num_uncommitted)
    return partial(serve_draft, rank.transport, tree, vocab_size)


def _price(rank: _Rank, services: _Services) -> RowPrice:
    """What rows cost at the slowest stage, in passes that nobody else runs at the same time."""
    seconds = [] if services.stage is None else _pass_times(services.stage)
    everybody = [times for times in tell_all(rank.transport, seconds) if times]
    slowest = [max(times) for times in zip(*everybody, strict=False)]
    rows = _TIMED_ROWS[: len(slowest)]
    row_s = max(0.0, slowest[-1] - slowest[0]) / max(1, rows[-1] - rows[0])
    num_free = max(size for size, time_s in zip(rows, slowest, strict=True) if time_s <= _FREE * slowest[0])
    return RowPrice(row_s, num_free)


def _pass_times(stage: Stage) -> list[float]:
    """Of passes over ever more rows, as long as they do not take too long."""
    seconds = list[float]()
    for num_rows in _TIMED_ROWS:
        timed(partial(stage.try_out, num_rows))
        seconds.append(timed(partial(stage.try_out, num_rows)))
        if seconds[-1] > _LONG_S:
            break
    return seconds
