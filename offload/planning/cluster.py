"""A described cluster: the machines that run one model together, and their network.

    {"ranks": [{"name": "alpha", "ram": "32GiB", "disk": "3GB/s"},
               {"name": "beta", "hardware": "rtx4090", "ram": "64GiB"}],
     "network": {"gbit_per_s": 2.5, "latency_us": 80}}

The first rank is the head. `Gathers` and `Hops` are what ranks send each other in one pass, and
how long that takes: ranks with shares of every layer send their own columns to all others, ranks
with layers of their own hand rows on to the next. Both directions of a cable are used at once, as
a switch allows.

Files may be hostile: names, sizes and numbers are checked, and an unknown key is refused, since a
misspelt one would silently mean a default. No torch, no clock. Invariant: ranks have distinct
names, and bytes are those of the tensors, without message headers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import read_object
from offload.errors import UserError, os_errors_as_user_error, require
from offload.planning.hardware import (
    Assumptions,
    Hardware,
    field_value,
    find_hardware,
    require_known,
)

MAX_RANKS = 64  # with this many, stages are still found in seconds
DRAWN_BYTES = 8  # of a row at most: its token, which comes back from the last stage
_PAYLOAD_SHARE = 0.94  # of a cable's rate: 1448 bytes of TCP in the 1538 of a packet with its gaps
_USUAL_LATENCY_US = 100.0  # of a message on Gigabit Ethernet
# keys of a rank, and the fields of `Hardware` that they are
_FIELD_OF = {
    "ram": "ram_bytes",
    "disk": "disk_bytes_per_s",
    "gpu": "gpu_bytes",
    "link": "link_bytes_per_s",
    "flops": "flops_per_s",
    "memory": "memory_bytes_per_s",
    "flops_share": "flops_share",
    "memory_share": "memory_share",
}
_RANK_KEYS = ("name", "hardware", *_FIELD_OF)
_NETWORK_KEYS = ("gbit_per_s", "bytes_per_s", "latency_us")


class Network(NamedTuple):
    """The connection of any two ranks, each way."""

    bytes_per_s: float
    latency_s: float  # of a message


class Gathers(NamedTuple):
    """The exchanges of ranks that share every layer."""

    widths: Sequence[Sequence[int]]  # for each gather of a layer: numbers in a row, rank by rank
    num_layers: int
    width: int  # D, of the rows that the head broadcasts before the first layer
    item_bytes: int

    @property
    def num_ranks(self) -> int:
        return len(self.widths[0])

    def sent_bytes(self, num_rows: int) -> tuple[int, ...]:
        """Return the bytes that each rank sends to all others in a pass of this many rows.

        Parts are padded to the widest.
        """
        parts = self.num_layers * sum(map(max, self.widths))
        numbers_R = [parts + self.width, *[parts] * (self.num_ranks - 1)]
        return tuple(
            (self.num_ranks - 1) * numbers * num_rows * self.item_bytes for numbers in numbers_R
        )

    def seconds(self, num_rows: int, network: Network) -> float:
        """Return the time that the exchanges of a pass take by themselves."""
        others = self.num_ranks - 1
        if not others:
            return 0.0
        numbers = others * (self.num_layers * sum(map(max, self.widths)) + self.width)
        num_messages = others * (self.num_layers * len(self.widths) + 1)
        return (
            num_rows * numbers * self.item_bytes / network.bytes_per_s
            + num_messages * network.latency_s
        )


class Hops(NamedTuple):
    """The exchanges of ranks with layers of their own."""

    num_stages: int
    width: int  # D
    item_bytes: int

    def sent_bytes(self, num_rows: int) -> tuple[int, ...]:
        """Return each rank's bytes in a pass: rows to the next, drawn tokens to the head."""
        rows_bytes = num_rows * self.width * self.item_bytes
        drawn_bytes = num_rows * DRAWN_BYTES if self.num_stages > 1 else 0
        return (*[rows_bytes] * (self.num_stages - 1), drawn_bytes)

    def hop_s(self, num_rows: int, network: Network) -> float:
        """Return the seconds of one hop."""
        rows_bytes = num_rows * self.width * self.item_bytes
        return rows_bytes / network.bytes_per_s + network.latency_s

    def seconds(self, num_rows: int, network: Network) -> float:
        """Return the seconds of all hops of one pass, one after the other, and the way back."""
        if self.num_stages == 1:
            return 0.0
        back_s = num_rows * DRAWN_BYTES / network.bytes_per_s + network.latency_s
        return (self.num_stages - 1) * self.hop_s(num_rows, network) + back_s


class Cluster(NamedTuple):
    """Ranks in order, each as its machine, and the network between any two of them."""

    ranks: tuple[Hardware, ...]
    network: Network

    def assumed(self, file: Path) -> Assumptions:
        """Return the machine to plan for: the head of the ranks that a file describes."""
        return Assumptions(self.ranks[0], ranks=str(file))


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from JSON. Raises `UserError`, which names file, rank and key."""
    with os_errors_as_user_error(f"cannot read {path}", "check the path"):
        values = read_object(path, "fix it")
    require_known(values, ("ranks", "network"), f"{path.name}: a cluster")
    listed = values.get("ranks")
    is_list = isinstance(listed, list) and 1 <= len(listed) <= MAX_RANKS
    rule = f"{path.name}: ranks must be a list of 1 to {MAX_RANKS} machines"
    require(is_list, rule, _shown(listed), "fix it")
    ranks = tuple(_rank(value, index, path.name) for index, value in enumerate(listed or ()))
    names = [rank.name for rank in ranks]
    twice = next((name for name in names if names.count(name) > 1), None)
    rule = f"{path.name}: each rank needs a name of its own"
    require(twice is None, rule, f"{twice} twice", "rename one")
    return Cluster(ranks, _network(values.get("network"), len(ranks), path.name))


def _rank(values: Any, index: int, file: str) -> Hardware:
    where = f"{file}: rank {index}"
    if not isinstance(values, dict):
        raise UserError(
            f"{where} must be an object with the keys {', '.join(_RANK_KEYS)}, got {_shown(values)}: fix it"
        )
    name = values.get("name", f"rank{index}")
    is_name = isinstance(name, str) and 0 < len(name) <= 32 and name.isprintable()
    require(is_name, f"{where}: name must be a short text", _shown(name), "try alpha")
    where = f"{file}: rank {name}"
    require_known(values, _RANK_KEYS, f"{where}: a rank")
    known: dict[str, Any] = {"name": name}
    for key, field in _FIELD_OF.items():
        if key in values:
            known[field] = field_value(field, values[key], f"{where}: {key}")
    hardware = values.get("hardware")
    is_named = "hardware" in values
    rule = f"{where}: hardware must be a name or a FILE.json"
    require(not is_named or isinstance(hardware, str), rule, _shown(hardware), "fix it")
    if not is_named:
        _settle_feed(values, known, where)
    try:
        return replace(find_hardware(str(hardware)), **known) if is_named else Hardware(**known)
    except UserError as error:
        complaint = str(error).removeprefix(f"{name}: ").replace("`", "")
        for key, field in _FIELD_OF.items():
            complaint = complaint.replace(field, key)
        raise UserError(f"{where}: {complaint}") from None


def _settle_feed(values: dict[str, Any], known: dict[str, Any], where: str) -> None:
    """Require RAM and disk of a rank that names no hardware; without a GPU, the disk is the link."""
    if "gpu" not in values and "link" in values:
        rule = f"{where}: without a gpu, link and disk are one"
        require("disk" not in values, rule, "both", "leave link out")
        known["disk_bytes_per_s"] = known.pop("link_bytes_per_s")
    for key, such in (("ram", '"ram": "32GiB"'), ("disk", '"disk": "3GB/s"')):
        rule = f"{where}: a rank needs its {key}"
        require(_FIELD_OF[key] in known, rule, "none", f"add it, such as {such}")


def _network(values: Any, num_ranks: int, file: str) -> Network:
    where = f"{file}: network"
    remedy = 'try {"gbit_per_s": 1}'
    if values is None and num_ranks == 1:
        return Network(math.inf, 0.0)
    require(isinstance(values, dict), f"{where} must be an object", _shown(values), remedy)
    require_known(values, _NETWORK_KEYS, f"{where}: a network")
    given = [key for key in ("gbit_per_s", "bytes_per_s") if key in values]
    rule = f"{where} needs one of gbit_per_s and bytes_per_s"
    require(len(given) == 1, rule, " and ".join(given) or "none", remedy)
    if "gbit_per_s" in values:
        gbit_per_s = _number(values["gbit_per_s"], f"{where}: gbit_per_s")
        bytes_per_s = _PAYLOAD_SHARE * gbit_per_s * 1e9 / 8
    else:
        label = f"{where}: bytes_per_s"
        bytes_per_s = _number(field_value("bytes_per_s", values["bytes_per_s"], label), label)
    latency_us = _number(values.get("latency_us", _USUAL_LATENCY_US), f"{where}: latency_us")
    return Network(bytes_per_s, latency_us / 1e6)


def _number(value: Any, label: str) -> float:
    is_number = type(value) in (int, float) and 0 < value < 1e30  # nan is not
    require(is_number, f"{label} must be a number above 0", _shown(value), "fix it")
    return float(value)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
