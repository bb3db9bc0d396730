"""Both models of a decoder: opened, proved to fit each other, and filled with weights.

What reads no weights and what does are apart, so that everything that can be refused is refused in
between.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from typing import NamedTuple

import torch
from torch import nn

from offload.calibration.expansions import choose_expansion
from offload.calibration.trial import ComparisonOutcome
from offload.checkpoint.generation_config import generation_settings
from offload.checkpoint.hub import are_same, other_vocabulary
from offload.checkpoint.safetensors import Checkpoint
from offload.drafting.base import Drafter
from offload.drafting.dynamic import StepSeconds
from offload.drafting.hybrid import DRAFTERS, DrafterInputs, DrafterKind
from offload.drafting.lookup import GuessSources
from offload.engine.hooks import Hooks, Progress
from offload.engine.identities import Identities
from offload.engine.resolve import ResolvedRun
from offload.engine.text import Tokenizer, load_tokenizer
from offload.errors import UserError
from offload.kernels.registry import KernelSet
from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles
from offload.model.encoder_decoder import open_model
from offload.model.experts import sample_of
from offload.model.streamed import StreamedModel
from offload.sampling.grammar_mask import Grammars
from offload.streaming.device import CudaDevice, Device
from offload.streaming.disk import ByteSource, DiskReader, OpenSource
from offload.streaming.scan import TURNS, WeightScan

_HOST = torch.device("cpu")


class ModelPair(NamedTuple):
    """Both models without the target's layers."""

    target: StreamedModel  # embeddings and head are bound
    draft: StreamedModel | None  # all of it is
    store: ByteSource  # of the target
    open_source: OpenSource
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    device: Device | None  # that both compute on; None is the CPU
    notes: list[str]  # for the user
    sights: tuple[WeightScan, ...]  # of what is read of both
    damage: list[str]  # what they have found that is not finite
    grammars: Grammars  # that texts may be asked to keep
    identities: Identities  # of what both hold

    def drafter(
        self, plan: MemoryPlan, kernels: KernelSet, sources: GuessSources, step_s: StepSeconds
    ) -> Drafter:
        """What grows the trees."""
        kind = DrafterKind(has_draft=self.draft is not None, has_sources=bool(sources))
        materials = DrafterInputs(
            self.draft, self.target.vocab_size, plan.draft_slots, kernels, sources, step_s
        )
        return DRAFTERS[kind](materials)


def open_pair(
    run: ResolvedRun,
    resources: ExitStack,
    adapt: Callable[[nn.Module], None] = lambda meta_model: None,
    *,
    identities: Identities,
    on_demand: bool = False,
) -> ModelPair:
    """Meta models with their tokenizer and the file reader; `adapt` may change the target's before
    it has weights.

    `identities` see what is read. With `on_demand` the target's routed experts come one by one, see
    `BoundModel`.

    Raises `UserError` where the two do not fit each other.
    """
    files = run.files
    options = run.options
    device = run.device
    place = _HOST if device is None else device.place
    has_host_table = device is not None
    target = open_model(
        files.target,
        options.dtype,
        place,
        has_host_table=has_host_table,
        adapt=adapt,
        on_demand=on_demand,
    )
    end_ids = end_ids_of(files.target)
    resources.callback(target.close)
    tokenizer = load_tokenizer(files.target.tokenizer_path)
    draft = None
    if files.draft is not None:
        draft = open_model(files.draft, options.dtype, place)
        resources.callback(draft.close)
        check_vocabulary(tokenizer, files, target, draft)
    damage = list[str]()
    sights = tuple(WeightScan(one, damage.append) for one in files if one is not None)
    store = run.open_source(
        files.target.shards,
        stamps=files.target.stamps,
        rate_limit_bytes_per_s=options.limit_bytes_per_s,
        sight=identities.watching("target", sights[0]),
    )
    resources.callback(store.close)
    grammars = Grammars(tokenizer, target.vocab_size, end_ids)
    return ModelPair(
        target,
        draft,
        store,
        run.open_source,
        tokenizer,
        end_ids,
        device,
        notes=[],
        sights=sights,
        damage=damage,
        grammars=grammars,
        identities=identities,
    )


def read_pair(pair: ModelPair, on_bytes: Progress) -> list[ComparisonOutcome]:
    """All of the draft, and of the target what lies around its layers.

    Returns the trials of how coded weights are expanded. These come before layers are read, since a
    held draft expands its own once and then has none left to try.
    """
    total_bytes = pair.target.rest_bytes
    draft = pair.draft
    if draft is not None:
        layouts = (*draft.layer_layouts, *draft.encoder_layouts)
        total_bytes += draft.rest_bytes + sum(layout.slab_bytes for layout in layouts)
    count = counter(total_bytes, on_bytes)
    count(pair.target.read_rest(pair.store.fetch))
    if pair.target.experts:
        pair.target.bring_experts(
            sample_of(pair.target.experts[0].records, pair.store.fetch, pair.target.place)
        )
    outcomes = _pick_expansion(pair, pair.target, pair.store)
    if draft is not None:
        files = draft.checkpoint
        sight = pair.identities.watching("draft", pair.sights[1])
        options = {"stamps": files.stamps, "rate_limit_bytes_per_s": None, "sight": sight}
        with closing(pair.open_source(files.shards, **options)) as source:
            count(draft.read_rest(source.fetch, pair.target))
            outcomes += _pick_expansion(pair, draft, source)
            _fill_layers(draft, source, count)
    return outcomes


def send_beside_layers(
    device: Device | None, plan: MemoryPlan, resources: ExitStack, *models: StreamedModel | None
) -> list[str]:
    """On a GPU that layers are streamed to, let what these models send pass the layers; lines for
    the user.
    """
    if not isinstance(device, CudaDevice) or not plan.is_streamed:
        return []
    refusal = device.stage_uploads(resources)
    for model in filter(None, models):
        model.send_with(device.upload)
    return [] if refusal is None else [refusal]


def telling(pair: ModelPair, hooks: Hooks) -> Callable[[], None]:
    """`on_layer` for a target that notes, once, what weights show: of the first sweeps behind each,
    of experts as they come.
    """
    num_layers = pair.target.num_layers
    num_done = 0

    def on_layer() -> None:
        nonlocal num_done
        num_done += 1
        if num_done <= TURNS * num_layers and num_done % num_layers == 0:
            tell(line for sight in pair.sights for line in sight.news())
        if num_done >= num_layers:
            tell(pair.damage)
        hooks.on_layer()

    def tell(lines: Iterable[str]) -> None:
        for line in dict.fromkeys(lines):
            if line not in pair.notes:
                pair.notes.append(line)
                hooks.on_note(line)

    return on_layer


def _pick_expansion(
    pair: ModelPair, model: StreamedModel, store: ByteSource
) -> list[ComparisonOutcome]:
    """How its coded weights are expanded, and what the trials were."""
    choice = choose_expansion(model, store.fetch, pair.device)
    model.expand_with(choice.expansion)
    pair.notes.extend(note for note in choice.notes if note not in pair.notes)
    return list(choice.comparisons)


def counter(total_bytes: int, on_bytes: Progress) -> Callable[[int], None]:
    """What to call for every slab that has landed."""
    landed = 0

    def count(num_bytes: int) -> None:
        nonlocal landed
        landed += num_bytes
        on_bytes(landed, total_bytes)

    return count


def resident_model(
    checkpoint: Checkpoint,
    dtype: str,
    place: torch.device = _HOST,
    *,
    found: Callable[[str], None] | None = None,
) -> StreamedModel:
    """A small model with all its weights in memory, looked at if `found` is there to hear as
    `WeightScan` has it.
    """
    model = open_model(checkpoint, dtype, place)
    sight = None if found is None else WeightScan(checkpoint, found)
    with closing(DiskReader(checkpoint.shards, stamps=checkpoint.stamps, sight=sight)) as store:
        model.read_rest(store.fetch)
        if place == _HOST:
            model.expand_with(choose_expansion(model, store.fetch, None).expansion)
        _fill_layers(model, store, lambda _: None)
    return model


def _fill_layers(model: StreamedModel, store: ByteSource, count: Callable[[int], None]) -> None:
    """Bind all layers, one by one."""
    for layer, layout in enumerate([*model.layer_layouts, *model.encoder_layouts]):
        model.bind_layer(layer, store.fetch(layout))
        model.hold_layer(layer)
        count(layout.slab_bytes)
    if model.held is not None:
        model.held.settle()


class Vocabulary(NamedTuple):
    """The vocabulary of a model, as a `StreamedModel` has it."""

    vocab_size: int
    start: tuple[int, ...] = ()


def check_vocabulary(
    tokenizer: Tokenizer | None,
    files: ModelFiles,
    target: StreamedModel | Vocabulary,
    drafter: StreamedModel | Vocabulary,
) -> None:
    """Same ids, same meaning. Widths may differ where only padding does, which tokenizers can tell.

    Raises `UserError`.
    """
    draft = files.draft
    assert draft is not None, "there is one to compare with"
    draft_tokenizer = load_tokenizer(draft.tokenizer_path)
    same = target.vocab_size == drafter.vocab_size
    if tokenizer is not None and draft_tokenizer is not None:
        is_exact = not any(os.path.isfile(one.tokenizer_path) for one in (files.target, draft))
        same = are_same(tokenizer.get_vocab(), draft_tokenizer.get_vocab(), is_exact=is_exact)
    if not same:
        raise other_vocabulary(draft.directory.name, target.vocab_size, drafter.vocab_size)
    if target.start != drafter.start:
        what = f"{draft.directory.name}: decoder_start_token_id must be the target's, {target.start[0]}"
        raise UserError(
            f"{what}, got {drafter.start[0]}: take another draft, or mend its generation_config.json"
        )


def end_ids_of(checkpoint: Checkpoint) -> frozenset[int]:
    """Tokens that end a sequence, as transformers finds them: the generation config first, then the
    model's.
    """
    named = generation_settings(checkpoint).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int for token in ids):
        raise UserError(
            f"{checkpoint.directory.name}: eos_token_id must be a token id or several, got {named!r}: fix it"
        )
    return frozenset(ids)
