"""What a machine with a GPU has, known in seconds: what breaks later is read beside these rows.

Each fact stands alone: what cannot be found out becomes a row that says why, and the others follow.
"""

import argparse
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from offload.bench.harness.record import add_row
from offload.bench.harness.tables import Row, attempt, row
from offload.machine import available_ram_bytes, cpu_name

_PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "safetensors", "numpy", "typer", "pytest"),
    *("pytest-xdist", "cupy-cuda12x", "cupy-cuda13x", "cuda-toolkit"),
)
_ASK_GPU = (
    "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm"
)


def facts() -> Iterator[Row]:
    yield from attempt("versions", (), _versions())
    yield from attempt("nvidia-smi", (), _driver())
    yield from attempt("torch", (), _torch())
    yield from attempt("compiler", (), _compiler())
    yield row("memory called available", available_ram_bytes() / 1e9, "GB")


def _versions() -> Iterator[Row]:
    versions = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
    }
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    yield row("cores", len(os.sched_getaffinity(0)), "") | {"versions": versions}


def _driver() -> Iterator[Row]:
    said = _said("nvidia-smi", f"--query-gpu={_ASK_GPU}", "--format=csv,noheader")
    yield row("nvidia-smi", 0.0, "") | {"notes": said}


def _torch() -> Iterator[Row]:
    import torch

    started = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    free_bytes, all_bytes = torch.cuda.mem_get_info(0)
    yield row("device memory that is free", free_bytes / 1e9, "GB") | {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "cuda": torch.version.cuda,
        "all": all_bytes,
        "opening_s": time.perf_counter() - started,
    }


def _compiler() -> Iterator[Row]:
    """Yield the C compiler, with which Triton builds its launchers."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    said = "no gcc, no cc: Triton cannot compile launchers"
    if compiler:
        said = _said(compiler, "--version").splitlines()[0]
    yield row("compiler", 0.0, "") | {"notes": said, "is_met": bool(compiler)}


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True)
    rows = parser.parse_args().rows
    for fact in facts():
        add_row(rows, fact)
        print(fact, flush=True)
