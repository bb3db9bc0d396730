"""What only a GPU can show of copies: kernels read locked memory, chunks arrive, recordings wait for no layer."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from offload.calibration.copy_choice import CANDIDATES, choose_copies, is_right, using
from offload.model.cuda_graphs import CudaRecorder
from offload.streaming.copy_policy import AT_ONCE, CopyPolicy
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


@pytest.mark.parametrize("policy", CANDIDATES, ids=str)
def test_uploads_are_what_was_sent(policy: CopyPolicy, place: Place) -> None:
    """Through a ring so small that it begins anew many times."""
    with using(place.card, policy, place.arena.allocate(1 << 17).array):
        assert all(is_right(place.card) for _ in range(20))


@pytest.mark.parametrize("policy", CANDIDATES, ids=str)
def test_layers_are_what_was_sent(policy: CopyPolicy, place: Place) -> None:
    card, layer = place.card, place.arena.allocate((100 << 20) + 7).array
    source, slot = torch.from_numpy(layer), card.allocate(len(layer))
    source.random_(0, 255)
    card.wait(card.copies, card.record(card.compute))
    with using(card, policy, place.arena.allocate(1 << 17).array):
        card.copy(slot, source, card.copies)
    assert torch.equal(slot.cpu(), source)


def test_a_policy_is_chosen(place: Place) -> None:
    assert choose_copies(place.card, place.arena) == place.card.policy
    assert is_right(place.card)
    place.card.stage_uploads(None)


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
    assert card.policy == AT_ONCE
