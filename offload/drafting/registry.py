"""Drafters by name. A new one is a file of its own and a line here."""

from collections.abc import Callable
from typing import NamedTuple

from offload.drafting.base import Drafter
from offload.drafting.model import ModelDrafter
from offload.drafting.none import NoDrafter
from offload.kernels.registry import KernelSet
from offload.model.weights import StreamedModel


class Materials(NamedTuple):
    """What drafters are made of; each takes what it needs."""

    draft: StreamedModel | None  # its weights are bound for good
    vocab_size: int  # V of the target
    num_slots: int  # of a cache: committed positions plus nodes of the largest tree
    kernels: KernelSet


def _of_model(materials: Materials) -> ModelDrafter:
    draft, *others = materials
    assert draft is not None, "there is a draft model to grow trees with"
    return ModelDrafter(draft, *others)


DRAFTERS: dict[str, Callable[[Materials], Drafter]] = {"model": _of_model, "none": lambda _: NoDrafter()}
