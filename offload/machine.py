"""The memory and cores of this machine, within the limits of its container."""

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

MAX_THREADS = 4096  # of any machine


# a process with torch and transformers imported; comes on top of any budget
_LIBRARY_BYTES = 360 << 20


class GroupFiles(NamedTuple):
    """The file names of a memory group in one version of cgroups."""

    limit: str
    # beyond it the group is slowed down and its memory taken back; empty where there is none
    throttle: str
    used: str
    peak: str
    idle_cache: str  # a key of memory.stat


CGROUP_V2 = GroupFiles(
    "memory.max", "memory.high", "memory.current", "memory.peak", "inactive_file"
)
CGROUP_V1 = GroupFiles(
    "memory.limit_in_bytes",
    "",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "total_inactive_file",
)


def available_ram_bytes() -> int:
    """Return the memory that a new allocation may take, within the container's limit."""
    limits = _cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(0, min([_meminfo_available(), *(limit - used for limit, used in limits)]))


def available_gpu_bytes(device: str) -> int:
    """Return the free memory of a CUDA device: `cuda` or `cuda:N`."""
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def has_cuda_driver() -> bool:
    """Return True if there can be a CUDA device: at once, where importing torch takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def peak_rss_bytes(process: int | str = "self") -> int:
    """Return the most memory a process has held; `getrusage` counts what its parent had, too."""
    return _kilobytes(f"/proc/{process}/status", "VmHWM:") * 1024


def library_bytes() -> int:
    """Return the memory that Python and the libraries of a run will take beyond what they hold."""
    return max(0, _LIBRARY_BYTES - rss_bytes())


def rss_bytes(process: int | str = "self") -> int:
    """Return the memory that a process holds now."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def give_back_memory() -> None:
    """Return freed memory that C's allocator keeps, some 100 MB after a decoder, to the system."""
    # only GNU's C library has malloc_trim
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as the system lets it: models have many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft != hard else soft, hard))


@contextmanager
def giving_back_memory() -> Iterator[None]:
    """Give freed memory back to the system when the body ends, however it ends."""
    try:
        yield
    finally:
        give_back_memory()


def cpu_name() -> str:
    """Return the processor's name; virtual ones say little more than their vendor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    # which imports more than the rest of this file
    import platform

    return platform.processor() or platform.machine()


def _meminfo_available() -> int:
    return _kilobytes("/proc/meminfo", "MemAvailable:") * 1024


def _kilobytes(file: str, key: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise OSError(f"{file} names no {key}")


def memory_groups(root: Path, membership: Path) -> Iterator[tuple[Path, GroupFiles]]:
    """Yield folder and file names of every memory group of this process, innermost first."""
    for folder, is_unified in control_groups("memory", root, membership):
        yield folder, CGROUP_V2 if is_unified else CGROUP_V1


def control_groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, bool]]:
    """Yield folders of this process's groups, innermost first, and whether they are of version 2.

    `root` is where cgroups are mounted, `membership` the kernel's list, /proc/self/cgroup.
    """
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_unified = controllers == ""
        if is_unified or controller in controllers.split(","):
            base = root if is_unified else root / controller
            group = base / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(base):
                    yield folder, is_unified


def _cgroup_limits(root: Path, membership: Path) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes of every memory group that this process is in."""
    limits = list[tuple[int, int]]()
    for folder, names in memory_groups(root, membership):
        for name in filter(None, (names.limit, names.throttle)):
            try:
                limit = (folder / name).read_text().strip()
                used = (folder / names.used).read_text().strip()
            except OSError:
                continue
            if limit.isdigit():
                limits.append((int(limit), int(used) - _idle_cache_bytes(folder, names.idle_cache)))
    return limits


def _idle_cache_bytes(folder: Path, key: str) -> int:
    """Return cached file pages not used lately: they count as used, and are dropped for others."""
    if not (folder / "memory.stat").is_file():
        return 0
    lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return next((int(value) for name, value in lines if name == key), 0)


def num_cores() -> int:
    """Count the cores that this process may run on and its container's quota pays for."""
    quotas = cpu_quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def cpu_quotas(root: Path, membership: Path) -> list[float]:
    """Return the cores that each limited group of this process pays for, innermost first."""
    quotas = [_read_quota(folder) for folder, _ in control_groups("cpu", root, membership)]
    return [quota for quota in quotas if quota is not None]


def _read_quota(folder: Path) -> float | None:
    """Read the quota from version 2's `cpu.max`, or from version 1's two files."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
    except OSError:
        return None
    return int(quota) / int(period) if quota.isdigit() else None  # "max" and -1 are no limit


def cpus_near(pci_address: str, sys: Path = Path("/sys")) -> frozenset[int] | None:
    """Return the processors on the memory node of a PCI device such as `0000:3b:00.0`.

    Only those open to this process; None if unknown.
    """
    try:
        node = int((sys / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return None
    return (_parse_list(listed) & os.sched_getaffinity(0)) or None


def stay_on(cpus: frozenset[int] | None) -> None:
    """Bind the calling thread, and no other, to these processors."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def _parse_list(text: str) -> frozenset[int]:
    """Parse a list such as `0-3,8`, as the system writes it."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(cpu for lo, _, hi in ranges for cpu in range(int(lo), int(hi or lo) + 1))
