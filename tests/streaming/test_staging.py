"""Whatever a step sends to a GPU goes by `send`, through a ring of memory that is read late and never too early.

Every operation that brings numbers of the host to the card is counted, and so is what goes by `send`; both counts are
the same, for every way of drafting, drawing, adjusting and verifying.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, FakeStream
from strict_place import OnCard, StrictDevice, place
from test_device_expert_path import place_experts
from test_device_path import BUDGETS, TIERS, device, pair_of, place_layers
from test_tiny import prompts
from tiny import advance
from torch import Tensor

import offload
from offload.engine.request import Request
from offload.sampling_options import Sampling
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


__all__ = ["device"]  # a fixture
WARM = Sampling(temperature=0.8, seed=4)
ADJUSTED = Sampling(
    temperature=0.8, seed=4, repeat_penalty=1.2, frequency_penalty=0.3, logit_bias=((7, 1.5), (9, -2.0))
)


class Step(NamedTuple):
    """What is written, and how."""

    tree: str = "16x6"
    sampling: Sampling = Sampling()
    rule: str = "match"
    family: str = "llama"
    options: dict[str, Any] = {}  # noqa: RUF012
    num_texts: int = 1


STEPS = {
    "static": Step(),
    "dynamic": Step("grown:16x6"),
    "drawn": Step("grown:16x6", WARM),
    "filtered": Step("16x6", Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=4)),
    "sequoia": Step("8x3", WARM, "sequoia"),
    "specinfer": Step("8x3", WARM, "specinfer"),
    "spectr": Step("8x3", WARM, "spectr"),
    "topk": Step("8x3", WARM, "topk"),
    "adjusted, static": Step("8x3", ADJUSTED),
    "adjusted, dynamic": Step("grown:16x6", ADJUSTED),
    "looked up, static": Step("16x6", options={"lookup": True}),
    "looked up, dynamic": Step("grown:16x6", options={"lookup": True}),
    "without a tree": Step("none"),
    "tied": Step("grown:16x6", family="llama-tied"),
    "side by side": Step("grown:16x6", WARM, num_texts=2),
    "experts": Step("grown:16x6", family="qwen3-moe", options={"experts": "demand"}),
}


class Counted:
    """What has got to the card by `send`, and how often anything has got there at all; layers are not counted."""

    def __init__(self, card: StrictDevice, patch: pytest.MonkeyPatch) -> None:
        self.card, self.by_send = card, list[int]()
        patch.setattr(FakeDevice, "copy", self._copy_of_weights)

    def _copy_of_weights(self, to: Tensor, source: Tensor, stream: FakeStream) -> None:
        device = FakeDevice.of_test  # type: ignore[attr-defined]

        def work() -> None:
            before = len(self.card.sends)
            to.copy_(source)
            del self.card.sends[before:]
            stream.now += 1
            device.num_copies += 1

        device._enqueue(stream, work)

    def send(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, OnCard):
            return tensor
        self.by_send.append(tensor.numel())
        return tensor.to(place())

    def begin(self) -> None:
        self.card.sends.clear()
        self.by_send.clear()

    @property
    def astray(self) -> list[int]:
        """Sizes of what got there otherwise."""
        left = list(self.by_send)
        return [size for size in self.card.sends if size not in left or left.remove(size) is not None]


@pytest.fixture
def counted(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """To be entered once everything else is ready."""
    monkeypatch.setattr(FakeDevice, "place", place())
    monkeypatch.setattr(FakeDevice, "of_test", device, raising=False)
    return Counted(StrictDevice(), monkeypatch)


def write(step: Step, counted: Counted, base: Path, patch: pytest.MonkeyPatch) -> int:
    """Some steps behind the prompt; returns how many tensors went by `send`, and leaves the others in `astray`."""
    target, draft, _ = pair_of(step.family, base)
    if step.options.get("experts"):
        place_experts(patch, 9, 5, "DISK", "HOST")
    else:
        place_layers(patch, *TIERS["host"])
    how = {"context": 128, "threads": 1, "profile": "none", "parallel": step.num_texts, **BUDGETS, **step.options}
    prompt = prompts()[1]
    if step.options.get("lookup"):
        prompt = prompt * 2
    with counted.card, offload.load(target, draft, tree=step.tree, rule=step.rule, **how) as decoder:
        drafter = getattr(decoder.drafter, "_model", decoder.drafter)  # beside guesses, or by itself
        for model in (decoder.target._model, drafter.model):
            model.send_with(counted.send)
        runs = [decoder.start(Request(prompt, step.sampling, 30)) for _ in range(step.num_texts)]
        advance(decoder, runs)
        counted.begin()
        for _ in range(3):
            advance(decoder, runs)
        assert all(len(run.sequence.new_ids) > 3 for run in runs)
    return len(counted.by_send)


@pytest.mark.parametrize("name", STEPS)
def test_nothing_gets_to_the_card_but_by_send(
    name: str, counted: Counted, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent = write(STEPS[name], counted, base, monkeypatch)
    assert num_sent > 3 and counted.astray == []
