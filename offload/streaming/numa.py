"""Which processors lie next to a device: memory that they touch first lies there too.

With several sockets, copies from the far one run at half the speed or less. Where nothing is known nothing is done.
"""

import os
from pathlib import Path


def cpus_near(pci_address: str, sys: Path = Path("/sys")) -> frozenset[int] | None:
    """Processors on the memory node of a PCI device such as `0000:3b:00.0`, of those open to us; None if unknown."""
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
    """`0-3,8` as the system writes it."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(cpu for lo, _, hi in ranges for cpu in range(int(lo), int(hi or lo) + 1))
