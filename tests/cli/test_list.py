"""`offload list`: models of the hub's cache by the names that `-m` takes, and what does not run."""

import json
import shutil
from pathlib import Path

import pytest
from shell import shell
from tiny import FAMILIES, save_pair


def test_models_are_listed_and_what_does_not_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("offload.checkpoint.download.in_cache", lambda name: cached(tmp_path, name))
    assert shell("list").out.startswith("no model was downloaded yet")
    target, _ = save_pair(FAMILIES["llama"](), tmp_path)
    shutil.copytree(target, cached(tmp_path, "org/whole"))
    cached(tmp_path, "org/half").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--org--text" / "snapshots").mkdir(parents=True)
    half, whole = shell("list").out.splitlines()
    assert half.startswith("org/half   does not run: ") and whole.startswith("org/whole") and "billion param" in whole
    told = {one["name"]: one for one in json.loads(shell("list", "--json").out)}
    assert told["org/half"]["num_bytes"] is None and told["org/half"]["refusal"]
    assert told["org/whole"]["num_bytes"] > 1000 and told["org/whole"]["refusal"] is None


def cached(folder: Path, name: str) -> Path:
    return folder / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "0123456789"


@pytest.mark.parametrize(("word", "told"), [("run", "offload chat"), ("pull", "-m ORG/NAME"), ("help", "--help")])
def test_words_of_other_programs_lead_on(word: str, told: str) -> None:
    refused = shell(word, "llama")
    assert refused.code == 2 and refused.err.startswith(f"offload: No such command '{word}': ") and told in refused.err
