"""From a path to a decoder: read headers, plan memory, build meta models, place weights, start the stream.

Everything that can be refused is refused before the first weight is read. What has been opened when a later part fails
is closed again.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from offload.calibration.copy_choice import choose_copies
from offload.calibration.device_link import card_link_bytes_per_s
from offload.calibration.kernel_selection import NO_KERNELS, KernelChoice, choose_kernels, shapes_of
from offload.calibration.startup import Situation, look_around, make_trees, pick_num_threads
from offload.checkpoint.hub import fetch
from offload.checkpoint.safetensors import Checkpoint, read_json
from offload.config import Sampling, parse_rate
from offload.drafting.base import Drafter
from offload.drafting.registry import DRAFTERS, Materials
from offload.engine.decoder import Decoder
from offload.engine.options import check_options
from offload.engine.request import Request
from offload.engine.text import Tokenizer, load_tokenizer
from offload.errors import UserError
from offload.kernels.jit import is_for_kernels
from offload.kernels.registry import KernelSet
from offload.memory.plan import MemoryPlan, Tier
from offload.memory.planner import default_gpu_bytes, default_ram_bytes, plan_memory, ram_warning
from offload.model.cuda_graphs import use_graphs
from offload.model.target import Target
from offload.model.weights import StreamedModel
from offload.planning.tree_policy import Trees
from offload.streaming.device import CudaDevice, Device, open_device
from offload.streaming.disk import DiskReader
from offload.streaming.layers import Layers, open_layers
from offload.streaming.source import ByteSource, OpenSource
from offload.verification.rules import Rule, find_rule

Progress = Callable[[int, int], None]  # bytes landed, bytes in all
_HOST = torch.device("cpu")


def load(
    model: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    ram: str | int | None = None,
    tree: str = "auto",
    rule: str = "match",
    *,
    device: str | Device = "auto",
    gpu_memory: str | int | None = None,
    dtype: str = "auto",
    context: int | None = None,
    threads: int | None = None,
    request: Request | None = None,
    profile: str | os.PathLike[str] | None = None,
    link_limit: str | int | None = None,
    open_source: OpenSource = DiskReader,
    on_bytes: Progress = lambda done, total: None,
    on_layer: Callable[[], None] = lambda: None,
) -> Decoder:
    """Open a model that need not fit into memory.

    Args:
        model, draft: folders or hub ids of the target and of a small model with its vocabulary; None drafts nothing.
        ram: budget such as `8GiB` for everything this call and later generations allocate; default: what is free.
        tree: `auto`, `none`, `NxD`, `grown:NxD`, `chain:L` or `sequences:KxL`; `auto` chooses for this machine.
        rule: of acceptance, one of `config.RULES`; generations may choose another that needs no more memory.
        device, gpu_memory: `auto`, `cpu`, `cuda`, `cuda:N` or an open one; a budget on it, default: what is free there.
        dtype: to compute in, `auto` as stored; context: room for prompt and new tokens, default 4096 or the model's.
        request: the first run, refused here if it must be; its sampling is that of the tree which sets the memory.
        threads, profile: to compute with; file of `offload tune`, or `none`; default: the fastest, the cached one.
        open_source, link_limit: opens weight files; bytes per second, such as `400MB`, that it slows the target's to.
        on_bytes: hears of (bytes, bytes in all) as they land: draft, embeddings and head, then the layers that stay.
        on_layer: hears of every layer that a sweep has run; what it raises ends the run, and the next one may begin.

    Raises:
        UserError: whatever the user can mend, in one line.
    """
    wish = check_options(
        draft is not None, tree, rule, ram=ram, dtype=dtype, context=context, threads=threads, profile=profile
    )
    card, limit = open_device(device, gpu_memory), parse_rate(link_limit, "`link_limit`")
    situation = Situation(request.sampling if request else Sampling(), rule, threads)
    plan_of = _planner(ram, card, gpu_memory, dtype=dtype, context=context, rule=rule)
    names, least_nodes = [model] if draft is None else [model, draft], 1 if wish.kind == "auto" else wish.num_nodes
    files = _Files(*fetch(names, lambda *headers: plan_of(_Files(*headers), least_nodes)))
    plan_for = partial(plan_of, files)
    trees = make_trees(wish, *files, dtype, profile, plan_for, device=card.name if card else "cpu")
    trees.check(situation.sampling, rule)
    with ExitStack() as resources:
        pair = _open_pair(files, dtype, partial(open_source, rate_limit_bytes_per_s=limit), resources, card, ram)
        if request is not None and request.prompt is not None:
            request.ids(pair.tokenizer, pair.target.vocab_size, plan_for(1).context)
        _read_pair(pair, plan_for(1), on_bytes, resources)  # the first weights: what can be refused has been
        choice = _pick_kernels(pair, trees, plan_for, situation.sampling)
        plan, num_threads = _plan_tree(trees, pair, situation, plan_for, choice.kernels)
        stream = _start_stream(pair, plan, on_bytes, resources)
        target = Target(pair.target, stream, plan, device=card, kernels=choice.kernels, on_layer=on_layer)
        return _assemble(
            pair, target, plan, trees, find_rule(rule), choice, num_threads=num_threads, resources=resources
        )


class _Files(NamedTuple):
    """Both checkpoints."""

    target: Checkpoint
    draft: Checkpoint | None = None


class _Pair(NamedTuple):
    """Both models without the target's layers."""

    target: StreamedModel  # embeddings and head are bound
    draft: StreamedModel | None  # all of it is
    store: ByteSource  # of the target
    open_source: OpenSource
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    card: Device | None  # that both compute on; None is the CPU
    notes: list[str]  # for the user

    def drafter(self, plan: MemoryPlan, kernels: KernelSet) -> Drafter:
        """What grows the trees."""
        make = DRAFTERS["none" if self.draft is None else "model"]
        return make(Materials(self.draft, self.target.vocab_size, plan.cache_slots, kernels))


def _planner(
    ram: str | int | None, card: Device | None, gpu: str | int | None, **settings: Any
) -> Callable[[_Files, int], MemoryPlan]:
    """Plans for trees of any size against one budget: what is free must not be asked again while loading takes some."""
    settings["ram"] = default_ram_bytes() if ram is None else ram
    if card is not None:
        settings |= {"device": "cuda", "gpu": default_gpu_bytes(str(card.place)) if gpu is None else gpu}
    return lambda files, num_nodes: plan_memory(*files, num_nodes=num_nodes, **settings)


def _open_pair(
    files: _Files, dtype: str, open_source: OpenSource, resources: ExitStack, card: Device | None,
    ram: str | int | None,
) -> _Pair:  # fmt: skip
    place = _HOST if card is None else card.place
    target = StreamedModel(files.target, dtype, place, has_host_table=card is not None)
    end_ids = _end_ids(files.target)
    resources.callback(target.close)
    notes = [] if ram is None else [line for line in [ram_warning(ram)] if line]
    tokenizer, draft = load_tokenizer(files.target.directory), None
    if files.draft is not None:
        draft = StreamedModel(files.draft, dtype, place)
        resources.callback(draft.close)
        _check_vocabulary(tokenizer, files.draft, target, draft)
    store = open_source(files.target.shards)
    resources.callback(store.close)
    return _Pair(target, draft, store, open_source, tokenizer, end_ids, card, notes)


def _read_pair(pair: _Pair, least: MemoryPlan, on_bytes: Progress, resources: ExitStack) -> None:
    """All of the draft, and of the target what lies around its layers."""
    _pick_copies(pair, least, resources)
    layouts = [pair.target.rest_layout]
    if pair.draft is not None:
        layouts += [pair.draft.rest_layout, *pair.draft.layer_layouts]
    count = _counter(sum(layout.slab_bytes for layout in layouts), on_bytes)
    if pair.draft is not None:
        _fill(pair.draft, pair.open_source(pair.draft.checkpoint.shards, rate_limit_bytes_per_s=None), count)
        note = use_graphs(pair.draft) if pair.draft.place.type == "cuda" else None
        pair.notes.extend([note] if note else [])
    pair.target.bind_rest(pair.store.fetch(pair.target.rest_layout))
    count(pair.target.rest_layout.slab_bytes)


def _counter(total_bytes: int, on_bytes: Progress) -> Callable[[int], None]:
    """What to call for every slab that has landed."""
    landed = 0

    def count(num_bytes: int) -> None:
        nonlocal landed
        landed += num_bytes
        on_bytes(landed, total_bytes)

    return count


def _plan_tree(
    trees: Trees, pair: _Pair, situation: Situation, plan_for: Callable[[int], MemoryPlan], kernels: KernelSet
) -> tuple[MemoryPlan, int]:
    """Settle the tree, and with it the memory plan and the number of compute threads."""
    if pair.card is not None and situation.threads is None:
        situation = situation._replace(threads=torch.get_num_threads())  # which the GPU does not compute with
    num_threads = situation.threads
    if pair.draft is not None and trees.wish.kind == "auto":
        link = None if pair.card is None else partial(_link_to_card, pair, plan_for(1))
        num_threads = look_around(trees, pair.target, pair.draft, pair.store, situation, link=link, kernels=kernels)
    plan = plan_for(trees.for_run(situation.sampling, situation.rule).shape.num_nodes)
    trees.settle(plan)
    num_threads = num_threads or pick_num_threads(pair.target, plan.num_nodes)
    torch.set_num_threads(num_threads)
    return plan, num_threads


def _link_to_card(pair: _Pair, plan: MemoryPlan) -> float:
    assert pair.card is not None, "there is a link to it"
    limit_bytes_per_s = pair.store.rate_limit_bytes_per_s
    return card_link_bytes_per_s(pair.card, plan, pair.store.paths, limit_bytes_per_s=limit_bytes_per_s)


def _pick_kernels(pair: _Pair, trees: Trees, plan_for: Callable[[int], MemoryPlan], sampling: Sampling) -> KernelChoice:
    """On a GPU those that are faster there than what runs without them; timed while most of it is still empty.

    Before a tree is chosen, which should go by the times of these, hence at the size of the largest that may be.
    """
    if pair.card is None or not is_for_kernels(pair.card.place):
        return NO_KERNELS
    plan = plan_for(trees.most_nodes)
    return choose_kernels(shapes_of(pair.target, plan, sampling, pair.draft), pair.card)


def _pick_copies(pair: _Pair, plan: MemoryPlan, resources: ExitStack) -> None:
    """On a GPU that layers are streamed to: how they leave room for what is small, and how that is sent."""
    card = pair.card
    if not isinstance(card, CudaDevice) or not plan.streamed_bytes:
        return
    arena = card.open_allocator()
    resources.callback(arena.close)
    resources.callback(card.stage_uploads, None)
    choose_copies(card, arena)
    for model in (pair.target, pair.draft):
        if model is not None:
            model.send_with(card.upload)


def resident_model(checkpoint: Checkpoint, dtype: str, place: torch.device = _HOST) -> StreamedModel:
    """A small model with all its weights in memory, bound for good."""
    model = StreamedModel(checkpoint, dtype, place)
    _fill(model, DiskReader(checkpoint.shards))
    return model


def _fill(model: StreamedModel, store: ByteSource, count: Callable[[int], None] = lambda _: None) -> None:
    """Bind all weights; the source is closed."""
    try:
        model.bind_rest(store.fetch(model.rest_layout))
        count(model.rest_layout.slab_bytes)
        for layer, layout in enumerate(model.layer_layouts):
            model.bind_layer(layer, store.fetch(layout))
            count(layout.slab_bytes)
    finally:
        store.close()


def _assemble(
    pair: _Pair, target: Target, plan: MemoryPlan, trees: Trees, rule: Rule, choice: KernelChoice, *,
    num_threads: int, resources: ExitStack,
) -> Decoder:  # fmt: skip
    return Decoder(
        target,
        pair.drafter(plan, choice.kernels),
        plan=plan,
        trees=trees,
        rule=rule,
        tokenizer=pair.tokenizer,
        end_ids=pair.end_ids,
        num_threads=num_threads,
        resources=resources.pop_all(),
        notes=pair.notes,
        choice=choice,
    )


def _start_stream(pair: _Pair, plan: MemoryPlan, on_bytes: Progress, resources: ExitStack) -> Layers:
    """Read what stays, and let the first streamed layers follow."""
    model = pair.target
    planned = zip(model.layer_layouts, plan.layer_bytes, strict=True)
    assert all(layout.slab_bytes <= size for layout, size in planned), "a layer is larger than planned"
    stays = [
        layout.slab_bytes
        for layout, tier in zip(model.layer_layouts, plan.tier_L, strict=True)
        if tier is not Tier.DISK
    ]
    layers = open_layers(pair.store, model.layer_layouts, plan, pair.card, resources)
    layers.load_resident(_counter(sum(stays), on_bytes))
    return layers


def _check_vocabulary(
    tokenizer: Tokenizer | None, draft: Checkpoint, target: StreamedModel, drafter: StreamedModel
) -> None:
    """Same ids, same meaning. Widths may differ where only padding does, which tokenizers can tell."""
    draft_tokenizer = load_tokenizer(draft.directory)
    if tokenizer is not None and draft_tokenizer is not None:
        same = tokenizer.get_vocab() == draft_tokenizer.get_vocab()
    else:
        same = target.vocab_size == drafter.vocab_size
    if not same:
        raise UserError(
            f"the draft must share the target's vocabulary, {draft.directory.name} has {drafter.vocab_size} entries "
            f"of its own against {target.vocab_size}: choose a smaller model of the target's family"
        )


def _end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Tokens that end a sequence, as transformers finds them: the generation config first, then the model's."""
    settings = checkpoint.config
    if (checkpoint.directory / "generation_config.json").is_file():
        settings = {**settings, **read_json(checkpoint.directory / "generation_config.json")}
    named = settings.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int for token in ids):
        raise UserError(
            f"{checkpoint.directory.name}: eos_token_id must be a token id or several, got {named!r}: fix it"
        )
    return frozenset(ids)
