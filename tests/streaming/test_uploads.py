"""Whatever a step sends to a GPU goes by `send`: a copy of its own would wait behind every layer that is queued.

Every operation that brings numbers of the host to the card is counted, and so is what goes by `send`; both counts are
the same, for every way of drafting, drawing, adjusting and verifying.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fake_device import FakeDevice, FakeStream
from strict_place import OnCard, StrictDevice, place
from test_device_expert_path import place_experts
from test_device_path import BUDGETS, TIERS, base, device, pair_of, place_layers
from test_tiny import prompts
from tiny import advance
from torch import Tensor

import offload
from offload.drafting import model as drafting
from offload.engine.request import Request
from offload.model.kv_cache import KVCache
from offload.sampling import sampler
from offload.sampling.adjustments import Penalties
from offload.sampling_options import Sampling

__all__ = ["base", "device"]  # fixtures
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


def learn_by_a_copy(patch: pytest.MonkeyPatch) -> str:
    """The mistake that was."""
    learn = drafting.DraftCalibration.learn

    def copied(self: Any, score_TV: Tensor, token_T: Tensor) -> None:
        learn(self, score_TV, torch.tensor(token_T.tolist(), device=score_TV.device))

    patch.setattr(drafting.DraftCalibration, "learn", copied)
    return "dynamic"


def commit_by_a_copy(patch: pytest.MonkeyPatch) -> str:
    commit = KVCache.commit

    def copied(self: KVCache, *rows: Any) -> None:
        before, self._send = self._send, lambda row_A: row_A.to(place())
        commit(self, *rows)
        self._send = before

    patch.setattr(KVCache, "commit", copied)
    return "static"


def adjust_by_a_copy(patch: pytest.MonkeyPatch) -> str:
    adjust = Penalties.adjust
    patch.setattr(
        Penalties, "adjust", lambda self, scores, paths, send: adjust(self, scores, paths, lambda one: one.to(place()))
    )
    return "adjusted, static"


def draw_by_a_copy(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(sampler.Sampler, "send", lambda self, tensor, scores: tensor.to(scores.device))
    return "specinfer"


@pytest.mark.parametrize("plant", [learn_by_a_copy, commit_by_a_copy, adjust_by_a_copy, draw_by_a_copy])
def test_a_way_past_send_is_found(plant: Any, counted: Counted, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = STEPS[plant(monkeypatch)]
    write(step, counted, base, monkeypatch)
    assert counted.astray
