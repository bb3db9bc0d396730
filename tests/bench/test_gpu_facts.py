"""The first two steps of the GPU runner where there is no GPU: missing facts are rows, and copies are pretended."""

from typing import Any

import pytest
from fake_device import fake_arena
from test_copy_choice import QueueDevice

from offload.bench.gpu import copies
from offload.bench.gpu.copies import UPLOADS
from offload.bench.gpu.machine_facts import facts


def test_a_fact_that_is_missing_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = {row["row"]: row for row in facts()}
    assert found["cores"]["versions"]["torch"] and "FileNotFoundError" in found["nvidia-smi: failed"]["error"]
    assert found["compiler"]["is_met"] is False and "Triton" in found["compiler"]["notes"]
    assert found["memory called available"]["value"] > 0


def test_uploads_are_timed_under_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that leaves gaps where a kernel stands between chunks: the figures say what it does."""
    device: Any = QueueDevice()
    observe = copies.observe
    monkeypatch.setattr(copies, "observe", lambda *what, **more: observe(*what, **more, clock=lambda: device.now))
    monkeypatch.setattr(copies, "STAGING_BYTES", 16_000_000)
    monkeypatch.setattr(copies, "_chosen", lambda *_: iter(()))
    rows = {row["row"]: row for row in copies.measure(device, fake_arena(), 64_000_000)}
    assert not [row for row in rows.values() if "error" in row]
    for size in UPLOADS:
        at_once, staged = (rows[f"upload of {size} behind three layers, {name}"] for name in ("at once", "staged"))
        chunked = rows[f"upload of {size} behind three layers, chunks of 16 MiB, a kernel between"]
        assert at_once["value"] > 3 * chunked["value"] > 3 * staged["value"]
        assert staged["ratio"] == pytest.approx(1.0)
    assert rows["layers, at once"]["value"] == pytest.approx(device.rate / 1e9)
    assert {"locking memory, pageable", "copies from memory, fake"} <= rows.keys()


def test_what_breaks_costs_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(copies, "uploads", broken)
    monkeypatch.setattr(copies, "_chosen", broken)
    names = [row["row"] for row in copies.measure(QueueDevice(), fake_arena(), 1_000_000)]  # type: ignore[arg-type]
    assert names[:2] == ["chosen: failed", "uploads: failed"] and len(names) == 6
