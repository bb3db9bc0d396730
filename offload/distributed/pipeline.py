"""A pipeline of ranks: loading on all of them, the services that each runs, and the head's decoder.

Invariant: every rank checks by itself, and an error on one of them ends all, with its message.
"""

from contextlib import ExitStack
from functools import partial

import torch

from offload.distributed.agreement import agree_on, gather_values, try_together
from offload.distributed.draft import load_draft, serve_draft
from offload.distributed.head import Head, RowPrice
from offload.distributed.join import meet_ranks
from offload.distributed.orders import HEAD
from offload.distributed.pipeline_decoder import PipelineDecoder, check_stages
from offload.distributed.pipeline_rank import PipelineRank, refuse_encoders
from offload.distributed.service import Service, obey, serving
from offload.distributed.stage import load_stage, serve_stage
from offload.distributed.transport import Channel, Transport
from offload.engine.decoder_config import DecoderConfig
from offload.engine.request import Request
from offload.engine.setup import Setup
from offload.engine.tokenizer import load_tokenizer
from offload.memory.plan import MemoryPlan


def open_pipeline(
    setup: Setup, request: Request, resources: ExitStack, transport: Transport | None
) -> PipelineDecoder:
    """Return the head's decoder; on any other rank serve to the end, then raise `SystemExit`.

    Raises `UserError` where ranks or the request do not fit, and `ReadError`.
    """
    roles, pipeline = setup.options.pipeline_roles()
    refuse_encoders(setup.files)
    check_stages(request)
    transport, met_notes = meet_ranks(setup, resources, transport)
    setup.hooks.on_phase("measuring links, sharing layers")
    rank = PipelineRank(setup, transport, roles, pipeline)
    is_head = transport.rank == HEAD
    tokenizer = None
    if is_head or rank.drafts:
        tokenizer = load_tokenizer(setup.files.target.tokenizer_path)
    layers = rank.share_layers(tokenizer)
    plan = try_together(transport, lambda: _own_plan(rank, layers))
    if is_head and plan is not None and request.prompt is not None:
        request.ids(tokenizer, rank.vocab_size, plan.context, plan.has_longest_context)
    setup.hooks.on_phase("reading layers")
    services, price = _load(rank, layers, plan, resources)
    if not is_head or plan is None:
        for service in services:
            service()
        raise SystemExit(0)
    head = Head(transport, roles, pipeline, rank.num_uncommitted, price=price)
    resources.enter_context(serving(services, transport, setup.device))
    resources.callback(head.stop)
    shares = ", ".join(f"{stage.start} to {stage.stop - 1}" for stage in layers)
    drafts = "" if roles.draft is None else f"; rank {roles.draft} drafts"
    notes = [f"layers by stage: {shares}{drafts}", *setup.notes, *met_notes]
    config = DecoderConfig.without_trees(setup, plan, tokenizer)
    return PipelineDecoder(
        head, config, rank.vocab_size, setup.hooks, resources=resources.pop_all(), notes=notes
    )


def _own_plan(rank: PipelineRank, layers: tuple[range, ...]) -> MemoryPlan | None:
    """Plan this rank's stage, if it has one. Raises `UserError`."""
    return (
        None if rank.stage is None else rank.plan(rank.stage, layers[rank.stage], rank.setup.budget)
    )


def _load(
    rank: PipelineRank, layers: tuple[range, ...], plan: MemoryPlan | None, resources: ExitStack
) -> tuple[list[Service], RowPrice]:
    """Load this rank's part; return its services, and the price of rows at the slowest stage.

    A rank that is not the head has one service.
    """
    services = list[Service]()
    stage = None
    if rank.stage is not None and plan is not None:
        stage = load_stage(
            rank.setup, rank.section(rank.stage, layers[rank.stage]), plan, resources
        )
        others = rank.roles.stages
        before = others[rank.stage - 1] if rank.stage else HEAD
        after = others[rank.stage + 1] if rank.stage + 1 < len(others) else None
        services.append(partial(serve_stage, rank.transport, before, after, stage))
    if rank.drafts:
        if stage is None:
            torch.set_num_threads(rank.setup.options.threads or torch.get_num_threads())
        note_pass = partial(rank.transport.note_work, "draft", is_under_way=True)
        tree = load_draft(rank.setup, rank.context, rank.num_uncommitted, note_pass)
        services.append(partial(serve_draft, rank.transport, tree))
    if not services:  # a draft rank whose guesses are not wanted waits for the end
        services.append(partial(obey, rank.transport, HEAD, Channel.CONTROL, {}))
    agree_on(rank.transport)
    rank.setup.hooks.on_phase("timing passes")
    price = RowPrice()
    if rank.pipeline.speculates:  # measured while all stages try it; only guesses need it
        seconds = [] if stage is None else stage.pass_times()
        by_rank = gather_values(rank.transport, seconds, list[float])
        price = RowPrice.from_times([times for times in by_rank if times])
    return services, price
