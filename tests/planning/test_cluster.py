"""Machines and clusters as data: those that are known, those that files describe, and what is refused of a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.errors import UserError
from offload.planning.cluster import MAX_RANKS, Cluster, Network, read_cluster
from offload.planning.hardware import KNOWN, Hardware, read_hardware

GB = 10**9


def test_known_cards_are_what_their_data_sheets_say() -> None:
    nominal_gb = {"l40": 48, "rtx4090": 24, "rtx3090": 24, "a100-80gb": 80, "h100": 80, "h200": 141}
    assert KNOWN.keys() == nominal_gb.keys()
    for name, card in KNOWN.items():
        assert nominal_gb[name] * 0.93 < card.gpu_bytes / 2**30 < nominal_gb[name] * 1.01
        assert card.link_bytes_per_s in (25e9, 52e9) and card.flops_per_s < 1e15


MACHINE = {"gpu_bytes": "48GiB", "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": "25GB/s"}


def written(folder: Path, content: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    found = read_hardware(written(tmp_path, {**MACHINE, "ram_bytes": 64 * GB}))
    wanted = {"gpu_bytes": 48 << 30, "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": 25e9}
    assert found == Hardware(name="mine", ram_bytes=64 * GB, **wanted)  # type: ignore[arg-type]
    laptop = read_hardware(written(tmp_path, {"ram_bytes": "32GiB", "disk_bytes_per_s": "3GB"}))
    assert laptop == Hardware(name="mine", ram_bytes=32 << 30, disk_bytes_per_s=3 * GB)
    assert laptop.feed_bytes_per_s == 3 * GB and laptop.flops_per_s is None, "it needs no fields of a GPU"


RANGE = "must be above 0 and at most 1e+21, got"
BAD_MACHINES: list[tuple[Any, str]] = [
    ("[]", "holds a JSON list"),
    ("{", "is not valid JSON"),
    ({**MACHINE, "ram": 1}, "a machine has the fields"),
    ({"gpu_bytes": 1}, "needs memory_bytes_per_s, flops_per_s, link_bytes_per_s as well"),
    ({"link_bytes_per_s": 1}, "needs gpu_bytes as well"),
    ({"flops_per_s": 1}, "needs memory_bytes_per_s as well"),
    ({**MACHINE, "gpu_bytes": "much"}, "gpu_bytes must be a size such as 8GiB"),
    ({**MACHINE, "flops_per_s": "181T"}, "flops_per_s must be a number, got '181T'"),
    ({**MACHINE, "flops_per_s": True}, "flops_per_s must be a number, got True"),
    ({**MACHINE, "link_bytes_per_s": -1}, f"link_bytes_per_s {RANGE} -1"),
    ({**MACHINE, "disk_bytes_per_s": float("nan")}, f"disk_bytes_per_s {RANGE} nan"),
    ({**MACHINE, "memory_bytes_per_s": 10**400}, f"memory_bytes_per_s {RANGE} 1000"),
    ({**MACHINE, "gpu_bytes": float("inf")}, f"gpu_bytes {RANGE} inf"),
    ({**MACHINE, "flops_share": 1.5}, "flops_share must be at most 1, got 1.5"),
]

ALPHA = {"name": "alpha", "ram": "32GiB", "disk": "3GB/s"}
BETA = {"name": "beta", "hardware": "rtx4090", "ram": "64GiB"}
GBE = {"gbit_per_s": 1}


def read(folder: Path, content: Any) -> Cluster:
    return read_cluster(written(folder, content))


def test_ranks_are_machines_and_forms_are_forgiven(tmp_path: Path) -> None:
    found = read(tmp_path, {"ranks": [ALPHA, BETA], "network": {"bytes_per_s": "1GB/s", "latency_us": 50}})
    alpha, beta = found.ranks
    assert alpha == Hardware(name="alpha", ram_bytes=32 << 30, disk_bytes_per_s=3e9)
    known = KNOWN["rtx4090"]
    assert (beta.name, beta.ram_bytes, beta.gpu_bytes) == ("beta", 64 << 30, known.gpu_bytes)
    assert beta.feed_bytes_per_s == known.link_bytes_per_s and found.network == Network(1e9, 5e-5)
    # A disk may be called the link where there is no other; numbers are bytes; names need not be
    # given.
    rank = {"ram": 2**34, "link": 5e8, "flops": "1.5T", "memory": 4e10, "flops_share": 0.5}
    found = read(tmp_path, {"ranks": [rank, {**ALPHA, "disk": "500MB"}], "network": {"gbit_per_s": 2.5}})
    own = {"flops_per_s": 1.5e12, "memory_bytes_per_s": 4e10, "flops_share": 0.5}
    assert found.ranks[0] == Hardware(name="rank0", ram_bytes=2**34, disk_bytes_per_s=5e8, **own)
    assert found.ranks[1].disk_bytes_per_s == 5e8
    assert found.network.bytes_per_s == pytest.approx(0.94 * 2.5e9 / 8) and found.network.latency_s == 1e-4
    card = {"ram": "64GiB", "disk": "3GB/s", "gpu": "24GiB", "link": "25GB/s", "flops": 165e12, "memory": "1TB/s"}
    alone = read(tmp_path, {"ranks": [card]})  # which needs no network
    assert alone.ranks[0].feed_bytes_per_s == 25e9 and alone.ranks[0].disk_bytes_per_s == 3e9
    # What is no file is refused.
    with pytest.raises(UserError, match=r"cannot read .*nowhere.json \(No such file or directory\): check the path"):
        read_cluster(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="check the path"):
        read_cluster(tmp_path)


def ranks(*listed: Any) -> dict[str, Any]:
    return {"ranks": [*listed], "network": GBE}


BAD_CLUSTERS: list[tuple[Any, str]] = [
    ("{", "is not valid JSON"),
    ("[]", "holds a JSON list"),
    ({"rank": []}, "a cluster has the keys ranks, network, got 'rank'"),
    ({"network": GBE}, "ranks must be a list of 1 to 64 machines, got None"),
    (ranks(), "ranks must be a list of 1 to 64 machines, got []"),
    (ranks(*[{**ALPHA, "name": f"r{i}"} for i in range(MAX_RANKS + 1)]), "ranks must be a list of 1 to 64"),
    (ranks("alpha"), "rank 0 must be an object with the keys name, hardware, ram"),
    (ranks({**ALPHA, "name": ""}), "rank 0: name must be a short text, got ''"),
    (ranks({**ALPHA, "name": "a\nb"}), "rank 0: name must be a short text"),
    (ranks(ALPHA, ALPHA), "each rank needs a name of its own, got alpha twice"),
    (ranks({**ALPHA, "rma": 1}), "rank alpha: a rank has the keys"),
    (ranks({"name": "alpha", "disk": "3GB"}), 'rank alpha: a rank needs its ram, got none: add it, such as "ram"'),
    (ranks({"name": "alpha", "ram": "3GB"}), "rank alpha: a rank needs its disk, got none"),
    (ranks({**ALPHA, "link": "3GB"}), "rank alpha: without a gpu, link and disk are one, got both"),
    (ranks({**ALPHA, "ram": "much"}), "rank alpha: ram must be a size such as 8GiB"),
    (ranks({**ALPHA, "ram": -1}), "rank alpha: ram must be a number above 0, got -1"),
    (ranks({**ALPHA, "ram": True}), "rank alpha: ram must be a number above 0, got True"),
    (ranks({**ALPHA, "disk": float("nan")}), "rank alpha: disk must be a number above 0, got nan"),
    (ranks({**ALPHA, "disk": 1e25}), "rank alpha: disk must be 1 or more, and below 2^63, got 1e+25"),
    (ranks({**ALPHA, "disk": ["3GB"]}), "rank alpha: disk must be a number above 0, got ['3GB']"),
    (ranks({**ALPHA, "flops": 1e12}), "rank alpha: flops needs memory as well"),
    (ranks({**ALPHA, "gpu": "24GiB"}), "rank alpha: gpu needs link, flops, memory as well"),
    (ranks({**ALPHA, "flops_share": 2, "flops": 1e12, "memory": 1e9}), "alpha: flops_share must be at most 1"),
    (ranks({**BETA, "hardware": "rtx9999"}), "rank beta: hardware must be one of l40"),
    (ranks({**BETA, "hardware": 5}), "rank beta: hardware must be a name or a FILE.json, got 5"),
    ({"ranks": [ALPHA, BETA]}, 'network must be an object, got None: try {"gbit_per_s": 1}'),
    ({"ranks": [ALPHA], "network": {}}, "network needs one of gbit_per_s and bytes_per_s, got none"),
    ({"ranks": [ALPHA], "network": {**GBE, "bytes_per_s": 1}}, "got gbit_per_s and bytes_per_s: try"),
    ({"ranks": [ALPHA], "network": {"mbit": 1}}, "network: a network has the keys gbit_per_s, bytes_per_s, latency"),
    ({"ranks": [ALPHA], "network": {"gbit_per_s": "fast"}}, "gbit_per_s must be a number above 0, got 'fast'"),
    ({"ranks": [ALPHA], "network": {**GBE, "latency_us": 0}}, "latency_us must be a number above 0, got 0"),
]
REFUSED = [*((read_hardware, *row) for row in BAD_MACHINES), *((read_cluster, *row) for row in BAD_CLUSTERS)]


@pytest.mark.parametrize(("reader", "content", "words"), REFUSED)
def test_a_malformed_file_is_refused_in_one_line(
    reader: Callable[[Path], object], content: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"\A[^\n]*\Z") as refusal:
        reader(written(tmp_path, content))
    assert words in str(refusal.value) and "mine" in str(refusal.value)
