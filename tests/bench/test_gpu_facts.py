"""The first two steps of the GPU runner where there is no GPU: missing facts are rows, and copies are pretended."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from fake_device import fake_arena
from torch import Tensor

from offload.bench.gpu import copies
from offload.bench.gpu.copies import UPLOADS
from offload.bench.gpu.machine_facts import facts


def test_a_fact_that_is_missing_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = {row["row"]: row for row in facts()}
    assert found["cores"]["versions"]["torch"] and "FileNotFoundError" in found["nvidia-smi: failed"]["error"]
    assert found["compiler"]["is_met"] is False and "Triton" in found["compiler"]["notes"]
    assert found["memory called available"]["value"] > 0


class QueueDevice:
    """A copy takes its bytes' time; an upload that is a copy waits for those before it.

    Args:
        wrong: what is staged arrives broken.
    """

    rate, latency_s = 1e9, 1e-5

    def __init__(self, *, wrong: bool = False, refusal: str | None = None) -> None:
        self.copies, self.compute, self.wrong, self.refusal = "copies", "compute", wrong, refusal
        self.now, self.busy_until, self.arrived, self.is_staging = 0.0, 0.0, 0.0, False

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, to: Tensor, source: Tensor, stream: str) -> None:
        self.busy_until = max(self.busy_until, self.now) + len(to) / self.rate

    def stage_uploads(self, resources: ExitStack) -> str | None:
        self.is_staging = self.refusal is None
        resources.callback(setattr, self, "is_staging", False)
        return self.refusal

    def upload(self, source: Tensor) -> Tensor:
        self.arrived = (self.now if self.is_staging else max(self.now, self.busy_until)) + self.latency_s
        return source + 1 if self.is_staging and self.wrong and source.dtype == torch.int64 else source

    def record(self, stream: str, *, is_timed: bool = False) -> float:
        return max(self.now, self.busy_until if stream == "copies" else self.arrived)

    def wait(self, stream: str, event: float) -> None: ...

    def synchronize(self, event: float) -> None:
        self.now = max(self.now, event)

    def elapsed_s(self, before: float, after: float) -> float:
        return after - before


def rows_of(device: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By name; time is the device's."""
    observe = copies.observe
    monkeypatch.setattr(copies, "observe", lambda *what, **more: observe(*what, **more, clock=lambda: device.now))
    return {row["row"]: row for row in copies.measure(device, fake_arena(), 64_000_000)}


def test_uploads_are_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures say what the device does: a copy waits for layers, and what is staged does not."""
    device = QueueDevice()
    rows = rows_of(device, monkeypatch)
    assert not [row for row in rows.values() if "error" in row]
    for size in UPLOADS:
        at_once, staged = (rows[f"upload of {size} behind three layers, {name}"] for name in ("at once", "staged"))
        assert at_once["value"] > 9 * staged["value"]
        assert staged["ratio"] == pytest.approx(1.0)
    assert rows["layers, at once"]["value"] == pytest.approx(device.rate / 1e9)
    assert rows["uploads arrive as sent, at once"]["is_met"] and rows["uploads arrive as sent, staged"]["is_met"]
    assert {"locking memory, pageable", "copies from memory, fake"} <= rows.keys()


@pytest.mark.parametrize("device", [QueueDevice(wrong=True), QueueDevice(refusal="no cupy")], ids=["wrong", "refused"])
def test_uploads_that_do_not_arrive_are_told(device: QueueDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    told = rows_of(device, monkeypatch)["uploads arrive as sent, staged"]
    assert told["is_met"] is False and told["notes"] == (device.refusal or "")


def test_what_breaks_costs_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        yield from ()
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(copies, "uploads", broken)
    names = [row["row"] for row in copies.measure(QueueDevice(), fake_arena(), 1_000_000)]  # type: ignore[arg-type]
    assert names[0] == "uploads: failed" and len(names) == 5
