"""Small tensors through a ring of memory that is read late: nothing is written over what is still to be read."""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.streaming import device as staging
from offload.streaming.device import StagingRing


class Late:
    """A device that reads when it is waited for, and in the order in which it was asked."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.work = array, deque[Callable[[], None]]()
        self.num_waits = 0

    def ring(self) -> StagingRing:
        return StagingRing(self.array, Seen(self), self.record, self.synchronize)  # type: ignore[arg-type]

    def record(self) -> list[bool]:
        event: list[bool] = []
        self.work.append(lambda: event.append(True))
        return event

    def synchronize(self, event: list[bool]) -> None:
        self.num_waits += 1
        while not event:
            self.work.popleft()()

    def finish(self) -> None:
        while self.work:
            self.work.popleft()()


class Seen:
    """The array as that device sees it; a kernel over it is done later, into memory that holds no number yet."""

    def __init__(self, device: Late, lo: int = 0, hi: int | None = None) -> None:
        self.device, self.words = device, torch.from_numpy(device.array).view(torch.int64)[lo:hi]

    def __getitem__(self, part: slice) -> "Seen":
        return Seen(self.device, part.start, part.stop)

    def bitwise_or(self, _: int) -> Tensor:
        out = torch.full_like(self.words, -1)
        self.device.work.append(lambda: (out.copy_(self.words), None)[1])
        return out


@pytest.mark.parametrize("part_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("ring_bytes", [4096, 8192, 1 << 20])
def test_what_was_sent_arrives_however_late_it_is_read(
    ring_bytes: int, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_PART_BYTES", part_bytes)
    device = Late(np.zeros(ring_bytes, np.uint8))
    ring, generator = device.ring(), torch.Generator().manual_seed(0)
    sent = []
    for index in range(300):
        num_bytes = int(torch.randint(1, 4000, (1,), generator=generator))
        source = torch.randint(0, 2, (num_bytes,), generator=generator).to(torch.uint8)
        source = source.bool() if index % 3 else source
        assert ring.has_room_for(source)
        sent.append((ring.send(source), source))
    device.finish()
    assert all(there.dtype == source.dtype and torch.equal(there, source) for there, source in sent)
    assert (device.num_waits > 0) == (ring_bytes < 300 * 2000)


@pytest.mark.parametrize(
    "source",
    [torch.tensor(7), torch.arange(12).view(3, 4).t(), torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(9) > 0],
    ids=["a number", "transposed", "bf16", "bool"],
)
def test_types_shapes_and_strides(source: Tensor) -> None:
    device = Late(np.zeros(4096, np.uint8))
    there = device.ring().send(source)
    device.finish()
    assert there.shape == source.shape and torch.equal(there, source)


def test_what_does_not_fit_is_not_taken() -> None:
    ring = Late(np.zeros(4096, np.uint8)).ring()
    assert not ring.has_room_for(torch.zeros(4097, dtype=torch.uint8)) and not ring.has_room_for(torch.zeros(0))


def test_many_small_tensors_share_events() -> None:
    device = Late(np.zeros(1 << 22, np.uint8))
    ring = device.ring()
    for index in range(20_000):
        ring.send(torch.tensor([index]))
    assert len(ring._parts) <= 5
