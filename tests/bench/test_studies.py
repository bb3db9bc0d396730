"""The studies of bench/, as small as they get: files appear, and the figures obey what must hold."""

import json
from pathlib import Path

import numpy as np
import pytest

import offload
from offload.bench.harness.text_table import aligned
from offload.bench.studies import choice
from offload.bench.studies.acceptance import chances, total_variation
from offload.bench.studies.pair_text import TINY, Pair, logged_rows
from offload.bench.studies.studies import STUDIES, run_study
from offload.bench.studies.tree_walk import walk_all
from offload.cli.demo import PAIR
from offload.config import RULES, Sampling
from offload.tree.spec import parse_tree
from offload.tree.topology import DynamicShape
from offload.tuning import tune


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one study that tunes."""
    for room in (choice, tune):
        monkeypatch.setattr(room, "NUM_NEW", 32)
    monkeypatch.setattr(choice, "_AHEAD", 12)
    monkeypatch.setattr(tune, "bounds_to_count", lambda max_nodes: (DynamicShape(8, 3),))


@pytest.mark.parametrize("name", STUDIES)
def test_study_writes_its_files(name: str, pair: Pair, tmp_path: Path) -> None:
    result = run_study(name, pair, TINY, tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text())["study"] == name
    if name != "traces":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(aligned(result["table"]).splitlines()) >= 2
    for point in with_tokens_per_step(result):
        assert 1 <= point["tokens_per_step"] <= 1 + point.get("depth", 63), point
        assert point["standard_error"] >= 0
        assert point.get("num_nodes") != 1 or point["tokens_per_step"] == 1, point


def with_tokens_per_step(value: object) -> list[dict]:
    """All dictionaries within `value` that have such a figure."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [point for part in inside for point in with_tokens_per_step(part)]
    return [value, *found] if isinstance(value, dict) and "tokens_per_step" in value else found


@pytest.mark.parametrize("tree", ["none", "64x16", "sequences:4x6"])
def test_walks_with_match_are_the_decoders_steps(pair: Pair, tree: str) -> None:
    """Stars instead of trees: the same tokens, cut into the same steps."""
    num_tokens, sampling = 48, Sampling(temperature=0.6, seed=11)
    prompts = pair.prompts("measure", 2)
    walks = walk_all(pair, prompts, parse_tree(tree).build(), "match", sampling)
    walks.run(num_tokens)
    with offload.load(PAIR / "target", PAIR / "draft", dtype="float32", tree=tree, threads=1) as decoder:
        for b, walker in enumerate(walks.walkers):
            run = decoder.generate(prompts[b].tolist(), max_new_tokens=num_tokens, temperature=0.6, seed=11 + b)
            lengths = [run.stats.num_first_tokens, *run.stats.accepted_per_sweep]
            assert walker.tokens[:num_tokens] == run.token_ids
            assert walker.lengths[: len(lengths) - 1] == lengths[:-1]  # the decoder cuts its last step short


def test_chances_are_chances_and_one_child_is_as_good_as_it_gets(pair: Pair) -> None:
    sampling = Sampling(temperature=0.6)
    rows = logged_rows(pair, sampling, 2, 8)
    for rule in RULES:
        sum_R = chances(rule, rows, sampling, 6).sum(1)
        assert (sum_R >= 0).all() and (sum_R <= 1 + 1e-9).all(), rule
    # All transport rules are optimal for one child: over many draws they reject as often as the distributions differ.
    many = type(rows)(rows.target_RV.repeat(60, 1), rows.draft_RV.repeat(60, 1), 60)
    for rule in ("sequoia", "specinfer", "spectr"):
        rejected = 1 - chances(rule, many, sampling, 1).mean()
        assert np.isclose(rejected, total_variation(rows, sampling).mean[0], atol=0.06), rule
