"""A pipeline of ranks: who has which layers, loading on all of them, and the head's decoder.

Invariant: every rank plans, refuses and loads by itself; what one of them refuses ends all, with its line.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Thread
from typing import NamedTuple

import torch

from offload.calibration.expansion_choice import choose_expansion
from offload.calibration.invariance import Invariance
from offload.calibration.kernel_selection import NO_KERNELS
from offload.calibration.startup import pick_threads
from offload.checkpoint.encoder_decoder import has_encoder
from offload.checkpoint.section import Section, checkpoint_of
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.config import format_bytes
from offload.engine.build import Vocabulary, check_vocabulary, end_ids_of, resident_model, send_beside_layers
from offload.engine.capacity import capacity_of
from offload.engine.decoder import Settled
from offload.engine.meeting import meet
from offload.engine.pipeline import PipelineDecoder, check_stages
from offload.engine.request import Request
from offload.engine.session import Models
from offload.engine.team import Given
from offload.engine.text import Tokenizer, load_tokenizer
from offload.errors import UserError
from offload.memory.plan import PATH_SCRATCH_BYTES, MemoryPlan, draft_bytes, noise_bytes
from offload.memory.planner import RUNTIME_BYTES, Files
from offload.model.section import SectionModel
from offload.planning.cost_model import Traffic
from offload.planning.pipeline import MOST_ROWS, TIMED_ROWS, PipelineOptions, free_rows
from offload.planning.roles import Roles
from offload.planning.room import Room
from offload.planning.shares import Load, RankCapacity, stage_layers
from offload.planning.tree_policy import Trees
from offload.ranks.agreement import agree_on, hear_head, tell_all, try_together
from offload.ranks.draft import serve_draft
from offload.ranks.draft_tree import DraftTree
from offload.ranks.head import Head, RowPrice
from offload.ranks.messages import Channel
from offload.ranks.stage import Neighbours, Stage, serve_stage
from offload.ranks.transport import Transport
from offload.streaming.device import Device, computing_on
from offload.streaming.layers import open_layers
from offload.streaming.sight import Sight
from offload.threads.policy import Mode, Modes, ThreadPolicy
from offload.timer import timed
from offload.tree.spec import TreeSpec
from offload.verification.rules import find_rule

_NUM_TIMES, _LONG_S = 2, 1.0
_LEAST_UNCOMMITTED, _NAME = 64, "offload-rank"


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
        wanted = 2 * self.pipeline.num_runs(len(self.roles.stages)) * self.pipeline.num_rows(TIMED_ROWS[-1])
        return min(max(wanted, _LEAST_UNCOMMITTED), MOST_ROWS)

    def section(self, index: int, layers: range) -> Section:
        """Of a stage with these layers."""
        return Section(layers.start, layers.stop, index == 0, index == len(self.roles.stages) - 1)

    def plan(self, index: int, layers: range, room: Room) -> MemoryPlan:
        """What this rank takes as that stage, the draft beside it included if it drafts. Raises `UserError`."""
        files = self.given.files
        own = checkpoint_of(files.target, self.section(index, layers))
        return room.plan(Files(own, files.draft if self.drafts else None), self.num_uncommitted)

    def own_plan(self) -> MemoryPlan | None:
        """Of its stage, if it is one, once layers are shared out. Raises `UserError`."""
        return None if self.stage is None else self.plan(self.stage, self.layers[self.stage], self.given.room)

    @property
    def context(self) -> int:
        """Positions of a text, on every rank."""
        return self.plan(0, range(1), self.given.room.roomy()).context


def open_pipeline(
    given: Given, request: Request | None, resources: ExitStack, transport: Transport | None = None
) -> PipelineDecoder:
    """The head's decoder, once all ranks have loaded. On any other rank: serve to the end, then raise `SystemExit`.

    Raises `UserError` where ranks do not come or do not fit, or the request cannot be served, and `ReadError`.
    """
    target, vocab_size = given.files.target, config_sizes(given.files.target)["vocab_size"]
    roles, pipeline = given.options.pipeline_roles(has_draft=given.files.draft is not None)
    for model in filter(None, given.files):
        if has_encoder(model.config):
            raise UserError(f"{model.directory.name}: it has an encoder, and stages have none: leave `ranks` out")
    if request is not None:
        check_stages(request)
    met = meet(given, resources, transport)
    given.hooks.on_phase("measuring links, sharing layers")
    rank, is_head = _Rank(given, met.transport, roles, pipeline), met.transport.rank == 0
    tokenizer = load_tokenizer(target.tokenizer_path) if is_head or rank.drafts else None
    rank = _with_layers(rank, tokenizer)
    plan = try_together(rank.transport, rank.own_plan)
    if is_head and plan is not None and request is not None and request.prompt is not None:
        request.ids(tokenizer, vocab_size, plan.context, plan.has_longest_context)
    given.hooks.on_phase("reading layers")
    services = _load(rank, plan, resources)
    given.hooks.on_phase("timing passes")
    price = _price(rank, services)
    if not is_head:
        services.run()
        raise SystemExit(0)
    head = Head(rank.transport, roles, pipeline, rank.num_uncommitted, price=price)
    services.start(resources)
    resources.callback(head.stop)
    shares = ", ".join(f"{one.start} to {one.stop - 1}" for one in rank.layers)
    drafts = "" if roles.draft is None else f"; rank {roles.draft} drafts"
    notes = [f"layers by stage: {shares}{drafts}", *met.notes]
    assert plan is not None, "rank 0 is a stage"
    settled, on_layer = _settled(rank, plan, tokenizer), given.hooks.on_layer
    all_of_it = resources.pop_all()
    return PipelineDecoder(head, vocab_size, settled, resources=all_of_it, notes=notes, on_layer=on_layer)


def _settled(rank: _Rank, plan: MemoryPlan, tokenizer: Tokenizer | None) -> Settled:
    """What a decoder has to know; of trees that there are none."""
    files, options, traffic = rank.given.files, rank.given.options, Traffic.of(plan)
    trees = Trees(TreeSpec("none"), _no_profile, lambda _: traffic, context=plan.context, has_draft=False)
    models = Models(*files, options.dtype, plan.context, plan.has_longest_context)
    mode = Mode(torch.get_num_threads())
    threads, invariance = ThreadPolicy([mode.num_threads], Modes(mode, mode)), Invariance(reason="several ranks run it")
    text = tokenizer, end_ids_of(files.target)
    return Settled(plan, models, trees, find_rule(options.rule), threads, NO_KERNELS, *text, invariance)


def _no_profile(*_: object) -> tuple[None, str]:
    return None, "no profile is wanted"


def _with_layers(rank: _Rank, tokenizer: Tokenizer | None) -> _Rank:
    """Measure, and share layers out so that the slowest stage is as quick as can be."""
    files, room = rank.given.files, rank.given.room.roomy()
    try_together(rank.transport, lambda: _try_least(rank, tokenizer))  # and measure at one time: links may be the same
    mine, shape = None, model_shape(files.target, rank.given.options.dtype)
    if rank.stage is not None:
        held = rank.plan(rank.stage, range(len(shape.layer_bytes)), room)
        mine = capacity_of(rank.given, held, shares_kv=True)
    everybody = tell_all(rank.transport, mine)
    capacities = [RankCapacity(*everybody[one]) for one in rank.roles.stages]
    layers = stage_layers(capacities, Load(shape.layer_bytes, room.plan(files, rank.num_uncommitted).kv_bytes))
    bounds = hear_head(rank.transport, [(one.start, one.stop) for one in layers])
    return rank._replace(layers=tuple(range(*one) for one in bounds))


def _try_least(rank: _Rank, tokenizer: Tokenizer | None) -> None:
    """Raises `UserError` where a draft has other words, and where there is no room for one layer, or for the draft."""
    files = rank.given.files
    if rank.drafts and files.draft is not None:
        target, draft = (Vocabulary(config_sizes(one)["vocab_size"]) for one in (files.target, files.draft))
        check_vocabulary(tokenizer, files, target, draft)
    if rank.stage is not None:
        rank.plan(rank.stage, range(1), rank.given.room)
    elif rank.drafts:
        _require_room_for_draft(rank)


def _require_room_for_draft(rank: _Rank) -> None:
    given, draft = rank.given, rank.given.files.draft
    assert draft is not None, "whoever drafts has one"
    is_gpu, shape = given.room.gpu is not None, model_shape(draft, given.options.dtype)
    needed_bytes = draft_bytes(shape, rank.context, rank.num_uncommitted, is_gpu=is_gpu) + RUNTIME_BYTES
    needed_bytes += noise_bytes(shape.vocab_size) + PATH_SCRATCH_BYTES
    has_bytes = given.room.ram
    if needed_bytes > has_bytes:
        needed, has = format_bytes(needed_bytes), format_bytes(has_bytes)
        raise UserError(f"needs {needed} of RAM for the draft, budget is {has}: raise `ram`, or take a smaller draft")


class _Services:
    """What this rank does for the head, each in a thread where it does more than one thing."""

    def __init__(self, stage: Stage | None, work: list[Callable[[], None]], device: Device | None) -> None:
        self.stage, self._work, self._device = stage, work, device
        self._errors = list[BaseException]()

    def start(self, resources: ExitStack) -> None:
        """Serve beside whoever calls; on closing, all have ended."""
        for thread in [Thread(target=self._guarded, args=(one,), name=_NAME, daemon=True) for one in self._work]:
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
            with computing_on(self._device):
                work()
        except BaseException as error:  # raised by `run`; the head has been told
            self._errors.append(error)


def _load(rank: _Rank, plan: MemoryPlan | None, resources: ExitStack) -> _Services:
    work, stage = list[Callable[[], None]](), None
    if rank.stage is not None and plan is not None:
        stage = _load_stage(rank, rank.stage, plan, resources)
        before = rank.roles.stages[rank.stage - 1] if rank.stage else 0
        after = rank.roles.stages[rank.stage + 1] if rank.stage + 1 < len(rank.roles.stages) else None
        work.append(partial(serve_stage, rank.transport, Neighbours(before, after), stage))
    if rank.drafts:
        work.append(_load_draft(rank))
    if not work:  # a draft's rank, where nobody guesses
        work.append(partial(_wait_for_end, rank.transport))
    agree_on(rank.transport)
    return _Services(stage, work, rank.given.device)


def _wait_for_end(transport: Transport) -> None:
    transport.receive(0, Channel.CONTROL)


def _load_stage(rank: _Rank, index: int, plan: MemoryPlan, resources: ExitStack) -> Stage:
    given, target = rank.given, rank.given.files.target
    section = rank.section(index, rank.layers[index])
    place = torch.device("cpu") if given.device is None else given.device.place
    model = SectionModel(target, section, given.options.dtype, place, has_host_table=given.device is not None)
    resources.callback(model.close)
    limit = given.options.limit_bytes_per_s
    store = given.open_source(
        target.shards, stamps=target.stamps, rate_limit_bytes_per_s=limit, sight=Sight(target, given.hooks.on_note)
    )  # fmt: skip
    resources.callback(store.close)
    for note in send_beside_layers(given.device, plan, resources, model):
        given.hooks.on_note(note)
    model.read_rest(store.fetch)
    model.expand_with(choose_expansion(model, store.fetch, given.device).expansion)
    torch.set_num_threads(given.options.threads or pick_threads(model, None).start.sweep.num_threads)
    stream = open_layers(store, model.layer_layouts, plan, given.device, resources)
    stream.load_resident()
    return Stage(model, stream, plan, slow_layer_s=given.options.slow_layer_s)


def _load_draft(rank: _Rank) -> Callable[[], None]:
    files, dtype = rank.given.files, rank.given.options.dtype
    assert files.draft is not None, "there is one to load"
    if rank.stage is None:
        torch.set_num_threads(rank.given.options.threads or torch.get_num_threads())
    vocab_size = config_sizes(files.target)["vocab_size"]
    tree = DraftTree(
        resident_model(files.draft, dtype, found=rank.given.hooks.on_note),
        vocab_size,
        rank.context,
        rank.num_uncommitted,
    )
    return partial(serve_draft, rank.transport, tree, vocab_size)


def _price(rank: _Rank, services: _Services) -> RowPrice:
    """What rows cost at the slowest stage, while all stages try it; of use to guesses alone."""
    if not rank.pipeline.speculates:
        return RowPrice()
    seconds = [] if services.stage is None else _pass_times(services.stage)
    everybody = [times for times in tell_all(rank.transport, seconds) if times]
    slowest_s = [max(times) for times in zip(*everybody, strict=False)]
    if len(slowest_s) == 1:  # so long that it is the link's doing, which does not mind rows
        return RowPrice(0.0, TIMED_ROWS[-1])
    return RowPrice(max(0.0, slowest_s[-1] - slowest_s[0]) / (TIMED_ROWS[-1] - 1), free_rows(slowest_s))


def _pass_times(stage: Stage) -> list[float]:
    """Of a pass over one row, and over ever more where it does not take long."""
    seconds = [timed(partial(stage.try_out, 1))]
    for num_rows in TIMED_ROWS[1:] if seconds[0] < _LONG_S else ():
        seconds[0] = min(seconds[0], timed(partial(stage.try_out, 1)))
        seconds.append(min(timed(partial(stage.try_out, num_rows)) for _ in range(_NUM_TIMES)))
    return seconds
