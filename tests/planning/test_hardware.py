"""Machines as data: those that are known, and those that a file describes."""

import json
from pathlib import Path

import pytest

from offload.errors import UserError
from offload.planning.hardware import KNOWN, Hardware, read_hardware

GB = 10**9


def test_known_cards_are_what_their_data_sheets_say() -> None:
    assert set(KNOWN) == {"l40", "rtx4090", "rtx3090", "a100-80gb", "h100", "h200"}
    for name, nominal_gb in {"l40": 48, "rtx4090": 24, "rtx3090": 24, "a100-80gb": 80, "h100": 80, "h200": 141}.items():
        assert nominal_gb * 0.93 < KNOWN[name].gpu_bytes / 2**30 < nominal_gb * 1.01
        assert KNOWN[name].link_bytes_per_s in (25e9, 52e9) and KNOWN[name].flops_per_s < 1e15


MACHINE = {"gpu_bytes": "48GiB", "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": "25GB/s"}


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**MACHINE, "ram_bytes": 64 * GB}))
    wanted = {"gpu_bytes": 48 << 30, "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": 25e9}
    assert read_hardware(path) == Hardware(name="mine", ram_bytes=64 * GB, **wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "holds a JSON list"),
        ("{", "is not valid JSON"),
        (json.dumps({**MACHINE, "ram": 1}), "a machine has the fields"),
        (json.dumps({"gpu_bytes": 1}), "needs memory_bytes_per_s, flops_per_s, link_bytes_per_s as well"),
        (json.dumps({"link_bytes_per_s": 1}), "needs gpu_bytes as well"),
        (json.dumps({"flops_per_s": 1}), "needs memory_bytes_per_s as well"),
        (json.dumps({**MACHINE, "gpu_bytes": "much"}), "gpu_bytes must be a size such as 8GiB"),
        (json.dumps({**MACHINE, "flops_per_s": "181T"}), "flops_per_s must be a number, got '181T'"),
        (json.dumps({**MACHINE, "flops_per_s": True}), "flops_per_s must be a number, got True"),
        (json.dumps({**MACHINE, "link_bytes_per_s": -1}), "link_bytes_per_s must be above 0 and at most 1e+21, got -1"),
        (
            json.dumps({**MACHINE, "disk_bytes_per_s": float("nan")}),
            "disk_bytes_per_s must be above 0 and at most 1e+21, got nan",
        ),
        (
            json.dumps({**MACHINE, "memory_bytes_per_s": 10**400}),
            "memory_bytes_per_s must be above 0 and at most 1e+21, got 1000",
        ),
        (json.dumps({**MACHINE, "gpu_bytes": float("inf")}), "gpu_bytes must be above 0 and at most 1e+21, got inf"),
        (json.dumps({**MACHINE, "flops_share": 1.5}), "flops_share must be at most 1, got 1.5"),
    ],
)
def test_a_malformed_machine_is_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"^[^\n]*$") as refusal:
        read_hardware(path)
    assert words in str(refusal.value) and "mine" in str(refusal.value)


def test_a_laptop_needs_no_fields_of_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "laptop.json"
    path.write_text(json.dumps({"ram_bytes": "32GiB", "disk_bytes_per_s": "3GB"}))
    laptop = read_hardware(path)
    assert laptop == Hardware(name="laptop", ram_bytes=32 << 30, disk_bytes_per_s=3 * GB)
    assert laptop.feed_bytes_per_s == 3 * GB and laptop.flops_per_s is None
