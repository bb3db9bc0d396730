"""What only shows from outside: other packages beside ours, the wheel, the weight of an import, audits and licences."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from shell import ROOT

# What transformers takes from Hugging Face's `kernels` at import, when it finds a version that it supports.
HF_KERNELS_STAND_IN = """
from unittest.mock import MagicMock

CUDAProperties = Device = KernelizeFallback = Mode = ROCMProperties = MagicMock()
LayerRepository = LocalLayerRepository = MagicMock()
get_kernel = kernelize = register_kernel_mapping = replace_kernel_forward_from_hub = use_kernel_mapping = MagicMock()

def use_kernel_forward_from_hub(name):
    return lambda decorated: decorated

use_kernelized_func = use_kernel_forward_from_hub
"""


def assert_runs(code: str, *search_path: Path) -> None:
    """Run `code` in the repository root, which `-c` puts first on the path, as `python -m` does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, search_path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 23),
    reason="older transformers take other versions of Hugging Face's kernels, and other names from it",
)
def test_our_kernels_leave_room_for_hugging_faces(tmp_path: Path) -> None:
    """A folder of the search path holds a distribution `kernels` 0.18.2, with the names transformers asks for."""
    info = tmp_path / "kernels-0.18.2.dist-info"
    for folder in (tmp_path / "kernels", info):
        folder.mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(HF_KERNELS_STAND_IN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    is_in_use = "from transformers.utils import is_kernels_available; assert is_kernels_available(), 'not found'"
    is_theirs = f"import kernels; assert kernels.__file__.startswith({str(tmp_path)!r}), kernels.__file__"
    assert_runs(f"{is_in_use}\n{is_theirs}\nfrom transformers import LlamaForCausalLM", tmp_path)


def test_folders_of_the_wheel_exist() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    folders = targets["wheel"]["packages"] + list(targets["wheel"]["force-include"])
    assert set(folders) == {"offload", "kernels", "bench"}
    assert [f for f in folders if not (ROOT / f).is_dir()] == []
    assert [f for f in folders if f"/{f}" not in targets["sdist"]["include"]] == []


def versions(lines: Iterable[str], operator: str, python: str) -> dict[str, str]:
    """What these requirements say of versions with this operator, where they count for that Python."""
    wanted = [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    ]
    return {
        requirement.name: part.version
        for requirement in wanted
        for part in requirement.specifier
        if part.operator == operator
    }


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_make_test_floor_installs_every_floor(python: str) -> None:
    """Except for what needs a GPU, or brings data sets along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras.keys() - {"cuda12", "cuda13"})]
    pins = [line for line in (ROOT / "constraints-floor.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = versions(pins, "==", python)
    assert len(pinned) >= 9
    floors = [versions(requirements, ">=", python) for requirements in lists]
    assert {name for floor in floors for name in floor} == pinned.keys()
    assert all(pinned[name] == version for floor in floors for name, version in floor.items())


@pytest.mark.parametrize("folder", ["kernels", "bench"])
def test_every_file_has_its_import_path(folder: str) -> None:
    files = sorted(".".join(p.relative_to(ROOT / folder).with_suffix("").parts) for p in (ROOT / folder).rglob("*.py"))
    assert files
    find = "from importlib.util import find_spec"
    assert_runs(f"{find}\nfor f in {files}: assert find_spec(f'offload.{folder}.{{f}}'), f")


def test_the_interface_shows_itself_and_imports_no_torch() -> None:
    """To completion and `help` before any of it was used, and its types to type checkers."""
    assert_runs(
        "import offload, sys; assert set(offload.__all__) <= set(dir(offload))\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "assert all(getattr(offload, name).__doc__ for name in offload.__all__)"
    )
    assert (ROOT / "offload" / "py.typed").is_file()


def supply(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, ROOT / ".ci" / "supply.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_licences_of_all_that_the_wheel_needs() -> None:
    done = supply("licences")
    assert done.returncode == 0, done.stdout
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"torch", "transformers", "jinja2", "safetensors", "uvicorn"} <= names and "pytest" not in names
