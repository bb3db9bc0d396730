"""What `make audit`, `licences` and `sbom` rest on: an audit that has looked at nothing is no audit."""

import json
import runpy
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
from shell import ROOT

SOUND = {"name": "a", "version": "1", "vulns": []}
HOLE = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNSEEN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def supply(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, ROOT / ".ci" / "supply.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        ([SOUND], 0, "1 of 1 packages audited, 0 advisories"),
        ([SOUND, HOLE], 1, "b 2: CVE-1, mended in 3"),
        ([SOUND, UNSEEN], 1, "NOT audited: 1 packages, such as ['torch"),
        ([UNSEEN], 1, "0 of 1 packages audited"),
        ([], 1, "NOT audited"),
        (None, 1, "the advisory database cannot be reached"),
    ],
)
def test_an_audit_is_judged(found: Any, code: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    if found is not None:
        path.write_text(json.dumps({"dependencies": found}))
    told = supply("judge", path)
    assert told.returncode == code and words in told.stdout + told.stderr


def test_licences_of_all_that_the_wheel_needs() -> None:
    told = supply("licences")
    assert told.returncode == 0, told.stdout
    names = {line.split()[0] for line in told.stdout.splitlines()}
    assert {"torch", "transformers", "jinja2", "safetensors", "uvicorn"} <= names and "pytest" not in names


@pytest.mark.parametrize(("file", "is_none"), [("toolkit-1.dist-info/WHEEL", True), ("toolkit/cuda.so", False)])
def test_a_package_of_packages_needs_no_licence(file: str, is_none: bool, tmp_path: Path) -> None:
    info = tmp_path / "toolkit-1.dist-info"
    info.mkdir()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    (info / "RECORD").write_text(f"toolkit-1.dist-info/METADATA,,\n{file},,\n")
    holds_nothing = runpy.run_path(str(ROOT / ".ci" / "supply.py"))["holds_nothing"]
    assert holds_nothing(PathDistribution(info)) is is_none


def test_pins_name_what_is_installed() -> None:
    wheel, whole = (set(supply("pins", which).stdout.split()) for which in ("wheel", "environment"))
    assert wheel <= whole and any(one.startswith("pytest==") for one in whole - wheel)
    assert not any("+" in one or one.startswith("offload==") for one in whole), "an index has no such build"
