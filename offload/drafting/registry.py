"""Drafters by what there is to draft with. A new one is a file of its own and a line here."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from offload.drafting.base import Drafter
from offload.drafting.hybrid import HybridDrafter
from offload.drafting.lookup import LookupDrafter
from offload.drafting.model import ModelDrafter
from offload.drafting.none import NoDrafter
from offload.drafting.sources import Sources
from offload.drafting.worth import StepSeconds, Worth
from offload.kernels.registry import KernelSet
from offload.model.weights import StreamedModel


class Materials(NamedTuple):
    """What drafters are made of; each takes what it needs."""

    draft: StreamedModel | None  # its weights are bound for good
    vocab_size: int  # V of the target
    num_slots: int  # of a cache: committed positions plus the rows that growing the largest tree may take
    kernels: KernelSet
    sources: Sources
    step_s: StepSeconds


class DrafterKind(NamedTuple):
    """What there is."""

    has_draft: bool
    has_sources: bool


def _of_model(materials: Materials) -> ModelDrafter:
    assert materials.draft is not None, "there is a draft model to grow trees with"
    new_worth = partial(Worth, materials.step_s)
    return ModelDrafter(materials.draft, materials.vocab_size, materials.num_slots, materials.kernels, new_worth)


def _of_sources(materials: Materials) -> LookupDrafter:
    return LookupDrafter(materials.sources, lambda num_rows: materials.step_s(num_rows, ()))


DRAFTERS: dict[DrafterKind, Callable[[Materials], Drafter]] = {
    DrafterKind(has_draft=True, has_sources=True): lambda given: HybridDrafter(_of_model(given), given.sources),
    DrafterKind(has_draft=True, has_sources=False): _of_model,
    DrafterKind(has_draft=False, has_sources=True): _of_sources,
    DrafterKind(has_draft=False, has_sources=False): lambda _: NoDrafter(),
}
