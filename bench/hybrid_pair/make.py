"""Train a hybrid and its full-attention twin, once, and keep them in the cache.

Both see the same windows of the same text in the same order. What they are for is a comparison at
equal loss, so the one that learns faster learns for fewer steps.

Invariant: the folder is whole or not there; a run that is cut goes on where it was.
"""

import zlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
_BEGINNINGS = {HYBRID: hybrid_of, TWIN: twin_of}
_STEP_TOKENS = 512
_TEXT_TOKENS = 256
# where the seeds of windows begin
_LEARNT = 1000


class Recipe(NamedTuple):
    """All that the twins depend on, beside the text."""

    hybrid: Course = Course(800, 2e-3)
    twin: Course = Course(800, 2e-3)
    seed: int = 0
    version: int = 1  # raise it when the same recipe comes to give other models

    @property
    def folder_name(self) -> str:
        return f"hybrid-pair-{zlib.crc32(repr(self).encode()):08x}"


def hybrid_pair(screen: Screen) -> Path:
    """Return the folder of `hybrid` and `twin`, trained when it is not there.

    That takes some half an hour on a core.
    """
    recipe = Recipe()
    folder = cache_folder() / recipe.folder_name
    if folder.exists():
        return folder
    screen.wait("reading the standard library")
    ids = library_ids(held_out=False)
    with workspace(folder) as work:
        for name in _BEGINNINGS:
            trained(name, work, recipe, ids, screen)
        for name in (*(f"{name}.state" for name in _BEGINNINGS), "lock"):
            (work / name).unlink()
        work.replace(folder)
    return folder


def trained(name: str, work: Path, recipe: Recipe, ids: Tensor, screen: Screen) -> PreTrainedModel:
    """Train one of both in `work`, or go on there; write and return it, rounded to bfloat16."""
    model = _BEGINNINGS[name](packaged("target"), recipe.seed)
    course: Course = getattr(recipe, name)
    train(
        model,
        lambda step: next_token_loss(model, _batch(ids, recipe.seed + _LEARNT + step)),
        course,
        work / f"{name}.state",
        partial(screen.count, label=f"training the {name}"),
    )
    write_rounded(model, work / name, COMPANIONS)
    return model


def _batch(ids: Tensor, seed: int) -> Tensor:
    return windows(ids, _STEP_TOKENS, _TEXT_TOKENS, seed)
