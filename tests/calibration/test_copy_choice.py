"""Which way of sending bytes a device is given: by what was measured on it, on devices that behave in several ways."""

import numpy as np
import pytest
import torch
from fake_device import fake_arena
from torch import Tensor

from offload.calibration import copy_choice
from offload.calibration.copy_choice import CANDIDATES, Observed, best_of, choose_copies
from offload.streaming.copy_policy import AT_ONCE, CopyPolicy

CHUNKS, SMALL_CHUNKS, STAGED = CANDIDATES[1:]


class QueueDevice:
    """A copy takes its bytes' time; an upload that is a copy waits for those before it, up to the next gap.

    Args:
        sees_gaps: whether its engine takes other streams' copies where a kernel stands between two chunks.
        wrong: what is staged arrives broken.
    """

    rate, latency_s = 1e9, 1e-5

    def __init__(self, *, sees_gaps: bool = True, gap_s: float = 1e-6, wrong: bool = False) -> None:
        self.policy, self.copies, self.compute, self.staging = AT_ONCE, "copies", "compute", None
        self.sees_gaps, self.gap_s, self.wrong, self._tick = sees_gaps, gap_s, wrong, object()
        self.now, self.busy_until, self.first_gap, self.arrived = 0.0, 0.0, 0.0, 0.0

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, to: Tensor, source: Tensor, stream: str) -> None:
        chunk = self.policy.chunk_bytes or len(to)
        if self.busy_until <= self.now:
            self.busy_until, self.first_gap = self.now, 0.0
        if self.policy.chunk_bytes and self.sees_gaps and not self.first_gap:
            self.first_gap = self.now + chunk / self.rate
        self.busy_until += len(to) / self.rate + (-(-len(to) // chunk) - 1) * self.gap_s

    def stage_uploads(self, array: np.ndarray | None) -> None:
        self.staging = array

    def upload(self, source: Tensor) -> Tensor:
        is_staged = self.policy.stages_uploads and self.staging is not None
        waits_until = self.now if is_staged else (self.first_gap or max(self.now, self.busy_until))
        self.arrived = waits_until + self.latency_s
        return source + 1 if is_staged and self.wrong and source.dtype == torch.int64 else source

    def record(self, stream: str, *, is_timed: bool = False) -> float:
        return max(self.now, self.busy_until if stream == "copies" else self.arrived)

    def wait(self, stream: str, event: float) -> None: ...

    def synchronize(self, event: float) -> None:
        self.now = max(self.now, event)

    def elapsed_s(self, before: float, after: float) -> float:
        return after - before


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (QueueDevice(), STAGED),
        (QueueDevice(wrong=True), SMALL_CHUNKS),
        (QueueDevice(wrong=True, gap_s=4e-4), CHUNKS),  # small ones cost more than a fiftieth
        (QueueDevice(wrong=True, gap_s=4e-3), AT_ONCE),
        (QueueDevice(wrong=True, sees_gaps=False), AT_ONCE),
        (QueueDevice(sees_gaps=False), STAGED),
    ],
)
def test_the_device_decides(device: QueueDevice, wanted: CopyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    observe = copy_choice.observe
    monkeypatch.setattr(copy_choice, "observe", lambda *what: observe(*what, clock=lambda: device.now))
    arena = fake_arena()
    assert choose_copies(device, arena) == device.policy == wanted  # type: ignore[arg-type]
    kept_bytes = copy_choice.STAGING_BYTES if wanted.stages_uploads else 0
    assert (device.staging is not None) == wanted.stages_uploads and arena.pinned_bytes == kept_bytes


def test_memory_that_is_not_locked_is_sent_as_ever() -> None:
    device, arena = QueueDevice(), fake_arena(0)
    assert choose_copies(device, arena) == AT_ONCE and arena.pageable_bytes == 0  # type: ignore[arg-type]


def test_without_a_clear_gain_nothing_changes() -> None:
    usual = Observed(1e-3, 1e9)
    assert best_of({}) == best_of({CHUNKS: usual}) == AT_ONCE
    assert best_of({AT_ONCE: usual, CHUNKS: Observed(0.6e-3, 1e9)}) == AT_ONCE
    assert best_of({AT_ONCE: usual, CHUNKS: Observed(0.4e-3, 1e9), STAGED: Observed(1e-5, 0.9e9)}) == CHUNKS
