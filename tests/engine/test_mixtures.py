"""Decoders of mixtures whose experts come on demand: what loading holds meanwhile, and what a profile may say."""

from pathlib import Path
from typing import Any

import pytest
from small_moe import save_small_moe

import offload
from offload.engine import load as loading

PROMPT = [7, 11, 3, 42, 5]
LOAD: dict[str, Any] = {"ram": "1GiB", "context": 64, "threads": 1, "experts": "demand", "lookup": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_small_moe(tmp_path_factory.mktemp("target"))
    (folder / "tokenizer.json").unlink()
    return folder


def test_samples_are_gone_before_layers_are_read(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried and timed needs a few experts; memory is planned for a pool alone."""
    start, held = loading._start_stream, list[bool]()

    def started(pair: Any, *args: Any) -> Any:
        held.extend("forward" in experts.module.__dict__ for experts in pair.target.experts)
        return start(pair, *args)

    monkeypatch.setattr(loading, "_start_stream", started)
    with offload.load(target, tree="none", **LOAD) as decoder:
        assert held and not any(held)
        assert len(decoder.generate(PROMPT, max_new_tokens=4).token_ids) == 4
