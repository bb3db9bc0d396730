"""A pipeline of ranks: who has which layers, loading on all of them, and the head's decoder.

Invariant: every rank plans, refuses and loads by itself; what one of them refuses ends all, with
its line.

A decoder whose target lies on other ranks: a step waits for tokens of runs that are on their way
anyway.

Invariant: the text is that of the same seed in one process; what runs are on their way changes when
it comes.
"""

import time
from collections import abc
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from threading import Thread
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from offload.calibration.invariance import Invariance
from offload.checkpoint.cuts import Section, checkpoint_of
from offload.checkpoint.generation_config import end_ids_of
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.checkpoint.t5 import has_encoder
from offload.distributed.draft import DraftTree, serve_draft
from offload.distributed.head import Head, RowPrice
from offload.distributed.meeting import capacity_of, load_section, meet_ranks
from offload.distributed.orders import (
    agree_on,
    all_gather_objects,
    broadcast_from_head,
    try_together,
)
from offload.distributed.stage import Neighbours, PipelineStage, serve_stage
from offload.distributed.transport import Channel, Transport
from offload.drafting.base import NoDrafter, NoState
from offload.engine.build import resident_model
from offload.engine.decoder import Decoder
from offload.engine.decoder_config import DecoderConfig
from offload.engine.generation import Run
from offload.engine.identities import Identities
from offload.engine.request import Request
from offload.engine.resolve import ResolvedRun
from offload.engine.sequence import Sequence
from offload.engine.session import Models
from offload.engine.text import Tokenizer, Vocabulary, check_vocabulary, load_tokenizer
from offload.errors import UserError
from offload.memory.plan import PATH_SCRATCH_BYTES, MemoryPlan, draft_bytes, noise_bytes
from offload.memory.planner import RUNTIME_BYTES, MemoryBudget, ModelFiles
from offload.planning.cost_model import Traffic
from offload.planning.selector import TreeSelector
from offload.planning.shares import Load, RankCapacity, stage_layers
from offload.rank_roles import MOST_ROWS, TIMED_ROWS, PipelineOptions, Roles, free_rows
from offload.sampling.grammar_mask import Grammars
from offload.stats import RankFigures, Transfers
from offload.streaming.device import Device, computing_on
from offload.threads import Mode, StepModes, ThreadPolicy
from offload.timer import timed
from offload.trees.spec import TreeSpec
from offload.units import format_bytes, parse_size


def check_stages(request: Request) -> None:
    """Refuse what needs a text's past, or logits, where tokens are drawn: a stage has neither.
    Raises `UserError`.
    """
    remedy = "leave them out, or use `ranks` shards"
    if request.sampling.is_adjusted:
        raise UserError(
            f"stages know of no penalties and biases, got {request.sampling.as_dict()}: {remedy}"
        )
    if request.num_logprobs is not None:
        raise UserError(
            f"stages tell tokens alone, got `num_logprobs` {request.num_logprobs}: {remedy}"
        )
    if request.grammar is not None:
        raise UserError(f"stages draw without a grammar, got {request.grammar}: {remedy}")


class NullCache(NoState):
    """What stands for a cache here: the stages have those of the target.

    Attributes:
        length: tokens that a text may keep of the one before.
    """

    length = 0

    def keepable(self, num_positions: int) -> int:
        """As many as there are."""
        return min(num_positions, self.length)

    def clear(self, num_kept: int = 0) -> None:
        """From now on so many."""
        self.length = num_kept


class RemoteTarget:
    """What stands for the target: the head asks stages instead of scoring."""

    start: tuple[int, ...] = ()
    peak_device_bytes = 0
    computing = nullcontext

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.stream = self
        self.note = self.experts = None

    def new_cache(self) -> NullCache:
        """Nothing."""
        return NullCache()

    def send(self, tensor: Tensor) -> Tensor:
        """It is where it is used."""
        return tensor

    def figures(self) -> list[RankFigures]:
        """Stages do not tell theirs."""
        return []


class PipelineDecoder(Decoder):
    """A `Decoder` over the head of a pipeline; its trees are made of what the draft rank guesses,
    run by run.

    `on_layer` is called when ranks have computed anything.
    """

    def __init__(
        self,
        head: Head,
        vocab_size: int,
        settled: DecoderConfig,
        *,
        resources: ExitStack,
        notes: list[str],
        on_layer: Callable[[], None],
    ) -> None:
        elsewhere: Any = RemoteTarget(vocab_size)
        super().__init__(elsewhere, NoDrafter(), settled, resources=resources, notes=notes)
        self._head = head
        self._on_layer = on_layer
        self._last = list[Sequence]()
        self._is_under_way = False

    def _pass(self, sequences: abc.Sequence[Sequence]) -> list[list[int]]:
        (sequence,) = sequences
        kept = sequence.caches.target.length
        started = time.perf_counter()
        is_known = sequence in self._last
        if not (is_known and self._is_under_way):
            most = sequence.num_prompt_tokens + sequence.limits.max_new_tokens
            self._last, self._head.listen = [sequence], sequence.stats.runs.append
            most_kept = len(sequence.tokens) if is_known else kept
            self._head.begin(
                sequence.tokens, sequence.sampler.sampling, min(most, self.plan.context), most_kept
            )
        # where a step is cut short, the head may have gone further than the text
        self._is_under_way = False
        counted = sequence.accept(self._head.advance(self._on_layer))
        self._is_under_way = True
        if sequence.has_ended:
            self._head.end()
        took_s = time.perf_counter() - started
        sequence.stats.add_step(Transfers(), draft_s=0.0, sweep_s=took_s, verify_s=0.0)
        return [counted]

    def start(
        self,
        request: Request,
        *,
        tree: str | None = None,
        rule: str | None = None,
        continues: bool = False,
    ) -> Run:
        """Start a run as every decoder does. Raises `UserError` as well where stages cannot draw
        the text.
        """
        check_stages(request)
        return super().start(request, tree=tree, rule=rule, continues=continues)

    def _other_rule(self, name: str) -> NoReturn:
        raise UserError(
            f"stages draw by `rule` match alone, got {name}: leave it out, or use `ranks` shards"
        )

    def save_session(self, *_: Any) -> NoReturn:
        """Refused: keys and values lie on all ranks."""
        raise UserError(
            "sessions keep the keys and values of one process, and there are several: leave `ranks` out"
        )

    def load_session(self, *_: Any) -> NoReturn:
        """Refused like `save_session`."""
        self.save_session()


_NUM_TIMES = 2
_LONG_S = 1.0
_LEAST_UNCOMMITTED = 64
_NAME = "offload-rank"


class _Rank(NamedTuple):
    """What one rank knows before it loads."""

    run: ResolvedRun
    transport: Transport
    roles: Roles
    pipeline: PipelineOptions
    layers: tuple[range, ...] = ()  # of the stages, in their order

    @property
    def stage(self) -> int | None:
        """Which one it is, if it is one."""
        return next(
            (index for index, rank in enumerate(self.roles.stages) if rank == self.transport.rank),
            None,
        )

    @property
    def drafts(self) -> bool:
        return self.pipeline.speculates and self.transport.rank == self.roles.draft

    @property
    def num_uncommitted(self) -> int:
        """Rows that every cache has room for behind the committed ones."""
        wanted = (
            2
            * self.pipeline.num_runs(len(self.roles.stages))
            * self.pipeline.num_rows(TIMED_ROWS[-1])
        )
        return min(max(wanted, _LEAST_UNCOMMITTED), MOST_ROWS)

    def section(self, index: int, layers: range) -> Section:
        """Return the section of a stage with these layers."""
        return Section(layers.start, layers.stop, index == 0, index == len(self.roles.stages) - 1)

    def plan(self, index: int, layers: range, room: MemoryBudget) -> MemoryPlan:
        """What this rank takes as that stage, the draft beside it included if it drafts. Raises
        `UserError`.
        """
        files = self.run.files
        own = checkpoint_of(files.target, self.section(index, layers))
        return room.plan(
            ModelFiles(own, files.draft if self.drafts else None), self.num_uncommitted
        )

    def own_plan(self) -> MemoryPlan | None:
        """Plan this rank's stage, once layers are shared out; None if it is no stage.

        Raises `UserError`.
        """
        return (
            None
            if self.stage is None
            else self.plan(self.stage, self.layers[self.stage], self.run.budget)
        )

    @property
    def context(self) -> int:
        """Positions of a text, on every rank."""
        return self.plan(0, range(1), self.run.budget.roomy()).context


def open_pipeline(
    run: ResolvedRun,
    request: Request | None,
    resources: ExitStack,
    transport: Transport | None = None,
) -> PipelineDecoder:
    """The head's decoder, once all ranks have loaded. On any other rank: serve to the end, then
    raise `SystemExit`.

    Raises `UserError` where ranks do not come or do not fit, or the request cannot be served, and
    `ReadError`.
    """
    target = run.files.target
    vocab_size = config_sizes(run.files.target)["vocab_size"]
    roles, pipeline = run.options.pipeline_roles(has_draft=run.files.draft is not None)
    for model in filter(None, run.files):
        if has_encoder(model.config):
            raise UserError(
                f"{model.directory.name}: it has an encoder, and stages have none: leave `ranks` out"
            )
    if request is not None:
        check_stages(request)
    met = meet_ranks(run, resources, transport)
    run.hooks.on_phase("measuring links, sharing layers")
    rank = _Rank(run, met.transport, roles, pipeline)
    is_head = met.transport.rank == 0
    tokenizer = load_tokenizer(target.tokenizer_path) if is_head or rank.drafts else None
    rank = _with_layers(rank, tokenizer)
    plan = try_together(rank.transport, rank.own_plan)
    if is_head and plan is not None and request is not None and request.prompt is not None:
        request.ids(tokenizer, vocab_size, plan.context, plan.has_longest_context)
    run.hooks.on_phase("reading layers")
    services = _load(rank, plan, resources)
    run.hooks.on_phase("timing passes")
    price = _price(rank, services)
    if not is_head:
        services.run()
        raise SystemExit(0)
    head = Head(rank.transport, roles, pipeline, rank.num_uncommitted, price=price)
    services.start(resources)
    resources.callback(head.stop)
    shares = ", ".join(f"{one.start} to {one.stop - 1}" for one in rank.layers)
    drafts = "" if roles.draft is None else f"; rank {roles.draft} drafts"
    notes = [f"layers by stage: {shares}{drafts}", *run.notes, *met.notes]
    assert plan is not None, "rank 0 is a stage"
    settled = _settled(rank, plan, tokenizer)
    on_layer = run.hooks.on_layer
    all_of_it = resources.pop_all()
    return PipelineDecoder(
        head, vocab_size, settled, resources=all_of_it, notes=notes, on_layer=on_layer
    )


def _settled(rank: _Rank, plan: MemoryPlan, tokenizer: Tokenizer | None) -> DecoderConfig:
    """What a decoder has to know; of trees that there are none."""
    files = rank.run.files
    options = rank.run.options
    traffic = Traffic.of(plan)
    trees = TreeSelector(
        TreeSpec("none"), _no_profile, lambda _: traffic, context=plan.context, has_draft=False
    )
    identities = Identities(files, rank.run.open_source)
    models = Models(*files, options.dtype, plan.context, plan.has_longest_context, identities)
    mode = Mode(torch.get_num_threads())
    threads = ThreadPolicy([mode.num_threads], StepModes(mode, mode))
    end_ids = end_ids_of(files.target)
    vocab_size = config_sizes(files.target)["vocab_size"]
    return DecoderConfig(
        plan=plan,
        models=models,
        trees=trees,
        rule=options.rule,
        threads=threads,
        tokenizer=tokenizer,
        end_ids=end_ids,
        grammars=Grammars(tokenizer, vocab_size, end_ids),
        invariance=Invariance(reason="several ranks run it"),
    )


def _no_profile(*_: object) -> tuple[None, str]:
    return None, "no profile is wanted"


def _with_layers(rank: _Rank, tokenizer: Tokenizer | None) -> _Rank:
    """Measure, and share layers out so that the slowest stage is as quick as can be."""
    files = rank.run.files
    room = rank.run.budget.roomy()
    # and measure at one time: links may be the same
    try_together(rank.transport, lambda: _try_least(rank, tokenizer))
    mine = None
    shape = model_shape(files.target, rank.run.options.dtype)
    if rank.stage is not None:
        held = rank.plan(rank.stage, range(len(shape.layer_bytes)), room)
        mine = capacity_of(rank.run, held, shares_kv=True)
    told = all_gather_objects(rank.transport, mine)
    capacities = [RankCapacity(*told[one]) for one in rank.roles.stages]
    layers = stage_layers(
        capacities, Load(shape.layer_bytes, room.plan(files, rank.num_uncommitted).kv_bytes)
    )
    bounds = broadcast_from_head(rank.transport, [(one.start, one.stop) for one in layers])
    return rank._replace(layers=tuple(range(*one) for one in bounds))


def _try_least(rank: _Rank, tokenizer: Tokenizer | None) -> None:
    """Raises `UserError` where a draft has other words, and where there is no room for one layer,
    or for the draft.
    """
    files = rank.run.files
    if rank.drafts and files.draft is not None:
        target, draft = (
            Vocabulary(config_sizes(one)["vocab_size"]) for one in (files.target, files.draft)
        )
        check_vocabulary(tokenizer, files, target, draft)
    if rank.stage is not None:
        rank.plan(rank.stage, range(1), rank.run.budget)
    elif rank.drafts:
        _require_room_for_draft(rank)


def _require_room_for_draft(rank: _Rank) -> None:
    run = rank.run
    draft = rank.run.files.draft
    assert draft is not None, "a rank that drafts has one"
    is_gpu = run.budget.gpu is not None
    shape = model_shape(draft, run.options.dtype)
    needed_bytes = (
        draft_bytes(shape, rank.context, rank.num_uncommitted, is_gpu=is_gpu) + RUNTIME_BYTES
    )
    needed_bytes += noise_bytes(shape.vocab_size) + PATH_SCRATCH_BYTES
    has_bytes = parse_size(run.budget.ram, "`ram`")
    if needed_bytes > has_bytes:
        needed = format_bytes(needed_bytes)
        has = format_bytes(has_bytes)
        raise UserError(
            f"needs {needed} of RAM for the draft, budget is {has}: raise `ram`, or take a smaller draft"
        )


class _Services:
    """What this rank does for the head, each in a thread where it does more than one thing."""

    def __init__(
        self, stage: PipelineStage | None, work: list[Callable[[], None]], device: Device | None
    ) -> None:
        self.stage = stage
        self._work = work
        self._device = device
        self._errors = list[BaseException]()

    def start(self, resources: ExitStack) -> None:
        """Serve beside the calling thread; when `resources` close, all services have ended."""
        for thread in [
            Thread(target=self._guarded, args=(one,), name=_NAME, daemon=True) for one in self._work
        ]:
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
    work = list[Callable[[], None]]()
    stage = None
    if rank.stage is not None and plan is not None:
        stage = _load_stage(rank, rank.stage, plan, resources)
        before = rank.roles.stages[rank.stage - 1] if rank.stage else 0
        after = (
            rank.roles.stages[rank.stage + 1] if rank.stage + 1 < len(rank.roles.stages) else None
        )
        work.append(partial(serve_stage, rank.transport, Neighbours(before, after), stage))
    if rank.drafts:
        work.append(_load_draft(rank))
    if not work:  # a draft's rank, where no guesses are wanted
        work.append(partial(_wait_for_end, rank.transport))
    agree_on(rank.transport)
    return _Services(stage, work, rank.run.device)


def _wait_for_end(transport: Transport) -> None:
    transport.receive(0, Channel.CONTROL)


def _load_stage(rank: _Rank, index: int, plan: MemoryPlan, resources: ExitStack) -> PipelineStage:
    run = rank.run
    section = rank.section(index, rank.layers[index])
    has_host_table = run.device is not None
    model, stream = load_section(
        run, run.files.target, section, plan, resources, has_host_table=has_host_table
    )
    return PipelineStage(model, stream, plan, slow_layer_s=run.options.slow_layer_s)


def _load_draft(rank: _Rank) -> Callable[[], None]:
    files = rank.run.files
    dtype = rank.run.options.dtype
    assert files.draft is not None, "there is one to load"
    if rank.stage is None:
        torch.set_num_threads(rank.run.options.threads or torch.get_num_threads())
    vocab_size = config_sizes(files.target)["vocab_size"]
    tree = DraftTree(
        resident_model(files.draft, dtype, found=rank.run.hooks.on_note),
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
    of_stages = [times for times in all_gather_objects(rank.transport, seconds) if times]
    slowest_s = [max(times) for times in zip(*of_stages, strict=False)]
    if len(slowest_s) == 1:  # so long that it is the link's doing, which does not mind rows
        return RowPrice(0.0, TIMED_ROWS[-1])
    return RowPrice(
        max(0.0, slowest_s[-1] - slowest_s[0]) / (TIMED_ROWS[-1] - 1), free_rows(slowest_s)
    )


def _pass_times(stage: PipelineStage) -> list[float]:
    """Time a pass over one row, and over ever more where it does not take long."""
    seconds = [timed(partial(stage.try_out, 1))]
    for num_rows in TIMED_ROWS[1:] if seconds[0] < _LONG_S else ():
        seconds[0] = min(seconds[0], timed(partial(stage.try_out, 1)))
        seconds.append(min(timed(partial(stage.try_out, num_rows)) for _ in range(_NUM_TIMES)))
    return seconds
