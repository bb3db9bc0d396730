"""The link as measured on this machine."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_device import FakeDevice

from offload.calibration import link as device_link
from offload.calibration.link import copy_bytes_per_s, device_link_bytes_per_s, link_bytes_per_s
from offload.checkpoint.layout import allocate
from offload.engine.setup import Setup
from offload.memory.plan import MemoryPlan
from offload.planning.choice import TreeRoom, most_nodes
from offload.planning.cost_model import Traffic
from offload.planning.knowledge import Knowledge, LinkRate
from offload.streaming.disk import DiskReader
from offload.trees.spec import parse_tree


def test_the_link_is_measured_for_so_long_and_all_over_the_file(tmp_path: Path) -> None:
    shard = tmp_path / "shard"
    with shard.open("wb") as file:
        file.truncate(1 << 40)  # larger than any disk; holes read as zeros
    starts: list[int] = []

    class Watched(DiskReader):
        def read(self, layout: Any, slab: Any) -> Any:
            starts.append(layout.pieces[0].lo)
            return super().read(layout, slab)

    started = time.perf_counter()
    assert link_bytes_per_s([shard], budget_s=0.2, open_source=Watched) > 1e6
    assert 0.2 < time.perf_counter() - started < 10, "not for the whole file"
    tenths = {start * 10 // (1 << 40) for start in starts[:20]}
    assert len(tenths) >= 9 and all(start % 4096 == 0 for start in starts)


def test_a_limited_link_is_measured_as_limited(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(8 << 20))
    measured = link_bytes_per_s([tmp_path / "shard"], limit_bytes_per_s=50e6)
    assert 25e6 < measured < 55e6, "no more than that, and less only where the readers are kept waiting"


@pytest.mark.parametrize("seed", range(8))
def test_a_slot_is_written_after_whoever_had_its_memory(seed: int) -> None:
    device, copied = FakeDevice(seed, is_compute_late=True, haste=0.0, compute_share=0.1), list[int]()
    device.launch(lambda: copied.append(device.num_copies))
    copy_bytes_per_s(device, allocate(4096))
    device.finish()
    assert copied == [0]


class Counts(SimpleNamespace):
    """Counts of a plan, and the sums that it makes of them."""

    pass_bytes = MemoryPlan.pass_bytes
    pass_disk_bytes = MemoryPlan.pass_disk_bytes


def test_experts_that_the_host_has_no_room_for_come_as_fast_as_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes a virtual second on this card, however large."""
    monkeypatch.setattr(device_link, "_COPY_BYTES", 1 << 16)
    kept = {"num_experts": 100, "num_kept_experts": 20, "expert_slot_bytes": 1000}

    def rate(num_host_slots: int, disk_bytes_per_s: float = 1000.0, **options: int) -> float:
        counts = {"streamed_bytes": 0, "disk_streamed_bytes": 0, "num_host_expert_slots": num_host_slots}
        plan = Counts(**{**kept, **counts, "is_streamed": True, **options})
        return device_link_bytes_per_s(FakeDevice(), plan, [], disk_bytes_per_s=disk_bytes_per_s)

    assert rate(80) == rate(90) == pytest.approx(1 << 16), "nothing comes from the disk"
    assert rate(40) == pytest.approx(2000) and rate(0) == pytest.approx(1000)
    assert rate(80, streamed_bytes=80_000, disk_streamed_bytes=80_000) == pytest.approx(2000), "layers beside them"
    assert rate(40, is_streamed=False) == math.inf


@pytest.mark.parametrize(("streams_from", "asked", "link"), [(256, [2048], 5.0), (1 << 20, [], math.inf)])
def test_the_link_is_measured_where_only_larger_trees_than_usual_stream(
    streams_from: int, asked: list[int], link: float
) -> None:
    """The mistake that was: what streams with larger trees was taken to come in no time, and they were chosen."""
    room = TreeRoom(lambda num: Traffic(100 if num >= streams_from else 0, 0))
    sizes = list[int]()
    largest = most_nodes(parse_tree("auto"), Knowledge(), room)
    setup: Any = SimpleNamespace(room=room, link=lambda num: sizes.append(num) or LinkRate(5.0))
    result = Setup.startup_link(setup, largest)
    assert sizes == asked and result.bytes_per_s == link
