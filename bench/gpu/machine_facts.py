"""What a machine with a GPU has, known in seconds: what breaks later is read beside these rows.

Each fact stands alone: what cannot be found out becomes a row that says why, and the others follow.
"""

import argparse
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from offload.bench.harness.promises import failure, row
from offload.bench.harness.row_log import Row, add_row
from offload.machine import available_ram_bytes, cpu_name

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "safetensors", "numpy", "typer", "pytest", "pytest-xdist",
    "cupy-cuda12x", "cupy-cuda13x", "cuda-toolkit")  # fmt: skip
_ASK_GPU = (
    "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm"
)


def facts() -> Iterator[Row]:
    """Yield one row per fact."""
    asked: dict[str, Callable[[], Row]] = {
        "versions": _versions,
        "nvidia-smi": _driver,
        "torch": _torch,
        "compiler": _compiler,
        "memory": lambda: row(
            "memory called available", available_ram_bytes() / 1e9, None, None, "GB"
        ),
    }
    for name, ask in asked.items():
        try:
            yield ask()
        except Exception as error:  # a fact that is missing is one as well
            yield failure(name, None, error)


def _versions() -> Row:
    found = {"python": platform.python_version(), "system": platform.platform(), "cpu": cpu_name()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return row("cores", len(os.sched_getaffinity(0)), None, None, "") | {"versions": found}


def _driver() -> Row:
    told = _said("nvidia-smi", f"--query-gpu={_ASK_GPU}", "--format=csv,noheader")
    return row("nvidia-smi", 0.0, None, None, "") | {"notes": told}


def _torch() -> Row:
    import torch

    started = time.perf_counter()
    found = torch.cuda.get_device_properties(0)
    free_bytes, all_bytes = torch.cuda.mem_get_info(0)
    told = {
        "name": found.name,
        "capability": [found.major, found.minor],
        "cuda": torch.version.cuda,
        "all": all_bytes,
    }
    opening_s = time.perf_counter() - started
    return row("device memory that is free", free_bytes / 1e9, None, None, "GB") | {
        **told,
        "opening_s": opening_s,
    }


def _compiler() -> Row:
    """Return the C compiler, with which Triton builds its launchers."""
    found = shutil.which("gcc") or shutil.which("cc")
    told = (
        _said(found, "--version").splitlines()[0]
        if found
        else "no gcc, no cc: Triton cannot compile launchers"
    )
    return row("compiler", 0.0, None, None, "") | {"notes": told, "is_met": bool(found)}


def _said(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=True
    ).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    for fact in facts():
        add_row(options.rows, fact)
        print(fact, flush=True)
