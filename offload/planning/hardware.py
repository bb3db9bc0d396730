"""Machines by what limits decoding on them: known GPUs by name, any other from a JSON file.

Peaks are those of the vendors' data sheets (dense, bf16 with fp32 accumulation). The share that a
program achieves:

- Pinned memory to the GPU over 16 lanes: users of NVIDIA/nvbandwidth report 23.9 to 26.4 GB/s on
  PCIe 4 (RTX 4090, issue 15; A100 25.1, issue 42) and 52.8 GB/s on PCIe 5 (H100, issue 24, in the
  other direction).
- Matrix products reach 0.80 (H100) to 0.86 (A100) of the peak at their best shape (table "maximum
  achievable matmul FLOPS" in stas00/ml-engineering). Assumed: a whole pass over some hundred rows
  reaches three quarters of that, 0.6, weights are read at 0.8 of the memory's peak, and the host
  has 256 GiB and a disk of 5 GB/s.

No torch, no clock. Invariant: every figure is above zero, and no share above one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import read_object
from offload.errors import UserError, os_errors_as_user_error, require
from offload.memory.plan import Rates
from offload.units import parse_rate, parse_size

_GIB = 1 << 30
DEVICE_LINK_BYTES_PER_S = 25e9
_PCIE_5 = 52e9
_MOST = 1e21  # bytes, and rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One machine with at most one GPU; without a GPU the rates of computing may be unknown."""

    name: str
    gpu_bytes: int | None = None
    memory_bytes_per_s: float | None = None  # peak rate of the memory of what computes
    flops_per_s: float | None = None  # peak rate of computing, dense bf16
    link_bytes_per_s: float | None = None  # achieved from pinned host memory to the GPU
    ram_bytes: int = 256 * _GIB
    disk_bytes_per_s: float = 5e9
    memory_share: float = 0.8  # of the peak rate, which reading weights achieves
    flops_share: float = 0.6  # of the peak rate, which a pass over some hundred rows achieves

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value is not None:
                requirement = f"{self.name}: {field.name} must be above 0 and at most {_MOST:.0e}"
                require(0 < value <= _MOST, requirement, f"{value!s:.40}", "fix it")
                is_share = field.name.endswith("_share")
                requirement = f"{self.name}: {field.name} must be at most 1"
                require(not is_share or value <= 1, requirement, value, "fix it")
        groups = [("memory_bytes_per_s", "flops_per_s"), ("gpu_bytes", "link_bytes_per_s")]
        for group in [groups[0] + groups[1]] if self.gpu_bytes else groups:
            missing = [name for name in group if getattr(self, name) is None]
            requirement = f"{self.name}: a machine needs {', '.join(missing)} as well"
            require(len(missing) in (0, len(group)), requirement, "none", "add it")

    @property
    def feed_bytes_per_s(self) -> float:
        """Return the rate at which layers arrive: over a GPU's link, else from the disk."""
        return self.link_bytes_per_s or self.disk_bytes_per_s

    @property
    def link_over_disk(self) -> float:
        """Return the link's rate over the disk's; 1 where the disk is the link."""
        return self.feed_bytes_per_s / self.disk_bytes_per_s


# Memory is what the driver reports (MiB), which ECC and the vendor's GB make less than the name
# says; then the peaks of its rate (GB/s) and of bf16 products (TFLOP/s), and the link.
_GPUS = {
    "l40": (46068, 864, 181, DEVICE_LINK_BYTES_PER_S),
    "rtx4090": (24564, 1008, 165, DEVICE_LINK_BYTES_PER_S),
    "rtx3090": (24576, 936, 71, DEVICE_LINK_BYTES_PER_S),
    "a100-80gb": (81920, 1935, 312, DEVICE_LINK_BYTES_PER_S),
    "h100": (81559, 3350, 989, _PCIE_5),
    "h200": (143771, 4800, 989, _PCIE_5),
}
KNOWN = {
    name: Hardware(
        name=name,
        gpu_bytes=mib << 20,
        memory_bytes_per_s=gb * 1e9,
        flops_per_s=tflop * 1e12,
        link_bytes_per_s=link,
    )
    for name, (mib, gb, tflop, link) in _GPUS.items()
}


def rates_of(hardware: Hardware) -> Rates | None:
    """Return the rates that decide the rows of a prompt pass; None where computing is unknown."""
    if hardware.flops_per_s is None:
        return None
    flops_per_s = hardware.flops_share * hardware.flops_per_s
    disk = hardware.disk_bytes_per_s
    return Rates(hardware.feed_bytes_per_s, flops_per_s, disk if hardware.gpu_bytes else math.inf)


def find_hardware(name: str) -> Hardware:
    """Return a known machine, or one from a JSON file. Raises `UserError`."""
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    if not name.endswith(".json"):
        raise UserError(
            f"`hardware` must be one of {', '.join(KNOWN)} or a FILE.json, got {name!r}: describe it in a file"
        )
    return read_hardware(Path(name))


class Assumptions(NamedTuple):
    """What stands in for this machine where nothing will be loaded."""

    hardware: Hardware | None = None  # another machine; None is this one
    disk_bytes_per_s: float | None = None  # instead of a measurement

    @classmethod
    def from_flags(cls, hardware: str | None, disk_speed: str | int | None) -> "Assumptions":
        """Return another machine and a rate, as a user names them. Raises `UserError`."""
        disk_bytes_per_s = parse_rate(disk_speed, "`disk_speed`")
        machine = None if hardware is None else find_hardware(hardware)
        if machine is not None and disk_bytes_per_s is not None:
            machine = replace(machine, disk_bytes_per_s=disk_bytes_per_s)
        return cls(machine, disk_bytes_per_s)


def read_hardware(path: Path) -> Hardware:
    """Read a machine from JSON. Raises `UserError`."""
    with os_errors_as_user_error(f"cannot read {path}", "check the path"):
        values = read_object(path, "fix it")
    require_known(values, [field.name for field in fields(Hardware)], f"{path.name}: a machine")
    name = str(values.pop("name", path.stem))
    known = {
        field: field_value(field, value, f"{path.name}: {field}") for field, value in values.items()
    }
    return Hardware(name=name, **known)


def require_known(values: Mapping[str, Any], known: Sequence[str], subject: str) -> None:
    """Raise `UserError` for an unknown key: a misspelt one would silently mean a default."""
    other = next((key for key in values if key not in known), None)
    requirement = f"{subject} has the keys {', '.join(known)}"
    require(other is None, requirement, f"{other!r:.60}", "fix it")


def field_value(field: str, value: Any, label: str) -> Any:
    """Return the value of a field of a file, in the type that it needs. Raises `UserError`.

    Sizes and rates may be text such as `48GiB` and `3GB/s`; `Hardware` checks how large they are.
    """
    if isinstance(value, str) and field.endswith("_bytes"):
        return parse_size(value, label)
    if isinstance(value, str) and field.endswith("_per_s"):
        return parse_rate(value, label)
    is_number = type(value) in (int, float)
    require(is_number, f"{label} must be a number", f"{value!r:.60}", "fix it")
    return int(value) if field.endswith("_bytes") and math.isfinite(value) else value
