"""Train a small mixture of experts and its draft, once, and keep them in the cache.

What experts on demand gain depends on how a text routes and on how often a draft is right, so both
models have to be trained, and benches must run where no model hub can be reached.

Invariant: the folder is whole or not there; a run that is cut goes on where it was.
"""

import fcntl
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from offload.bench.harness.screen import Screen
from offload.bench.harness.setting import Setting
from offload.bench.moe_pair.corpus import library_ids, windows
from offload.bench.moe_pair.losses import draft_loss, held_out_figures, kept_texts, target_loss
from offload.bench.moe_pair.training import Course, packaged, train, write_rounded
from offload.bench.moe_pair.upcycle import COMPANIONS, ExpertSizes, upcycled
from offload.checkpoint.files import cache_folder
from offload.checkpoint.packaged import inflated_target
from offload.errors import UserError
from offload.units import parse_size

_STEP_TOKENS = 2048
_TEXT_TOKENS = 256
_LONG_TEXT_TOKENS = 512
_SHORT_SHARE = 0.75
# where the seeds of windows begin
_MEASURED = 99
_LEARNT = 1000
_STATES = ("target.state", "draft.state", "written.safetensors", "lock")


class Recipe(NamedTuple):
    """All that a pair depends on, beside the text."""

    sizes: ExpertSizes = ExpertSizes()
    target: Course = Course(500, 1e-3)
    draft: Course = Course(350, 5e-4)
    seed: int = 0
    version: int = 1  # raise it when the same recipe comes to give another pair

    @property
    def folder_name(self) -> str:
        return f"moe-pair-{zlib.crc32(repr(self).encode()):08x}"


def moe_pair(screen: Screen) -> Path:
    """Return the folder of `target` and `draft`, trained when it is not there.

    That takes some twenty minutes on a core.
    """
    recipe = Recipe()
    folder = cache_folder() / recipe.folder_name
    if folder.exists():
        return folder
    screen.wait("reading the standard library")
    ids = library_ids(held_out=False)
    held_out = library_ids(held_out=True)
    with workspace(folder) as work:
        make_pair(work, recipe, ids, held_out, screen)
        for name in _STATES:
            (work / name).unlink()
        work.replace(folder)
    return folder


def make_pair(work: Path, recipe: Recipe, ids: Tensor, held_out: Tensor, screen: Screen) -> None:
    """Train both models in `work`, or go on there; write them and `figures.json`."""
    measured = windows(ids, 2 * _STEP_TOKENS, _TEXT_TOKENS, recipe.seed + _MEASURED)
    target = upcycled(packaged("target"), recipe.sizes, measured, recipe.seed)
    target.set_experts_implementation("grouped_mm")
    batch = partial(_batch, ids, recipe)
    train(
        target,
        lambda step: target_loss(target, batch(step)).sum(),
        recipe.target,
        work / "target.state",
        partial(screen.count, label="training the target"),
    )
    # rounds it, so that the draft learns from what is stored
    write_rounded(target, work / "target", COMPANIONS)
    screen.wait("writing what the draft learns from")
    texts = kept_texts(work / "written.safetensors", target, ids, recipe.seed)
    draft = packaged("draft")
    train(
        draft,
        lambda step: draft_loss(draft, target, _draft_batch(texts, batch, step, recipe)),
        recipe.draft,
        work / "draft.state",
        partial(screen.count, label="training its draft"),
    )
    write_rounded(draft, work / "draft", COMPANIONS)
    figures = held_out_figures(target, draft, held_out, _TEXT_TOKENS)
    (work / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")


def moe_setting(size: str, ram: str | None, screen: Screen) -> Setting:
    """Return the pair with its target inflated to `size`; both are made when not in the cache.

    Raises `UserError`.
    """
    size_bytes = parse_size(size, "--size")
    pair = moe_pair(screen)
    progress = partial(screen.bytes_landed, label="making the target")
    made = inflated_target(size_bytes, progress, pair / "target", "moe")
    return Setting(
        made, pair / "draft", pair / "target", parse_size(ram or size_bytes // 4, "--ram")
    )


def _batch(ids: Tensor, recipe: Recipe, step: int) -> Tensor:
    """Return short texts, and at last longer ones, so that late positions are trained too."""
    is_short = step < _SHORT_SHARE * recipe.target.num_steps
    length = _TEXT_TOKENS if is_short else _LONG_TEXT_TOKENS
    return windows(ids, _STEP_TOKENS, length, recipe.seed + _LEARNT + step)


def _draft_batch(
    texts_BS: Tensor, batch: Callable[[int], Tensor], step: int, recipe: Recipe
) -> Tensor:
    """Return by turns what the target wrote and the corpus."""
    if step % 2:
        return batch(step)
    generator = torch.Generator().manual_seed(recipe.seed + _LEARNT + step)
    num_texts = _STEP_TOKENS // texts_BS.shape[1]
    return texts_BS[torch.randint(0, len(texts_BS), (num_texts,), generator=generator)]


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Yield a locked folder beside `folder`, left as it is when the run is cut.

    Raises `UserError` while another run is on.
    """
    work = folder.with_name(f".{folder.name}.training")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process trains in {work}: wait for it") from None
        yield work


def main(
    size: Annotated[
        str | None, typer.Option(help="inflate the target to this, too", metavar="SIZE")
    ] = None,
) -> None:
    """Train the mixture of experts that other commands measure with; say what it is worth."""
    with Screen(is_quiet=False) as screen:
        target = None if size is None else moe_setting(size, None, screen).target
        pair = moe_pair(screen)
    print((pair / "figures.json").read_text(), end="")
    print(f"target {target or pair / 'target'}\ndraft  {pair / 'draft'}")


main.epilog = "Examples:\n\noffload bench moe-pair --size 3GB"  # type: ignore[attr-defined]
