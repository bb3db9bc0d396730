"""What users meet of the options is what it was: help, settings, doors, refusals, plans.

`GOLDENS=write pytest -n 0 --full tests/goldens` writes the files, after a change that is meant; the diff shows it.
A refusal is one entry of `errors.json`: the door and what is asked there, and the whole line that is said of it. A new
one is a new key with any value, written likewise.
"""

import json
import os
from pathlib import Path
from typing import Any

import observed
import pytest

HERE = Path(__file__).parent
ERRORS = HERE / "errors.json"
REFUSED = [(door, asked) for door, lines in json.loads(ERRORS.read_text()).items() for asked in lines]
pytestmark = [pytest.mark.usefixtures("_instant_link", "_no_weights")]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal so wide that no help is broken into lines."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.parametrize("name", ["help", "settings", "http", "doors", "plans"])
def test_nothing_is_lost(name: str, tmp_path: Path, sound: Path) -> None:
    result = observe(name, tmp_path, sound)
    file = HERE / f"{name}.json"
    if os.environ.get("GOLDENS") == "write":
        file.write_text(compact(result))
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))


@pytest.mark.parametrize(("door", "asked"), REFUSED)
def test_what_cannot_be_is_refused_in_this_line(door: str, asked: str, tmp_path: Path, sound: Path) -> None:
    line = observed.said_at(door, asked, tmp_path, sound).replace(str(sound), "MODEL").replace(str(tmp_path), "FOLDER")
    lines = json.loads(ERRORS.read_text())
    if os.environ.get("GOLDENS") == "write":
        lines[door][asked] = line
        ERRORS.write_text(compact(lines))
    assert line == lines[door][asked]


def observe(name: str, folder: Path, model: Path) -> Any:
    (folder / "empty").mkdir()
    options = {
        "help": observed.help_texts,
        "settings": lambda: observed.settings(folder),
        "http": observed.http_schemas,
        "doors": lambda: observed.names_of_doors(folder, model),
        "plans": lambda: observed.plans(folder),
    }
    return options[name]()


def compact(tables: Any) -> str:
    """One entry a line, two levels deep."""
    lines = []
    for name, entry in tables.items():
        inner = (
            [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()]
            if isinstance(entry, dict)
            else []
        )
        body = "{\n" + ",\n".join(inner) + "\n }" if inner else json.dumps(entry)
        lines.append(f" {json.dumps(name)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
