"""What only a GPU can show of copies: kernels read locked memory, recordings wait for no layer."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch

from offload.model.cuda_graphs import CudaRecorder
from offload.streaming import device
from offload.streaming.device import CudaDevice
from offload.streaming.pinned import PinnedAllocator, open_pinned_allocator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Place(NamedTuple):
    card: CudaDevice
    arena: PinnedAllocator


@pytest.fixture
def place() -> Iterator[Place]:
    card = CudaDevice(0)
    arena = open_pinned_allocator(card.place)
    yield Place(card, arena)
    torch.cuda.synchronize()
    arena.close()


def is_right(device: CudaDevice) -> bool:
    """Whether uploads of any type and size bring what was sent, one behind the other."""
    sources = [torch.arange(size, dtype=dtype) % 2 for size in (1, 77, 9001) for dtype in (torch.int64, torch.float32)]
    sources += [torch.arange(1001) % 3 == 0, torch.tensor(5)]
    sent = [device.upload(source) for source in sources]
    return all(torch.equal(there.cpu(), source) for there, source in zip(sent, sources, strict=True))


def test_uploads_are_what_was_sent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a ring so small that it begins anew many times."""
    monkeypatch.setattr(device, "STAGING_BYTES", 1 << 17)
    with ExitStack() as resources:
        assert place.card.stage_uploads(resources) is None
        assert all(is_right(place.card) for _ in range(20))
    assert is_right(place.card), "afterwards they are copies"


def test_layers_are_what_was_sent(place: Place) -> None:
    card, layer = place.card, place.arena.allocate((100 << 20) + 7).array
    source, slot = torch.from_numpy(layer), card.allocate(len(layer))
    source.random_(0, 255)
    card.wait(card.copies, card.record(card.compute))
    card.copy(slot, source, card.copies)
    card.wait(card.compute, card.record(card.copies))
    assert torch.equal(slot.cpu(), source)


def test_a_recording_does_not_wait_for_layers(place: Place) -> None:
    card, layer = place.card, torch.from_numpy(place.arena.allocate(1 << 30).array)
    slot, number = card.allocate(len(layer)), torch.zeros(8, device=card.place)
    record = CudaRecorder(torch.cuda.Stream(card.place))
    record(lambda: number.add_(1))  # the first allocates
    card.synchronize(card.record(card.compute))
    for _ in range(4):
        card.copy(slot, layer, card.copies)
    copied = card.record(card.copies)
    replay = record(lambda: number.add_(1))
    assert not copied.query(), "the recording has waited for copies, or these take no time"
    replay()
    assert number.tolist() == [5.0] * 8, "two runs to warm up, and three replays"
