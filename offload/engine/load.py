"""From a path to a decoder: resolve options, build meta models, place weights, start the stream.

What can be refused is refused before the first weight is read; what was open when a later part
fails is closed again.

What transformers warns of while a model is opened becomes a note, and no line on the stderr of the
program that loads it; the command line collects warnings itself (`cli/libraries.py`). Invariant:
other threads, and handlers of others, hear what they would have heard.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.calibration.invariance import Invariance, make_invariant
from offload.calibration.kernels import NO_KERNELS, KernelChoice, choose_kernels, shapes_of
from offload.calibration.startup import calibrate, pick_threads
from offload.declaration import as_in, called_with
from offload.engine.build import (
    ModelPair,
    counter,
    open_pair,
    read_pair,
    send_beside_layers,
    telling,
)
from offload.engine.decoder import Decoder, DecoderConfig
from offload.engine.hooks import Hooks, Progress
from offload.engine.identities import Identities
from offload.engine.lookup_sources import open_sources
from offload.engine.ranks import LOADERS
from offload.engine.request import Request
from offload.engine.resolve import NO_HOOKS, ResolvedRun, resolve
from offload.engine.session import Models, check_session, require_sessions
from offload.engine.team import Team
from offload.errors import require
from offload.kernels.jit import is_for_kernels
from offload.kernels.registry import KernelSet
from offload.machine import num_cores
from offload.memory.plan import LayerTier, MemoryPlan
from offload.model.cuda_graphs import use_graphs
from offload.model.norms import normalize_with
from offload.options import ModelChoice, ModelOptions
from offload.planning.options import LoadOptions
from offload.planning.selector import RunSettings, TreeSelector
from offload.streaming.device import Device, computing_on
from offload.streaming.disk import DiskReader, OpenSource
from offload.streaming.expert_cache import warm_order
from offload.streaming.experts import ExpertPool, open_pool
from offload.streaming.layers import Layers, open_layers
from offload.threads import ThreadPolicy, thread_ladder
from offload.trees.verification import find_rule, not_exact_line
from offload.units import Sampling, check_lenience

_LIBRARY = "transformers"


@contextmanager
def warned(notes: list[str]) -> Iterator[None]:
    """Meanwhile what this thread has that library write to stderr goes to the notes instead, each
    message once.
    """
    from transformers.utils.logging import get_logger  # the first call gives it its handler

    thread = threading.get_ident()
    logger = get_logger(_LIBRARY)

    def is_for_others(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        line = f"{_LIBRARY}: {' '.join(record.getMessage().split())}"
        if line not in notes:
            notes.append(line)
        return False

    handlers = [handler for handler in logger.handlers if _writes_to_stderr(handler)]
    for handler in handlers:
        handler.addFilter(is_for_others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_for_others)


def _writes_to_stderr(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (
        sys.stderr,
        sys.__stderr__,
    )


@dataclass(frozen=True)
class LoadArguments(ModelOptions, ModelChoice):
    """Arguments of `load`: options, and what only a program can give."""

    _: KW_ONLY
    device: str | Device = as_in(ModelOptions, "device")  # type: ignore[assignment]
    request: Request | None = None
    open_source: OpenSource = DiskReader
    on_bytes: Progress = lambda done, total: None
    on_layer: Callable[[], None] = lambda: None


@called_with(LoadArguments)
def load(given: LoadArguments) -> Decoder:
    """Open a model that need not fit into memory.

    Args:
        {arguments}
        request: the first run, refused here if it must be; its sampling is that of the tree which sets the memory.
        open_source: opens weight files.
        on_bytes: hears of (bytes, bytes in all) as they land: draft, embeddings and head, then the layers that stay.
        on_layer: hears of every layer that a sweep has run; what it raises ends the run, and the next one may begin.

    `device` may be one that is open; `ranks` are the processes that torchrun has started: on rank 0 this returns, any
    other serves until that decoder is closed, and then raises `SystemExit`. docs/flags.md says more of each option.

    Raises:
        UserError: whatever the user can mend, in one line.
    """
    device = given.device
    is_device = isinstance(device, str) or hasattr(device, "place")
    require(
        is_device,
        "`device` must be auto, cpu, cuda, cuda:N or an open one",
        repr(device),
        'try `device="auto"`',
    )
    opened = None if isinstance(device, str) else device
    options = LoadOptions.of(given if opened is None else replace(given, device="cuda"))
    hooks = Hooks(on_bytes=given.on_bytes, on_layer=given.on_layer)
    return _without_warnings(
        given.model,
        given.draft,
        options,
        given.request,
        device=opened,
        open_source=given.open_source,
        hooks=hooks,
    )


def _without_warnings(*asked: Any, **how: Any) -> Decoder:
    """`open_decoder`, with what transformers warns of meanwhile among its notes."""
    notes = list[str]()
    with warned(notes):
        decoder = open_decoder(*asked, **how)
    decoder.notes.extend(notes)
    return decoder


def open_decoder(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None,
    options: LoadOptions,
    request: Request | None = None,
    *,
    device: Device | None = None,
    open_source: OpenSource = DiskReader,
    hooks: Hooks = NO_HOOKS,
    transport: Any = None,
) -> Decoder:
    """Do what `load` does, with its options in one piece.

    `device` is open, `transport` leads to the other ranks of `options.ranks`. Raises what `load`
    raises.
    """
    if request is not None:
        check_lenience(options.lenience, options.rule, request.sampling)
    run = resolve(model, draft, options, device=device, open_source=open_source, hooks=hooks)
    return open_run(run, request, transport)


def open_run(run: ResolvedRun, request: Request | None = None, transport: Any = None) -> Decoder:
    """Build, read and calibrate what `resolve` has decided. Raises what `load` raises."""
    options = run.options
    device = run.device
    hooks = run.hooks
    with computing_on(device), ExitStack() as resources:
        roles = options.roles()
        if roles is not None and not roles.is_sharded:
            pipeline: Decoder = LOADERS["stages"](run, resources, transport, request)
            return pipeline
        team = Team()
        if roles is not None:
            team = LOADERS["shards"](run, resources, transport)
        run = team.own(run)
        files = run.files
        settings = run.settings(request.sampling if request else Sampling())
        trees = run.trees(settings.sampling)
        trees.exchange_s = team.exchange_s
        trees.check(*settings)
        hooks.on_phase("building the models")
        least = run.plan_for(1)
        identities = _identities(run, request, team, least)
        pair = open_pair(
            run, resources, team.adapt, identities=identities, on_demand=least.has_experts
        )
        models = Models(*files, options.dtype, least.context, least.has_longest_context, identities)
        _check_request(request, pair, models)
        has_draft = files.draft is not None
        sources = open_sources(options, pair.tokenizer, pair.target.vocab_size, has_draft=has_draft)
        pair.notes.extend(send_beside_layers(device, least, resources, pair.target, pair.draft))
        hooks.on_phase("reading draft and embeddings" if has_draft else "reading embeddings")
        # the first weights: what can be refused has been
        expanded = read_pair(pair, hooks.on_bytes)
        hooks.on_phase("choosing kernels and threads")
        choice = _pick_kernels(pair, run.plan_for(trees.most_nodes), settings.sampling)
        choice = choice._replace(comparisons=(*choice.comparisons, *expanded))
        kernels = choice.kernels
        threads = _thread_policy(options.threads, pair, run.tree.num_nodes)
        same_bits = partial(
            _make_invariant, options, pair, threads, hooks.on_phase, is_alone=team.is_alone
        )
        invariance = same_bits(least)
        hooks.on_phase(
            "measuring how fast layers come, choosing a tree"
            if run.tree.is_chosen
            else "planning memory"
        )
        plan = _plan_tree(run, trees, pair, settings, threads, kernels)
        invariance = same_bits(plan) if plan.is_streamed and not least.is_streamed else invariance
        team.settle(plan)
        hooks.on_phase("reading layers that stay")
        stream = _start_stream(pair, plan, hooks.on_bytes, resources)
        experts = _open_experts(pair, plan, trees, settings, hooks.on_bytes, resources)
        target = team.target(
            pair.target,
            stream,
            plan,
            kernels=kernels,
            on_layer=telling(pair, hooks),
            experts=experts,
            device=device,
        )
        rule = find_rule(options.rule, options.lenience)
        inexact = [] if rule.is_exact else [not_exact_line(rule)]
        pair.notes.extend([*run.notes, *team.notes, *inexact])
        settled = DecoderConfig(
            plan=plan,
            models=models,
            trees=trees,
            rule=rule,
            threads=threads,
            choice=choice,
            tokenizer=pair.tokenizer,
            end_ids=pair.end_ids,
            invariance=invariance,
            sources=sources,
            grammars=pair.grammars,
        )
        drafter = pair.drafter(plan, kernels, sources, trees.step_s)
        return Decoder(target, drafter, settled, resources=resources.pop_all(), notes=pair.notes)


def _identities(
    run: ResolvedRun, request: Request | None, team: Team, plan: MemoryPlan
) -> Identities:
    """Return the identities of what was opened.

    A sum of all weights is taken on the way where it is wanted, and all of them are read.
    """
    is_wished = (
        request is not None and request.is_for_file and team.is_alone and not plan.has_experts
    )
    limit_bytes_per_s = run.options.limit_bytes_per_s
    return Identities(
        run.files, run.open_source, limit_bytes_per_s=limit_bytes_per_s, is_wished=is_wished
    )


def _check_request(request: Request | None, pair: ModelPair, models: Models) -> None:
    """Raises `UserError` for one that these models cannot serve."""
    if request is None:
        return
    target = pair.target
    bounds = (models.context, models.has_longest_context)
    if request.prompt is not None:
        request.ids(pair.tokenizer, target.vocab_size, *bounds, start=target.start)
    if request.grammar is not None:
        pair.grammars.mask(request.grammar)
    if request.is_kept or request.session is not None:
        require_sessions(target.start)
    if request.session is not None:
        check_session(Path(request.session), models)


def _plan_tree(
    run: ResolvedRun,
    trees: TreeSelector,
    pair: ModelPair,
    settings: RunSettings,
    threads: ThreadPolicy,
    kernels: KernelSet,
) -> MemoryPlan:
    """Settle the tree, and with it the memory plan."""
    if trees.spec.is_chosen:
        calibrate(
            trees,
            pair.target,
            pair.draft,
            pair.store,
            settings,
            threads,
            link=run.measure_link,
            kernels=kernels,
        )
    plan = run.plan_for(trees.nodes_to_plan(*settings))
    trees.settle(plan)
    return plan


def _thread_policy(fixed: int | None, pair: ModelPair, num_rows: int) -> ThreadPolicy:
    """A fixed count as named, or torch's own where a device computes; else the fastest, for sweeps
    of so many rows.
    """
    if fixed is None and pair.device is None:
        return pick_threads(pair.target, pair.draft, num_rows)
    return ThreadPolicy.fixed(fixed or torch.get_num_threads())


def _make_invariant(
    options: LoadOptions,
    pair: ModelPair,
    threads: ThreadPolicy,
    on_phase: Callable[[str], None],
    plan: MemoryPlan,
    *,
    is_alone: bool,
) -> Invariance:
    """Let the target give every row the same bits, where that is wanted and where it can be had.

    Asked by the least plan, and once more where only the chosen tree has brought it to stream
    layers.
    """
    if not is_alone:
        return Invariance(reason="several ranks share its rows")
    if options.invariant is False:
        return Invariance(reason="it is not wanted")
    if options.invariant is None and not plan.is_streamed:
        return Invariance(reason="nothing is streamed, so that it would take time")
    if pair.target.place.type != "cpu" and pair.target.attend is None:
        return Invariance(reason="the kernel of its attention does not run here")
    on_phase("checking that all trees give the same bits")
    counts = [torch.get_num_threads()]
    if pair.device is None:
        counts = sorted({*thread_ladder(num_cores()), threads.start.sweep.num_threads})
    invariance = make_invariant(pair.target, pair.store.fetch, counts, plan.context)
    # it may hold with these alone
    if not invariance.holds and options.threads is not None and len(counts) > 1:
        invariance = make_invariant(pair.target, pair.store.fetch, [options.threads], plan.context)
    if not invariance.holds:
        pair.notes.append(
            f"a tree may swap two tokens that lie closer than rounding ({invariance.reason})"
        )
    return invariance


def _pick_kernels(pair: ModelPair, plan: MemoryPlan, sampling: Sampling) -> KernelChoice:
    """On a GPU those that agree with what runs without them; the draft's small passes are recorded
    with them.
    """
    if pair.device is None or not is_for_kernels(pair.device.place):
        return NO_KERNELS
    choice = choose_kernels(shapes_of(pair.target, plan, sampling, pair.draft), pair.device)
    for model in (pair.target, pair.draft):
        if model is not None:
            model.attend_with(choice.kernels.path_attention)
            normalize_with(model.meta_model, choice.kernels.rms_norm)
    note = (
        use_graphs(pair.draft)
        if pair.draft is not None and pair.draft.place.type == "cuda"
        else None
    )
    pair.notes.extend([note] if note else [])
    return choice


def _open_experts(
    pair: ModelPair,
    plan: MemoryPlan,
    trees: TreeSelector,
    settings: RunSettings,
    on_bytes: Progress,
    resources: ExitStack,
) -> ExpertPool | None:
    """The pool of routed experts, where they come on demand; in it are those that a tune has seen
    used most.
    """
    if not pair.target.experts:
        return None
    profile, _ = trees.find(settings.sampling, settings.rule)
    uses = None if profile is None else profile.expert_uses
    records = [experts.records for experts in pair.target.experts]
    assert all(one.slab_bytes <= plan.expert_slot_bytes for own in records for one in own), (
        "an expert is larger"
    )
    uses_B = None if uses is None else np.array(uses.uses_B)
    pool = open_pool(
        pair.store,
        records,
        plan.num_expert_slots,
        pair.device,
        resources,
        uses_B=uses_B,
        num_host_slots=plan.num_host_expert_slots,
        ahead_rows=trees.ahead_rows(),
    )
    if uses_B is not None:
        blocks = warm_order(uses_B)[: plan.num_kept_experts].tolist()
        pool.warm(
            blocks, counter(sum(pool.records[block].slab_bytes for block in blocks), on_bytes)
        )
    return pool


def _start_stream(
    pair: ModelPair, plan: MemoryPlan, on_bytes: Progress, resources: ExitStack
) -> Layers:
    """Read what stays, and let the first streamed layers follow."""
    model = pair.target
    # samples, to try and to time by; the plan has no room for them beside its own
    model.drop_experts()
    sizes = [layout.slab_bytes for layout in model.layer_layouts]
    assert all(map(le, sizes, plan.layer_bytes)), "a layer is larger than planned"
    staying_bytes = sum(
        size for size, tier in zip(sizes, plan.tier_L, strict=True) if tier is not LayerTier.DISK
    )
    staying_bytes += (
        sum(layout.slab_bytes for layout in model.encoder_layouts) if plan.encoder_bytes else 0
    )
    pair.sights[0].expect(model.layer_layouts, plan.tier_L)
    layers = open_layers(
        pair.store, [*model.layer_layouts, *model.encoder_layouts], plan, pair.device, resources
    )
    layers.load_resident(counter(staying_bytes, on_bytes))
    return layers
