"""Everything that a run on a GPU computes, where tensors of the GPU and of the host cannot be mixed.

The fake device of the other tests lies in host memory, so that a mask or a number left on the wrong side goes unseen.
Whatever a step sends there goes by `send`, through a ring of memory that is read late and never too early: every
operation that brings numbers of the host to the card is counted, and so is what goes by `send`; both counts are the
same, for every way of drafting, drawing, adjusting and verifying.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fake_device import FakeDevice, FakeStream
from matrix import matrix
from passes import with_weights
from plans import model_shape
from strict_place import OnCard, StrictDevice, attend_on_card, place
from test_device_experts import place_experts
from test_device_path import BUDGETS, TIERS, device, pair_of, place_layers
from test_families import config_of, tiny_model
from test_path_rows import CLOSE, logits_of_two_trees
from test_tiny import prompts
from tiny import FAMILIES, advance, build, save
from torch import Tensor

import offload
from offload.calibration import startup
from offload.checkpoint.open import open_checkpoint
from offload.drafting.base import DraftCalibration
from offload.drafting.static import draw_children
from offload.engine.build import resident_model
from offload.engine.request import Request
from offload.model.headers import describe
from offload.model.kv_cache import KEYS, VALUES, KVCache
from offload.model.tree_model import TreeModel
from offload.sampling import sampler as sampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape
from offload.trees.verification import find_rule

__all__ = ["device"]  # a fixture
LOAD = {"context": 128, "threads": 1, **BUDGETS}
PER_LAYER = ("gemma3n_text", "gemma4_text")  # have a table of inputs to every layer


@pytest.fixture
def card(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> StrictDevice:
    """To be entered once everything else is ready."""
    monkeypatch.setattr(FakeDevice, "torch_device", place())
    return StrictDevice()


def test_a_session_goes_there_and_back(card: StrictDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(build(FAMILIES["llama"]()), tmp_path / "model")
    place_layers(monkeypatch, *TIERS["pinned"])
    with card, offload.load(model, model, tree="8x3", **LOAD) as decoder:
        whole = decoder.generate(prompts()[1], max_new_tokens=12).token_ids
        first = decoder.generate(prompts()[1], max_new_tokens=5).token_ids
        decoder.save_session(tmp_path / "text")
    with card, offload.load(model, model, tree="8x3", **LOAD) as decoder:
        tokens = decoder.load_session(tmp_path / "text").tokens
        run = decoder.run(tokens, Sampling(), max_new_tokens=7, continues=True)
        list(run)
    assert first + run.result().token_ids == whole
    assert run.result().stats.num_kept_tokens == len(tokens) - 1 > 5


@pytest.mark.parametrize("tree", ["16x6", "grown:16x6"])
def test_the_host_looks_at_the_card_no_more_than_the_tree_needs(
    tree: str, card: StrictDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a level for a static tree, twice a pass for a dynamic one; behind the sweep once a token, and to learn."""
    target, draft, _ = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["pinned"])
    with card, offload.load(target, draft, tree=tree, **LOAD) as decoder:
        shape = decoder.trees.for_run(Sampling(), "match").shape
        text, passes = decoder.begin(prompts()[1], Sampling(), shape=shape), 0
        run = decoder.drafter.model.forward

        def counted(*args: Any, **options: Any) -> Tensor:
            nonlocal passes
            passes += 1
            return run(*args, **options)

        decoder.drafter.model.forward = counted
        decoder.step(text)
        passes, card.looks[:] = 0, []
        new = decoder.step(text)
    per_pass, learning = (2, 2 + len(new)) if isinstance(shape, DynamicShape) else (1, 0)
    assert passes > 0 and len(card.looks) <= per_pass * passes + len(new) + learning


def placed_model(family: str, base: Path) -> TreeModel:
    """All its layers on the GPU, its tables on the host."""
    return with_weights(TreeModel(open_checkpoint(base / family), "float32", place(), has_host_table=True))


@matrix("family", [*PER_LAYER, "gemma3", "olmoe", "deepseek_v3", "gpt_oss"], daily=2)
def test_families_compute_the_same(family: str, tmp_path: Path) -> None:
    save(tiny_model(FAMILIES[family]() if family in FAMILIES else config_of(family)), tmp_path / family)
    wanted = logits_of_two_trees(resident_model(open_checkpoint(tmp_path / family), "float32"))
    with StrictDevice():
        for attend in (None, attend_on_card):
            model = placed_model(family, tmp_path)
            model.set_attention_kernel(attend)
            logits = logits_of_two_trees(model)
            assert isinstance(logits, OnCard)
            torch.testing.assert_close(logits.held, wanted, **CLOSE)


@pytest.mark.parametrize("family", [*PER_LAYER, "llama", "llama-tied"])
def test_what_stays_and_what_goes_is_planned_so(family: str, tmp_path: Path) -> None:
    save(tiny_model(FAMILIES[family]() if family in FAMILIES else config_of(family)), tmp_path / family)
    shape = model_shape(open_checkpoint(tmp_path / family), "float32")
    with StrictDevice():
        model = placed_model(family, tmp_path)
    inside = {id(parameter) for parameter in model.meta_model.get_decoder().layers.parameters()}
    rest = {id(held): held for held in model.meta_model.parameters() if id(held) not in inside}.values()
    num_bytes = {is_here: sum(p.nbytes for p in rest if (p.device == place()) is is_here) for is_here in (True, False)}
    slack = 8 * 4096  # of blocks around what is read
    assert num_bytes[True] <= shape.head_bytes <= num_bytes[True] + slack
    assert num_bytes[False] <= shape.table_bytes <= num_bytes[False] + slack


@pytest.mark.parametrize("mistake", ["noise", "masks", "numpy"])
def test_what_is_left_on_the_wrong_side_is_refused(
    mistake: str, card: StrictDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, _ = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["pinned"])
    if mistake == "noise":
        noise = lambda seed, position, vocab_size, device: torch.zeros(vocab_size)  # noqa: E731
        monkeypatch.setattr(sampling, "REFERENCES", sampling.REFERENCES._replace(keyed_gumbel=noise))
        monkeypatch.setattr(startup, "NO_KERNELS", startup.NO_KERNELS._replace(kernels=sampling.REFERENCES))
    elif mistake == "masks":
        build_masks = TreeModel._build_masks

        def masks_of_the_host(*args: Any) -> Any:
            return {window: None if mask is None else mask.cpu() for window, mask in build_masks(*args).items()}

        monkeypatch.setattr(TreeModel, "_build_masks", masks_of_the_host)
    else:
        monkeypatch.setattr(Tensor, "cpu", lambda tensor: tensor)
    refused = pytest.raises((RuntimeError, TypeError), match=r"(on|of) the card")
    with card, offload.load(target, draft, tree="8x3", **LOAD) as decoder, refused:
        decoder.generate(prompts()[1], temperature=0.8, max_new_tokens=4, tree="grown:8x3")


WARM = Sampling(temperature=0.8, seed=4)
ADJUSTED = replace(WARM, repeat_penalty=1.2, frequency_penalty=0.3, logit_bias=((7, 1.5), (9, -2.0)))


def test_each_part_of_a_step_sends_what_it_needs() -> None:
    """Tokens that were said, coins of a draw and rows that are committed; a draft learns from what lies there."""
    by_send = list[int]()

    def send(tensor: Tensor) -> Tensor:
        by_send.append(tensor.numel())
        return tensor.to(place())

    with StrictDevice() as card:
        scores_TV, token_T = torch.randn(3, 40).to(place()), torch.tensor([1, 2, 3]).to(place())
        cache = KVCache(1, 8, send=send)
        cache.write(0, 0, {KEYS: torch.randn(1, 2, 4, 6).to(place()), VALUES: torch.randn(1, 2, 4, 6).to(place())})
        card.sends.clear()
        sampler = Sampler(ADJUSTED, 40, find_rule("specinfer").drafting, send=send)
        sampler.begin([5, 9])
        sampler.accept([3, 4])
        sampler.adjusted(scores_TV, [(), (1,), (1, 2)])
        assert len(by_send) > 3
        draw_children(scores_TV, 2, sampler, 7)
        cache.commit([0, 2])
        DraftCalibration().learn(scores_TV, token_T)
        assert card.sends == by_send, "whatever gets there goes by `send`"


class Step(NamedTuple):
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
        left = list(self.by_send)
        return [size for size in self.card.sends if size not in left or left.remove(size) is not None]


@pytest.fixture
def counted(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """To be entered once everything else is ready."""
    monkeypatch.setattr(FakeDevice, "torch_device", place())
    monkeypatch.setattr(FakeDevice, "of_test", device, raising=False)
    return Counted(StrictDevice(), monkeypatch)


def write(step: Step, counted: Counted, base: Path, patch: pytest.MonkeyPatch) -> int:
    """Some steps behind the prompt; returns how many tensors went by `send`, and leaves the others in `astray`."""
    target, draft, wanted = pair_of(step.family, base)
    if step.options.get("experts"):
        place_experts(patch, 9, 5, "DISK", "PINNED")
    else:
        place_layers(patch, *TIERS["pinned"])
    options = {"context": 128, "threads": 1, "profile": "none", "parallel": step.num_texts, **BUDGETS, **step.options}
    prompt = prompts()[1]
    if step.options.get("lookup"):
        prompt = prompt * 2
    for model in (target, draft):
        describe(model)  # is kept: the pass without numbers is none of the card's
    with counted.card, offload.load(target, draft, tree=step.tree, rule=step.rule, **options) as decoder:
        drafter = getattr(decoder.drafter, "_model", decoder.drafter)  # beside guesses, or by itself
        for model in (decoder.target._model, drafter.model):
            model.set_uploader(counted.send)
        runs = [decoder.start(Request(prompt, step.sampling, 30)) for _ in range(step.num_texts)]
        advance(decoder, runs)
        counted.begin()
        for _ in range(3):
            advance(decoder, runs)
        texts = [run.sequence.new_ids for run in runs]
        assert all(len(text) > 3 for text in texts)
        if step.sampling == Sampling() and "lookup" not in step.options:
            assert texts == [wanted[: len(text)] for text in texts]
    return len(counted.by_send)


@pytest.mark.parametrize("name", STEPS)
def test_nothing_gets_to_the_card_but_by_send(
    name: str, counted: Counted, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent = write(STEPS[name], counted, base, monkeypatch)
    assert num_sent > 3 and counted.astray == []
