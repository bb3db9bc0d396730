"""Both models of a decoder: opened, checked against each other and the request, then filled.

Functions that read weights are separate from those that do not, so that everything that can be
refused is refused in between.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from offload.calibration.expansions import KernelChoice, choose_expansion
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import counter
from offload.drafting.registry import open_draft, open_model
from offload.engine.decoder_config import TextRules
from offload.engine.identities import Identities
from offload.engine.request import Request
from offload.engine.session import check_session, require_sessions
from offload.engine.setup import Setup
from offload.engine.tokenizer import (
    Tokenizer,
    Vocabulary,
    check_vocabulary,
    class_note,
    foreign_note,
    load_tokenizer,
)
from offload.model.tree_model import TreeModel
from offload.streaming.device import HOST, Device
from offload.streaming.disk import ByteSource, DiskReader, Watcher
from offload.streaming.scan import TURNS, WeightScan


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Both models without the target's layers, as `resolve` decided on them.

    `notes` are for the user, `damage` lists numbers that are not finite in either model.
    """

    setup: Setup
    target: TreeModel
    draft: TreeModel | None
    scout: TreeModel | None  # below a draft that is a copy
    source: ByteSource
    tokenizer: Tokenizer | None
    texts: TextRules
    notes: list[str]
    scans: tuple[WeightScan, ...]
    damage: list[str]
    identities: Identities


def open_pair(
    setup: Setup,
    request: Request,
    resources: ExitStack,
    adapt: Callable[[nn.Module], None] | None,
    *,
    is_summed: bool,
) -> ModelPair:
    """Open meta models with their tokenizer and the target's files, for a first request.

    Args:
        adapt: changes the target's model before it has weights.
        is_summed: sum up all weights as they are read, for files that will name the models.

    Raises `UserError` if the two do not fit each other, or cannot serve the request.
    """
    files = setup.files
    dtype = setup.dtype
    torch_device = setup.device.torch_device
    plan = setup.minimal_plan
    target = open_model(
        files.target,
        dtype,
        torch_device,
        has_host_table=setup.device.has_own_memory,
        adapt=adapt,
        on_demand=plan.has_experts,
    )
    resources.callback(target.close)
    tokenizer = load_tokenizer(files.target.tokenizer_path)
    drafts = _open_drafts(setup, target, tokenizer, resources)
    limit = setup.options.limit_bytes_per_s
    identities = Identities(
        files, setup.open_source, dtype=dtype, limit_bytes_per_s=limit, is_wished=is_summed
    )
    damage = list[str]()
    scans = tuple(
        WeightScan(checkpoint, damage.append)
        for checkpoint in (files.target, *(draft.checkpoint for draft in drafts))
    )
    source = _open_files(setup, files.target, limit, identities.watching("target", scans[0].look))
    resources.callback(source.close)
    pair = ModelPair(
        setup=setup,
        target=target,
        draft=next(iter(drafts), None),
        scout=next(iter(drafts[1:]), None),
        source=source,
        tokenizer=tokenizer,
        texts=TextRules.from_checkpoint(files.target, tokenizer, target.vocab_size),
        notes=_notes(setup, drafts, tokenizer),
        scans=scans,
        damage=damage,
        identities=identities,
    )
    _check(pair, request)
    return pair


def _open_drafts(
    setup: Setup, target: TreeModel, tokenizer: Tokenizer | None, resources: ExitStack
) -> list[TreeModel]:
    """Return the draft, and the scout below it, as far as they are named. Raises `UserError`."""
    files = setup.files
    drafts = list[TreeModel]()
    on_demand = setup.minimal_plan.num_draft_expert_slots > 0
    open_next = partial(open_draft, on_demand=on_demand)
    while (draft := open_next(files, setup.dtype, setup.device.torch_device)) is not None:
        resources.callback(draft.close)
        words = (Vocabulary(model.vocab_size, model.start_ids) for model in (target, draft))
        draft.foreign_ids = check_vocabulary(tokenizer, files, *words)
        drafts.append(draft)
        files = files._replace(draft=draft.checkpoint.scout)
    return drafts


def _notes(setup: Setup, drafts: Iterable[TreeModel], tokenizer: Tokenizer | None) -> list[str]:
    """Return lines for the user on features that the models lack."""
    notes = [foreign_note(draft.foreign_ids) for draft in drafts if draft.foreign_ids]
    if (note := class_note(setup.files.target.tokenizer_path, tokenizer)) is not None:
        notes.append(note)
    if (plan := setup.minimal_plan).turns:
        notes.append(
            f"a text that grows beyond {plan.turning_point} tokens is read anew once: longrope turns "
            "its positions by other factors from there on"
        )
    return notes


def _check(pair: ModelPair, request: Request) -> None:
    """Raise `UserError` for a request that these models cannot serve."""
    plan = pair.setup.minimal_plan
    start_ids = pair.target.start_ids
    if request.prompt is not None:
        bounds = (plan.context, plan.has_longest_context)
        request.ids(pair.tokenizer, pair.target.vocab_size, *bounds, start_ids=start_ids)
    if request.grammar is not None:
        pair.texts.grammars.mask(request.grammar)
    if request.is_kept or request.session is not None:
        require_sessions(start_ids, kv_dtype=plan.kv_dtype)
    if request.session is not None:
        check_session(Path(request.session), pair.identities, plan)


def open_draft_files(pair: ModelPair) -> ByteSource:
    """Return the files of the draft, for experts that come on demand."""
    assert pair.draft is not None, "a draft has experts"
    limit = pair.setup.options.limit_bytes_per_s
    return _open_files(pair.setup, pair.draft.checkpoint, limit, pair.scans[1].look)


def _open_files(
    setup: Setup, checkpoint: Checkpoint, limit_bytes_per_s: float | None, watcher: Watcher
) -> ByteSource:
    return setup.open_source(
        checkpoint.shards,
        stamps=checkpoint.stamps,
        rate_limit_bytes_per_s=limit_bytes_per_s,
        watcher=watcher,
    )


def read_pair(pair: ModelPair) -> list[KernelChoice]:
    """Read all of the drafts, and the target's weights outside its layers.

    Returns how each model's coded weights are expanded. That is tried before layers are read, since
    a quantised draft expands its own once and then has none left to try.
    """
    target = pair.target
    drafts = [draft for draft in (pair.draft, pair.scout) if draft is not None]
    total_bytes = target.rest_bytes
    total_bytes += sum(draft.rest_bytes + draft.layers_bytes for draft in drafts)
    count = counter(total_bytes, pair.setup.hooks.on_bytes)
    count(target.read_rest(pair.source.fetch))
    target.bring_samples(pair.source.fetch)
    choices = [_pick_expansion(pair, target, pair.source)]
    for draft, scan in zip(drafts, pair.scans[1:], strict=True):
        is_named = draft is pair.draft
        watcher = pair.identities.watching("draft", scan.look) if is_named else scan.look
        source = _open_files(pair.setup, draft.checkpoint, None, watcher)
        with closing(source):
            count(draft.read_rest(source.fetch, target))
            draft.bring_samples(source.fetch)
            choices.append(_pick_expansion(pair, draft, source))
            draft.bind_layers(source.fetch, count)
    return choices


def send_beside_layers(
    device: Device, resources: ExitStack, *models: TreeModel | None
) -> list[str]:
    """Make these models send inputs past the layers that stream to a GPU; return notes."""
    refusal = device.open_uploads(resources)
    for model in filter(None, models):
        model.set_uploader(device.upload)
    return [] if refusal is None else [refusal]


def layer_callback(pair: ModelPair) -> Callable[[int], None]:
    """Return `on_layer` for a target: after first sweeps it reports findings about weights."""
    hooks = pair.setup.hooks
    num_layers = pair.target.num_layers
    num_done = 0

    def on_layer(_: int) -> None:
        nonlocal num_done
        num_done += 1
        if num_done <= TURNS * num_layers and num_done % num_layers == 0:
            tell(line for scan in pair.scans for line in scan.news())
        if num_done >= num_layers:
            tell(pair.damage)
        hooks.on_layer()

    def tell(lines: Iterable[str]) -> None:
        for line in dict.fromkeys(lines):
            if line not in pair.notes:
                pair.notes.append(line)
                hooks.on_note(line)

    return on_layer


def _pick_expansion(pair: ModelPair, model: TreeModel, source: ByteSource) -> KernelChoice:
    """Choose how a model's coded weights are expanded, and configure it so."""
    choice = choose_expansion(model, source.fetch, pair.setup.device)
    model.set_expansion(choice.kernels)
    pair.notes.extend(note for note in choice.notes if note not in pair.notes)
    return choice


def resident_model(
    checkpoint: Checkpoint,
    dtype: str,
    torch_device: torch.device = HOST.torch_device,
    *,
    on_note: Callable[[str], None] | None = None,
) -> TreeModel:
    """Return a small model in memory; `on_note` is called with findings, see `WeightScan`."""
    model = open_model(checkpoint, dtype, torch_device)
    watcher = None if on_note is None else WeightScan(checkpoint, on_note).look
    with closing(
        DiskReader(checkpoint.shards, stamps=checkpoint.stamps, watcher=watcher)
    ) as source:
        model.read_rest(source.fetch)
        if torch_device == HOST.torch_device:
            model.set_expansion(choose_expansion(model, source.fetch, HOST).kernels)
        model.bind_layers(source.fetch)
    return model
