"""Decoders of mixtures whose experts come on demand: what loading holds meanwhile, and what a profile may say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_moe import save_small_moe
from test_profile import profile

import offload
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.open import open_checkpoint
from offload.engine import opening as loading
from offload.errors import UserError
from offload.planning.load_options import LoadOptions
from offload.planning.profile import ExpertUses, Identity, Machine, save_profile
from offload.reports.estimate import estimate
from offload.sampling_options import Sampling

PROMPT = [7, 11, 3, 42, 5]
LOAD: dict[str, Any] = {"ram": "1GiB", "context": 64, "threads": 1, "experts": "demand", "lookup": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_small_moe(tmp_path_factory.mktemp("target"))
    (folder / "tokenizer.json").unlink()
    return folder


def test_samples_are_gone_before_layers_are_read(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried and timed needs a few experts; memory is planned for a pool alone."""
    start, bring, pairs, held = loading.open_layers, loading.read_pair, list[Any](), list[bool]()

    def started(*args: Any) -> Any:
        held.extend("weight_source" in vars(experts.module) for experts in pairs[0].target.experts)
        return start(*args)

    monkeypatch.setattr(loading, "read_pair", lambda pair, *args: pairs.append(pair) or bring(pair, *args))
    monkeypatch.setattr(loading, "open_layers", started)
    with offload.load(target, tree="none", **LOAD) as decoder:
        assert held and not any(held)
        assert len(decoder.generate(PROMPT, max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize("tree", ["3x2", "auto"])
def test_what_a_profile_has_counted_is_compared_with_the_target(
    tree: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named tree gets the routing as a chosen one does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uses = ExpertUses(((6, 1, 0, 0, 3, 6), (0, 0, 8, 8, 0, 0), (1, 1, 1, 1, 6, 6)), 8)
    files = ModelFiles(open_checkpoint(target), open_checkpoint(target))
    assert files.draft is not None
    identity = Identity.from_models(files.target, files.draft, Sampling(), "match", Machine.here("float32"))
    path = save_profile(replace(profile(), identity=identity, expert_uses=uses))
    with offload.load(target, target, tree=tree, **LOAD) as decoder:
        pool, routing = decoder.target.experts, decoder.trees.knowledge.routing
        assert pool is not None and np.array_equal(pool._cache.uses_B > 0, np.array(uses.uses_B) > 0)
        assert routing is not None and routing.distinct(1) == pytest.approx(6, rel=0.1)
    save_profile(replace(profile(), identity=identity, expert_uses=ExpertUses(((3, 5), (1, 2)), 8)))
    with offload.load(target, target, tree=tree, **LOAD) as decoder:
        assert decoder.trees.knowledge.routing is None
        assert len(decoder.generate(PROMPT, max_new_tokens=4).token_ids) == 4
    assert estimate(LoadOptions(target, target, tree=tree, **LOAD)).plan.has_experts
    words = "the named profile counts uses in 2 layers of 2 experts, not 3 of 6: run"
    with pytest.raises(UserError, match=words):
        offload.load(target, target, tree=tree, profile=path, **LOAD)
    with pytest.raises(UserError, match=words):
        estimate(LoadOptions(target, target, tree=tree, profile=path, **LOAD))
