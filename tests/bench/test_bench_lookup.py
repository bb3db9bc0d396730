"""Guesses without a model on the bench, as small as it gets: halves of prompts, stores, commands."""

import json
from dataclasses import replace
from typing import Any

import pytest
from shell import Outcome, shell

from offload.bench.harness import command
from offload.bench.harness.prompts import COPY, held_out_files, prompts
from offload.bench.latency import lookup

store_files = lookup.store_files  # the whole, which the tests replace
LEAST = ["--quick", "--size", "60MB", "--num-prompts", "1"]


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store of a few files, a small target, little effort."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        few = store_files()[:6]
        patch.setattr(lookup, "store_files", lambda: few)
        patch.setattr(command, "CEILING_BYTES", 20_000_000)
        patch.setattr(lookup, "QUICK", replace(lookup.QUICK, num_tokens=8, num_plain=2))
        yield


def result_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    assert "gate: " in outcome.out
    figures: dict[str, Any] = json.loads(outcome.out.splitlines()[-1])
    return figures


def test_copies_are_begun_again_and_halves_share_none() -> None:
    halves = [prompts([COPY], 5, slice(first, None, 2)) for first in (0, 1)]
    names = [prompt.name for half in halves for prompt in half]
    assert len(set(names)) == 10
    for prompt in halves[0]:
        name = prompt.text.partition("def ")[2].partition("(")[0]
        assert prompt.text.rstrip("\n").rpartition("\n")[2].startswith(f"def {name}_again(") and prompt.then.strip()


@pytest.mark.full
def test_lookup_measures_every_source() -> None:
    sources = [word for name in ("store", "draft", "draft+store") for word in ("--sources", name)]
    result = result_of(shell("bench", "lookup", *LEAST, *sources))
    rows = {row["name"]: row for row in result["rows"]}
    for texts in ("code", "copy"):
        assert rows[f"{texts}: none"]["tokens_per_sweep"] == 1
        assert rows[f"{texts}: draft+store"]["speedup"] > 0
        ratio = rows[f"{texts}: draft+store"]["tokens_per_sweep"] / rows[f"{texts}: draft"]["tokens_per_sweep"]
        assert rows[f"{texts}: draft+store / draft"]["value"] == ratio


def test_stores_hold_no_prompt() -> None:
    stored, held_out = store_files(), held_out_files()
    # how many there are depends on what was installed of the standard library
    assert len(stored) > 40 < len(held_out) and not set(stored) & set(held_out)
