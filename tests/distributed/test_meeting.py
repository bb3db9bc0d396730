"""Ranks that have other weights are refused on all of them, also where no sample shows it."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from processes import Ranks
from tiny import FAMILIES, build, save

from offload.checkpoint import identity
from offload.checkpoint.safetensors import open_checkpoint
from offload.distributed import join as meeting
from offload.engine.hooks import Hooks
from offload.engine.resolve import ResolvedRun
from offload.errors import RankError, UserError
from offload.memory.planner import ModelFiles
from offload.planning import load_options as options
from offload.planning.budget import budget_of
from offload.planning.load_options import LoadOptions
from offload.rank_roles import RankInfo


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a copy of it, and one of which a single byte differs."""
    folder = tmp_path_factory.mktemp("ranks")
    save(build(FAMILIES["llama"](), 0), folder / "0")
    for name in ("copy", "edited", "template"):
        shutil.copytree(folder / "0", folder / name)
    checkpoint = open_checkpoint(folder / "edited")
    vector = min(checkpoint.tensors.values(), key=lambda one: one.hi - one.lo)  # which is sampled whole
    path = checkpoint.shards[vector.shard]
    content = bytearray(path.read_bytes())
    content[vector.lo] ^= 1
    path.write_bytes(content)
    (folder / "template" / "chat_template.jinja").write_text("a")
    return folder


def _meet(place: RankInfo, report, folder: Path, *, has_samples: bool) -> None:
    phases = list[str]()
    checkpoint = open_checkpoint(folder)
    with patch.object(options, "require_place", lambda: place):
        shards = LoadOptions(ranks="shards")
    run = ResolvedRun(
        files=ModelFiles(checkpoint, None),
        options=shards,
        tree=shards.tree_spec(has_draft=False),
        device=None,
        budget=budget_of(shards),
        hooks=Hooks(phases.append),
    )
    samples = identity._sampled if has_samples else lambda checkpoint: "0" * 32
    with patch.object(meeting, "require_place", lambda: place), patch.object(identity, "_sampled", samples):
        try:
            with ExitStack() as resources:
                meeting.meet_ranks(run, resources, None)
                report(("met", len(phases)))
        except UserError as error:
            report((str(error), len(phases)))
        except RankError as error:
            # a rank that comes to the same verdict later may hear it from the other one first
            assert error.is_refusal
            report((str(error).split(": ", 1)[1], len(phases)))


def _by_rank(place: RankInfo, report, own: tuple[Path, Path], cache: Path, has_samples: bool) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    _meet(place, report, own[place.rank], has_samples=has_samples)


@pytest.mark.parametrize(
    ("other", "has_samples", "words", "num_phases"),
    [
        ("0", True, "met", 1),
        ("copy", True, "met", 2),
        ("edited", True, "ranks must have the same weights, got '", 1),
        ("edited", False, "ranks must have the same weights, to the last byte, got others on rank 1 than on rank 0", 2),
        ("template", True, "ranks must have the same chat template, got '", 1),
    ],
)
def test_ranks_have_the_same_model(
    other: str, has_samples: bool, words: str, num_phases: int, folders: Path, tmp_path: Path
) -> None:
    """Files that nobody can have changed are not read; a copy is, once."""
    reports = Ranks(2, _by_rank, (folders / "0", folders / other), tmp_path, has_samples).reports()
    for rank in (0, 1):
        [(line, phases)] = reports[rank]
        assert line.startswith(words) and phases == num_phases
