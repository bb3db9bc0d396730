"""How many cores this process may keep busy: those it may run on, and no more than its container's quota pays for."""

import math
import os
from pathlib import Path

from offload.machine import control_groups


def num_cores() -> int:
    """At least 1."""
    quotas = cpu_quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def cpu_quotas(root: Path, membership: Path) -> list[float]:
    """Cores that every limited group of this process pays for, innermost first; `membership` is /proc/self/cgroup."""
    found = [_read_quota(folder) for folder, _ in control_groups("cpu", root, membership)]
    return [quota for quota in found if quota is not None]


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
