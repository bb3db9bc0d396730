"""What a machine with a GPU has, known in seconds: whatever breaks later is read beside these rows.

Each fact stands alone: what cannot be found out becomes a row that says why, and the others follow.
"""

import argparse
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from offload.bench.gpu.row_log import Row, add_row
from offload.bench.harness.promises import failure, row
from offload.machine import available_ram_bytes, cpu_name
from offload.streaming.disk import allocate

_PACKAGES = (
    "torch", "triton", "transformers", "accelerate", "safetensors", "numpy", "typer", "rich", "pytest", "pytest-xdist",
    "cupy-cuda12x", "cupy-cuda13x", "cuda-toolkit", "matplotlib",
)  # fmt: skip
_ASK_GPU = ("name", "memory.total", "driver_version", "pcie.link.gen.current", "pcie.link.width.current", "clocks.sm")
_GB, _PAGE_BYTES, _NUM_THREADS = 10**9, 4096, 8


def facts(touch_bytes: int) -> Iterator[Row]:
    """One row per fact, the slow ones last."""
    asked: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        ("versions", _versions),
        ("nvidia-smi", _driver),
        ("torch", _torch),
        ("compiler", _compiler),
        ("O_DIRECT", _direct_reads),
        ("memory", lambda: touched(touch_bytes)),
    ]
    for name, ask in asked:
        try:
            yield from ask()
        except Exception as error:  # a fact that is missing is one as well
            yield failure(name, None, error)


def touched(
    most_bytes: int, step_bytes: int = 2 * _GB, available: Callable[[], int] = available_ram_bytes
) -> Iterator[Row]:
    """Take memory in steps: in some virtual machines there is more the more one touches.

    It ends where the last step came out of what was called available and another would take all the rest.
    """
    held: list[np.ndarray] = []
    before = available()
    yield row("memory called available", before / 1e9, None, None, "GB")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        while (taken_bytes := len(held) * step_bytes) < most_bytes:
            started = time.perf_counter()
            held.append(allocate(step_bytes))
            list(pool.map(_touch, np.array_split(held[-1], _NUM_THREADS)))
            seconds, after = time.perf_counter() - started, available()
            told = {"available_gb": after / 1e9, "gb_per_s": step_bytes / 1e9 / seconds}
            yield row(f"memory touched, after {taken_bytes / 1e9:.3g} GB", step_bytes / 1e9, None, None, "GB") | told
            if before - after > step_bytes / 2 and after < 2 * step_bytes:
                return
            before = after


def _touch(part: np.ndarray) -> None:
    part[::_PAGE_BYTES] = 1


def _versions() -> Iterator[Row]:
    found = {"python": platform.python_version(), "system": platform.platform(), "cpu": cpu_name()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    yield row("cores", len(os.sched_getaffinity(0)), None, None, "") | {"versions": found}


def _driver() -> Iterator[Row]:
    told = _said("nvidia-smi", f"--query-gpu={','.join(_ASK_GPU)}", "--format=csv,noheader")
    yield row("nvidia-smi", 0.0, None, None, "") | {"notes": told}
    yield row("its topology", 0.0, None, None, "") | {"notes": _said("nvidia-smi", "topo", "-m")[-1500:]}


def _torch() -> Iterator[Row]:
    import torch

    started = time.perf_counter()
    card = torch.cuda.get_device_properties(0)
    free_bytes, all_bytes = torch.cuda.mem_get_info(0)
    told = {"name": card.name, "capability": [card.major, card.minor], "cuda": torch.version.cuda, "all": all_bytes}
    yield row("device memory that is free", free_bytes / 1e9, None, None, "GB") | told
    yield row("opening the device", time.perf_counter() - started, None, None, "s")


def _compiler() -> Iterator[Row]:
    """Triton builds its launchers with one."""
    found = shutil.which("gcc") or shutil.which("cc")
    told = _said(found, "--version").splitlines()[0] if found else "no gcc, no cc: Triton cannot compile launchers"
    yield row("compiler", 0.0, None, None, "") | {"notes": told, "is_met": bool(found)}


def _direct_reads(num_bytes: int = 256 << 20) -> Iterator[Row]:
    """Of the folder where synthetic checkpoints lie, and whether it is a disk at all."""
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(num_bytes >> 20):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        place = mmap.mmap(-1, 8 << 20)
        direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            started = time.perf_counter()
            while os.readv(direct, [place]) > 0:
                pass
            rate = num_bytes / (time.perf_counter() - started)
        finally:
            os.close(direct)
    free_gb = shutil.disk_usage(Path(file.name).parent).free / 1e9
    yield row("O_DIRECT reads, one at a time", rate / 1e9, None, None, "GB/s") | {"free_disk_gb": free_gb}


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--touch-gb", type=float, default=48)
    options = parser.parse_args()
    for fact in facts(int(options.touch_gb * _GB)):
        add_row(options.rows, fact)
        print(fact, flush=True)
