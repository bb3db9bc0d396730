"""How many cores this process may keep busy: those it may run on, and no more than its container's quota pays for."""

import math
import os
from collections.abc import Iterator
from pathlib import Path


def num_cores() -> int:
    """At least 1."""
    quotas = cpu_quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def cpu_quotas(root: Path, membership: Path) -> list[float]:
    """Cores that every limited group of this process pays for, innermost first; `membership` is /proc/self/cgroup."""
    found = [_read_quota(folder) for folder in _cpu_groups(root, membership)]
    return [quota for quota in found if quota is not None]


def _cpu_groups(root: Path, membership: Path) -> Iterator[Path]:
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            base = root if controllers == "" else root / "cpu"
            group = base / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _read_quota(folder: Path) -> float | None:
    """From version 2's `cpu.max`, or from version 1's two files."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return int(quota) / int(period) if quota.isdigit() else None  # "max" and -1 are no limit
