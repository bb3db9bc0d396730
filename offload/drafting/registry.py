"""The proposer for each kind of draft, see `planning.draft_kinds`."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.drafting.base import Proposer
from offload.drafting.dynamic import DraftPassPolicy, StepSeconds
from offload.drafting.join import JoinedDrafter
from offload.drafting.lookup import GuessSources, LookupDrafter
from offload.drafting.model_drafter import DraftSetup
from offload.drafting.scouting import TieredDrafter
from offload.kernels.registry import KernelSet
from offload.model.encoder_decoder import EncoderDecoderModel
from offload.model.tree_model import TreeModel
from offload.planning.draft_kinds import KINDS
from offload.streaming.device import HOST


def open_model(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    torch_device: torch.device = HOST.torch_device,
    **settings: Any,
) -> TreeModel:
    """Return a target or a draft without its layers' weights. Raises `UserError`."""
    usual = EncoderDecoderModel if checkpoint.has_encoder else TreeModel
    kind: type[TreeModel] = getattr(_module(checkpoint), "MODEL", usual)
    return kind(checkpoint, dtype, torch_device, **settings)


def open_draft(
    files: ModelFiles, dtype: str, torch_device: torch.device, *, on_demand: bool = False
) -> TreeModel | None:
    """Return the draft's model, before its layers are read; None without a draft model.

    With `on_demand` its experts are read when passes need them.
    """
    if files.draft is None:
        return None
    return open_model(files.draft, dtype, torch_device, on_demand=on_demand)


def open_drafter(
    draft: TreeModel,
    vocab_size: int,
    num_slots: int,
    kernels: KernelSet,
    new_policy: Callable[[], DraftPassPolicy] = DraftPassPolicy,
    scout: TreeModel | None = None,
) -> Any:
    """Return the proposer of a draft model, without other sources; see `DraftSetup`.

    Below a copy there may be a scout.
    """
    setup = DraftSetup(draft, vocab_size, num_slots, kernels, new_policy)
    if scout is not None:
        below = _module(scout.checkpoint).open_proposer(setup._replace(model=scout))
        return TieredDrafter(setup, below)
    return _module(draft.checkpoint).open_proposer(setup)


def proposer_of(
    draft: TreeModel | None,
    vocab_size: int,
    num_slots: int,
    kernels: KernelSet,
    sources: GuessSources,
    step_s: StepSeconds,
    *,
    scout: TreeModel | None = None,
) -> Proposer:
    """Return the proposer: a draft, other sources, both, or with neither one of root-only trees.

    See `DraftSetup`.
    """
    if draft is None:
        return LookupDrafter(sources, lambda num_rows: step_s(num_rows, ()))
    policy = partial(DraftPassPolicy, step_s)
    drafter = open_drafter(draft, vocab_size, num_slots, kernels, policy, scout)
    joined: Proposer = JoinedDrafter(drafter, sources) if sources else drafter
    return joined


def _module(draft: Checkpoint) -> Any:
    return import_module(KINDS[draft.draft_kind].opens)
