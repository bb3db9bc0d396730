"""Finds what a bench measures with: models, budget, device.

Without a model it is the packaged pair, its target inflated; with `--layers N` the pair in the
shape of Llama-2 70B and 7B, made in memory, for devices. `--device pretend` is the host in the role
of a device: it shows that the commands work, and no speed of it means anything.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.bench.harness import synthetic
from offload.bench.harness.setting import Need, Setting
from offload.bench.harness.tables import Screen
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.open import fetch, open_headers
from offload.checkpoint.packaged import PAIR, inflated_target
from offload.errors import UserError
from offload.machine import available_ram_bytes
from offload.memory.plan import MemoryBudget
from offload.memory.planner import plan_memory
from offload.model.headers import describe, specified
from offload.streaming.cuda import open_device
from offload.streaming.device import Device
from offload.units import parse_size

PRETEND = "pretend"


class PretendedGpu(Device):
    """The host in the role of a device: layers are sent to memory that is the host's as well."""

    name = "host"
    has_own_memory = True


# share of free memory for a model that is made there
_FREE_SHARE = 0.9
_USUAL = Need()


def find_setting(
    model: str | None,
    draft: str | None,
    size: str,
    ram: str | None,
    screen: Screen,
    need: Need = _USUAL,
) -> Setting:
    """Return the named models, or the packaged pair. Raises `UserError`, before it fetches."""
    if model is not None:
        names = [model] if draft is None else [model, draft]
        headers = list(map(describe, names))
        if ram is not None:  # from headers alone: too small for the least of runs
            budget = MemoryBudget(ram_bytes=parse_size(ram, "`ram`"), context=1)
            plan_memory(ModelFiles(headers[0], headers[1] if draft else None), budget, 1)
        target, *small = map(specified, fetch(names, headers, screen.wait))
        files = ModelFiles(target, *small)
        folder = target.directory
        guesser = small[0].directory if small else None
    else:
        size_bytes = parse_size(size, "--size")
        folder = inflated_target(size_bytes, screen.make_target)
        guesser = PAIR / "draft" if draft is None else open_headers(draft).directory
        files = ModelFiles(describe(folder), describe(guesser))
    budget_bytes = need.budget_bytes(files) if ram is None else parse_size(ram, "--ram")
    return Setting(folder, guesser, PAIR / "target" if model is None else folder, budget_bytes)


def resident_pair(ram: str = "2GiB") -> Setting:
    """Return the packaged pair as it is, to measure what does not depend on streaming."""
    target = PAIR / "target"
    return Setting(target, PAIR / "draft", target, parse_size(ram, "--ram"))


@contextmanager
def synthetic_setting(num_layers: int, ram: str | None, device: Device) -> Iterator[Setting]:
    """Return the pair in the shape of Llama-2 70B and 7B; on the pretend device some megabytes."""
    is_tiny = device.torch_device.type == "cpu"
    large, small = synthetic.LLAMA_2_70B, synthetic.LLAMA_2_7B
    if is_tiny:
        large, small = synthetic.TINY, synthetic.TINY_DRAFT
    shape = large._replace(num_layers=num_layers)
    free_bytes = int(_FREE_SHARE * available_ram_bytes())
    ram_bytes = free_bytes if ram is None else parse_size(ram, "--ram")
    fitting = max(0, ram_bytes // shape.layer_bytes)
    fewest = synthetic.TINY.num_layers
    if num_layers < fewest or (not is_tiny and num_layers > fitting):
        requirement = f"--layers must be {fewest} to {fitting} in this --ram"
        raise UserError(f"{requirement}, got {num_layers}: change either")
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as name:
        target = synthetic.sketch(PAIR / "target", Path(name) / "target", shape)
        draft = synthetic.sketch(PAIR / "draft", Path(name) / "draft", small)
        origin = synthetic.origin(PAIR / "target", Path(name) / "origin", shape)
        yield Setting(target, draft, origin, ram_bytes)


def place_of(device: str, gpu_memory: str | None) -> dict[str, Any]:
    if device == PRETEND:
        return {"device": PRETEND, "gpu_memory": gpu_memory or "1152MiB", "opened": PretendedGpu()}
    opened = open_device(device, gpu_memory)
    return {"device": str(opened.torch_device), "gpu_memory": gpu_memory, "opened": opened}
