"""Train a hybrid and its full-attention twin, once, and keep them in the cache.

Both see the same windows of the same text in the same order, at the same pace. What they are for is
a comparison at equal loss, so the one that learns faster stops earlier.

Invariant: the folder is whole or not there; a run that is cut goes on where it was.
"""

import json
import zlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offload.bench.harness.screen import Screen
from offload.bench.hybrid_pair.twins import hybrid_of, twin_of
from offload.bench.moe_pair.corpus import library_ids, windows
from offload.bench.moe_pair.losses import next_token_loss
from offload.bench.moe_pair.make import workspace
from offload.bench.moe_pair.training import Course, packaged, train, write_rounded
from offload.bench.moe_pair.upcycle import COMPANIONS
from offload.checkpoint.files import cache_folder

HYBRID = "hybrid"
TWIN = "twin"
FIGURES = "figures.json"
_BEGINNINGS = {HYBRID: hybrid_of, TWIN: twin_of}
_STEP_TOKENS = 512
_TEXT_TOKENS = 256
_NUM_HELD_OUT = 192
_BATCH = 16
# where the seeds of windows begin
_LEARNT = 1000


class Recipe(NamedTuple):
    """All that the twins depend on, beside the text."""

    course: Course = Course(800, 2e-3)
    # where each has the same loss on held-out text
    hybrid_steps: int = 200
    twin_steps: int = 250
    seed: int = 0
    version: int = 1  # raise it when the same recipe comes to give other models

    @property
    def folder_name(self) -> str:
        return f"hybrid-pair-{zlib.crc32(repr(self).encode()):08x}"


def hybrid_pair(screen: Screen) -> Path:
    """Return the folder of `hybrid` and `twin`, trained when it is not there.

    That takes some five minutes on a core.
    """
    recipe = Recipe()
    folder = cache_folder() / recipe.folder_name
    if folder.exists():
        return folder
    screen.wait("reading the standard library")
    ids = library_ids(held_out=False)
    held_out = library_ids(held_out=True)
    with workspace(folder) as work:
        losses = {}
        for name in _BEGINNINGS:
            model = trained(name, work, recipe, ids, screen)
            losses[name] = held_out_loss(model, held_out)
        (work / FIGURES).write_text(json.dumps(losses, indent=2) + "\n")
        for name in (*(f"{name}.state" for name in _BEGINNINGS), "lock"):
            (work / name).unlink()
        work.replace(folder)
    return folder


def trained(name: str, work: Path, recipe: Recipe, ids: Tensor, screen: Screen) -> PreTrainedModel:
    """Train one of both in `work`, or go on there; write and return it, rounded to bfloat16."""
    model = _BEGINNINGS[name](packaged("target"), recipe.seed)
    train(
        model,
        lambda step: next_token_loss(model, _batch(ids, recipe.seed + _LEARNT + step)),
        recipe.course,
        work / f"{name}.state",
        partial(screen.count, label=f"training the {name}"),
        recipe.hybrid_steps if name == HYBRID else recipe.twin_steps,
    )
    write_rounded(model, work / name, COMPANIONS)
    return model


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, ids: Tensor) -> float:
    """Return nats a token on texts spread over all that was kept back."""
    rows = ids[: len(ids) // _TEXT_TOKENS * _TEXT_TOKENS].view(-1, _TEXT_TOKENS)
    batches = rows[:: max(1, len(rows) // _NUM_HELD_OUT)][:_NUM_HELD_OUT].split(_BATCH)
    losses = [next_token_loss(model, batch).item() for batch in batches]
    return sum(losses) / len(losses)


def _batch(ids: Tensor, seed: int) -> Tensor:
    return windows(ids, _STEP_TOKENS, _TEXT_TOKENS, seed)
