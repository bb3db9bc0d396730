"""A pipeline of ranks: loading on all of them, the services that each runs, and the head's decoder.

Invariant: every rank refuses by itself; what one of them refuses ends all, with its line.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Thread

import torch

from offload.distributed.draft import load_draft, serve_draft
from offload.distributed.head import Head, RowPrice
from offload.distributed.join import meet_ranks
from offload.distributed.orders import HEAD, agree_on, all_gather_objects, try_together
from offload.distributed.pipeline_decoder import PipelineDecoder, check_stages, settled_of
from offload.distributed.pipeline_rank import PipelineRank, refuse_encoders, with_layers
from offload.distributed.stage import load_stage, serve_stage
from offload.distributed.transport import Channel, Transport
from offload.engine.request import Request
from offload.engine.resolve import ResolvedRun
from offload.engine.text import load_tokenizer
from offload.streaming.device import Device


def open_pipeline(
    run: ResolvedRun,
    resources: ExitStack,
    transport: Transport | None = None,
    request: Request | None = None,
) -> PipelineDecoder:
    """Return the head's decoder; on any other rank serve to the end, then raise `SystemExit`.

    Raises `UserError` where ranks or the request do not fit, and `ReadError`.
    """
    roles, pipeline = run.options.pipeline_roles(has_draft=run.files.draft is not None)
    refuse_encoders(run.files)
    if request is not None:
        check_stages(request)
    transport, met_notes = meet_ranks(run, resources, transport)
    run.hooks.on_phase("measuring links, sharing layers")
    rank = PipelineRank(run, transport, roles, pipeline, None)
    is_head = transport.rank == 0
    if is_head or rank.drafts:
        rank = rank._replace(tokenizer=load_tokenizer(run.files.target.tokenizer_path))
    rank = with_layers(rank)
    plan = try_together(transport, rank.own_plan)
    if is_head and plan is not None and request is not None and request.prompt is not None:
        request.ids(rank.tokenizer, rank.vocab_size, plan.context, plan.has_longest_context)
    run.hooks.on_phase("reading layers")
    services, price = _load(rank, resources)
    if not is_head:
        services.run()
        raise SystemExit(0)
    head = Head(transport, roles, pipeline, rank.num_uncommitted, price=price)
    services.start(resources)
    resources.callback(head.stop)
    shares = ", ".join(f"{one.start} to {one.stop - 1}" for one in rank.layers)
    drafts = "" if roles.draft is None else f"; rank {roles.draft} drafts"
    notes = [f"layers by stage: {shares}{drafts}", *run.notes, *met_notes]
    settled = settled_of(rank)
    return PipelineDecoder(head, rank, settled, resources=resources.pop_all(), notes=notes)


class Services:
    """What this rank does for the head, each in a thread of its own."""

    def __init__(self, work: list[Callable[[], object]], device: Device) -> None:
        self._work = work
        self._device = device
        self._errors = list[BaseException]()

    def start(self, resources: ExitStack) -> None:
        """Serve beside the calling thread; when `resources` close, all services have ended."""
        for one in self._work:
            thread = Thread(target=self._guarded, args=(one,), name="offload-rank", daemon=True)
            thread.start()
            resources.callback(thread.join)

    def run(self) -> None:
        """Serve to the end. Raises what a service has raised."""
        with ExitStack() as threads:
            self.start(threads)
        if self._errors:
            raise self._errors[0]

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            with self._device.computing():
                work()
        except BaseException as error:  # raised by `run`; the head has been told
            self._errors.append(error)


def _load(rank: PipelineRank, resources: ExitStack) -> tuple[Services, RowPrice]:
    """Read what this rank computes with; return its services, and what rows cost at the slowest."""
    work = list[Callable[[], object]]()
    seconds = list[float]()
    stage = None
    plan = rank.own_plan()
    if rank.stage is not None and plan is not None:
        section = rank.section(rank.stage, rank.layers[rank.stage])
        stage = load_stage(rank.run, section, plan, resources)
        others = rank.roles.stages
        before = others[rank.stage - 1] if rank.stage else HEAD
        after = others[rank.stage + 1] if rank.stage + 1 < len(others) else None
        work.append(partial(serve_stage, rank.transport, before, after, stage))
    if rank.drafts:
        if stage is None:
            torch.set_num_threads(rank.run.options.threads or torch.get_num_threads())
        tree = load_draft(rank.run, rank.context, rank.num_uncommitted)
        work.append(partial(serve_draft, rank.transport, tree))
    if not work:  # a draft's rank, where no guesses are wanted, waits for the end
        work.append(partial(rank.transport.receive, HEAD, Channel.CONTROL))
    agree_on(rank.transport)
    rank.run.hooks.on_phase("timing passes")
    price = RowPrice()
    if rank.pipeline.speculates:  # while all stages try it; of use to guesses alone
        seconds = [] if stage is None else stage.pass_times()
        by_rank = all_gather_objects(rank.transport, seconds)
        price = RowPrice.of([times for times in by_rank if times])
    return Services(work, rank.run.device), price
