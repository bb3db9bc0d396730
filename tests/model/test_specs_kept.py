"""What building a model tells is kept on disk: a second plan builds nothing; what is damaged or old is made anew."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, build, save

from offload.checkpoint.files import cache_folder
from offload.errors import UserError
from offload.model import meta
from offload.model.headers import describe, is_built


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that are built."""
    names: list[str] = []
    right = meta.build_meta_model

    def counted(checkpoint: Any, *given: Any) -> Any:
        names.append(checkpoint.name)
        return right(checkpoint, *given)

    monkeypatch.setattr(meta, "build_meta_model", counted)
    return names


def spec_files() -> list[Path]:
    return sorted((cache_folder() / "specs").glob("*.json"))


def a_folder(tmp_path: Path) -> Path:
    return save(build(FAMILIES["llama"]()), tmp_path / "model")


def a_config(tmp_path: Path) -> Path:
    save(build(FAMILIES["mixtral"]()), tmp_path / "model")
    path = tmp_path / "alone.json"
    (tmp_path / "model" / "config.json").rename(path)
    return path


@pytest.mark.parametrize("make", [a_folder, a_config])
@pytest.mark.parametrize("damage", ["", "{", '{"versions": ["1", "0", "5.17.0", "2"]}', '{"tensors": 3}'])
def test_a_model_is_built_once(make: Any, damage: str, tmp_path: Path, builds: list[str]) -> None:
    path = make(tmp_path)
    assert is_built(path)
    first = describe(path)
    assert not is_built(path)
    assert describe(path).tensors == first.tensors
    assert len(builds) == 1
    (file,) = spec_files()
    if damage:
        file.write_text(damage)
        assert is_built(path)
        assert describe(path).tensors == first.tensors
        assert len(builds) == 2 and not is_built(path)


def test_a_refusal_is_found_again_and_not_kept(tmp_path: Path, builds: list[str]) -> None:
    folder = a_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
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
