"""What building a model tells is kept on disk: a second plan builds nothing; what is damaged or old is made again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import matrix
from passes import tree_scores
from plans import model_shape
from refusals import set_json
from test_families import WORKING, config_of
from tiny import FAMILIES, build, save

from offload.checkpoint.files import cache_folder
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.model import layer_specs
from offload.model.headers import describe, is_built


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that are built."""
    names: list[str] = []
    right = layer_specs.build_meta_model

    def counted(checkpoint: Any, *given: Any) -> Any:
        names.append(checkpoint.name)
        return right(checkpoint, *given)

    monkeypatch.setattr(layer_specs, "build_meta_model", counted)
    return names


def spec_files() -> list[Path]:
    return sorted((cache_folder() / "specs").glob("*.txt"))


def a_folder(tmp_path: Path) -> Path:
    return save(build(FAMILIES["llama"]()), tmp_path / "model")


def a_config(tmp_path: Path) -> Path:
    save(build(FAMILIES["mixtral"]()), tmp_path / "model")
    path = tmp_path / "alone.json"
    (tmp_path / "model" / "config.json").rename(path)
    return path


@pytest.mark.parametrize("make", [a_folder, a_config])
@pytest.mark.parametrize("damage", ["", "{", '{"versions": ["1", "0", "5.17.0", "2"]}', '{"tensors": 3}', "a letter"])
def test_a_model_is_built_once(make: Any, damage: str, tmp_path: Path, builds: list[str]) -> None:
    path = make(tmp_path)
    assert is_built(path)
    first = describe(path)
    assert not is_built(path)
    assert describe(path).tensors == first.tensors
    assert len(builds) == 1
    (file,) = spec_files()
    if damage:
        other = file.read_text().replace("attention", "attentiom")
        file.write_text(other if damage == "a letter" else damage)
        assert is_built(path)
        assert describe(path).tensors == first.tensors
        assert len(builds) == 2 and not is_built(path)


@matrix("family", [*FAMILIES, *WORKING], always=("llama", "deepseek_v3", "gemma3n_text", "gpt_oss"), daily=4)
@torch.inference_mode()
def test_layers_keep_what_is_told_of_them(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    checkpoint = describe(save(build(config), tmp_path / "model"))
    model = resident_model(checkpoint, "float32")
    cache = model.new_cache(8)
    tree_scores(model, cache, [-1, 0, 1], [1, 2, 3])
    for layer, spec in enumerate(checkpoint.layers):
        held = {name: (tensor.shape[1], tensor.shape[3]) for name, tensor in cache.layer_states(layer).items()}
        index = (1, spec.index_width) if spec.index_width else (0, 0)
        parts = (("keys", spec.keys), ("values", spec.values), ("index", index))
        assert held == {name: kept for name, kept in parts if any(kept)}
    width = sum(spec.cache_width for spec in checkpoint.layers)
    assert model_shape(checkpoint, "float32").kv_bytes_per_token == 4 * width
    assert width or all(spec.states for spec in checkpoint.layers), "a layer keeps something"


def test_a_refusal_is_found_again_and_not_kept(tmp_path: Path, builds: list[str]) -> None:
    folder = a_folder(tmp_path)
    set_json(folder / "config.json", intermediate_size=7)
    for _ in range(2):
        with pytest.raises(UserError, match="must have shape"):
            describe(folder)
    assert len(builds) == 2 and spec_files() == []


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_folder(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert describe(folder).tensors == describe(folder).tensors
    assert len(builds) == 2
