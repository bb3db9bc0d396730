"""What only shows from outside: other packages beside ours, the folders of the wheel, the weight of an import."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]

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


def run_python(code: str, *search_path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in the repository root, which `-c` puts first on the path, as `python -m` does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, search_path))}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def assert_runs(code: str, *search_path: Path) -> None:
    done = run_python(code, *search_path)
    assert done.returncode == 0, done.stderr


as_of_today = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 23),
    reason="older transformers take other versions of Hugging Face's kernels, and other names from it",
)


@pytest.fixture
def hf_kernels(tmp_path: Path) -> Path:
    """A folder for the search path that holds a distribution `kernels` 0.18.2, with the names transformers asks for."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(HF_KERNELS_STAND_IN)
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    return tmp_path


@as_of_today
def test_our_kernels_leave_room_for_hugging_faces(hf_kernels: Path) -> None:
    is_in_use = "from transformers.utils import is_kernels_available; assert is_kernels_available(), 'not found'"
    is_theirs = f"import kernels; assert kernels.__file__.startswith({str(hf_kernels)!r}), kernels.__file__"
    assert_runs(f"{is_in_use}\n{is_theirs}\nfrom transformers import LlamaForCausalLM", hf_kernels)


def test_folders_of_the_wheel_exist() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    folders = targets["wheel"]["packages"] + list(targets["wheel"]["force-include"])
    assert set(folders) == {"offload", "kernels", "bench"}
    assert [f for f in folders if not (ROOT / f).is_dir()] == []
    assert [f for f in folders if f"/{f}" not in targets["sdist"]["include"]] == []


def versions(lines: Iterable[str], operator: str, python: str) -> dict[str, str]:
    """What these requirements say of versions with this operator, where they count for that Python."""
    wanted = [
        one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"python_version": python})
    ]
    return {one.name: part.version for one in wanted for part in one.specifier if part.operator == operator}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_make_test_floor_installs_every_floor(python: str) -> None:
    """But for what needs a GPU, or brings data sets along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras.keys() - {"cuda12", "cuda13", "eval"})]
    pins = [line for line in (ROOT / "constraints-floor.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = versions(pins, "==", python)
    assert len(pinned) >= 9
    floors = [versions(one, ">=", python) for one in lists]
    assert {name for own in floors for name in own} == pinned.keys()
    assert all(pinned[name] == version for own in floors for name, version in own.items())


@pytest.mark.parametrize("folder", ["kernels", "bench"])
def test_every_file_has_its_import_path(folder: str) -> None:
    files = sorted(".".join(p.relative_to(ROOT / folder).with_suffix("").parts) for p in (ROOT / folder).rglob("*.py"))
    assert files
    find = "from importlib.util import find_spec"
    assert_runs(f"{find}\nfor f in {files}: assert find_spec(f'offload.{folder}.{{f}}'), f")


def test_importing_the_package_does_not_import_torch() -> None:
    assert_runs("import sys, offload; assert not {'torch', 'transformers'} & sys.modules.keys()")


def test_the_interface_shows_itself() -> None:
    """To completion and `help` before any of it was used, and its types to type checkers."""
    assert_runs(
        "import offload, sys; assert set(offload.__all__) <= set(dir(offload)); assert 'torch' not in sys.modules"
    )
    assert_runs("import offload; assert all(getattr(offload, name).__doc__ for name in offload.__all__)")
    assert (ROOT / "offload" / "py.typed").is_file()
