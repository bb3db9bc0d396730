"""Everything that a run on a GPU computes, where tensors of the GPU and of the host cannot be mixed.

The fake device of the other tests lies in host memory, so that a mask or a number left on the wrong side goes unseen.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from matrix import matrix
from strict_place import OnCard, StrictDevice, attend_on_card, place
from test_cuda_graphs import passes
from test_device_path import BUDGETS, TIERS, device, pair_of, place_layers
from test_families import config_of, tiny_model
from test_path_rows import CLOSE, logits_of_two_trees
from test_tiny import prompts
from tiny import FAMILIES, build, save
from torch import Tensor

import offload
from offload.calibration import startup
from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.engine.build import resident_model
from offload.model.cuda_graphs import Graphs, Work
from offload.model.kv_cache import KVCache
from offload.model.streamed import StreamedModel
from offload.rules import RULES, drafting_of
from offload.sampling import sampler as sampling
from offload.sampling_options import Sampling
from offload.streaming.disk import DiskReader
from offload.trees.topology import DynamicShape

__all__ = ["device"]  # a fixture
LOAD = {"context": 128, "threads": 1, **BUDGETS}
PER_LAYER = ("gemma3n_text", "gemma4_text")  # have a table of inputs to every layer


@pytest.fixture
def card(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> StrictDevice:
    """To be entered once everything else is ready."""
    monkeypatch.setattr(FakeDevice, "place", place())
    return StrictDevice()


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe"])
def test_greedy_ids_equal_transformers(
    family: str, card: StrictDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, wanted = pair_of(family, base)
    place_layers(monkeypatch, *TIERS["all three"])
    with card, offload.load(target, draft, tree="16x6", **LOAD) as decoder:
        for tree in ("none", "16x6", "grown:16x6"):
            assert decoder.generate(prompts()[1], max_new_tokens=8, tree=tree).token_ids == wanted[:8], tree


def test_a_session_goes_there_and_back(card: StrictDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(build(FAMILIES["llama"]()), tmp_path / "model")
    place_layers(monkeypatch, *TIERS["host"])
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


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_draws_on_the_card(
    rule: str, card: StrictDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared noise is the same anywhere; draws from distributions come from another generator on a GPU."""
    target, draft, _ = pair_of("llama", base)
    how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 4, "max_new_tokens": 8}
    place_layers(monkeypatch, *TIERS["host"])
    with card, offload.load(target, draft, tree="8x3", rule=rule, **LOAD) as decoder:
        ours = decoder.generate(prompts()[1], **how).token_ids
    assert len(ours) == 8
    if not drafting_of(rule).keeps_distributions:
        monkeypatch.undo()
        with offload.load(target, draft, tree="8x3", rule=rule, context=128, threads=1, ram="1GiB") as decoder:
            assert ours == decoder.generate(prompts()[1], **how).token_ids


@pytest.mark.parametrize("tree", ["16x6", "grown:16x6"])
def test_the_host_looks_at_the_card_no_more_than_the_tree_needs(
    tree: str, card: StrictDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a level for a static tree, twice a pass for a dynamic one; behind the sweep once a token, and to learn."""
    target, draft, _ = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["host"])
    with card, offload.load(target, draft, tree=tree, **LOAD) as decoder:
        shape = decoder._trees.for_run(Sampling(), "match").shape
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


def placed_model(family: str, base: Path) -> StreamedModel:
    """All its layers on the GPU, its tables on the host."""
    model = StreamedModel(open_checkpoint(base / family), "float32", place(), has_host_table=True)
    store = DiskReader(model.checkpoint.shards)
    model.bind_rest(store.fetch(model.rest_layout))
    for layer, layout in enumerate(model.layer_layouts):
        model.bind_layer(layer, torch.from_numpy(store.fetch(layout)[layout.sent]).to(place()))
    store.close()
    return model


@matrix("family", [*PER_LAYER, "gemma3", "olmoe", "deepseek_v3", "gpt_oss"], daily=2)
def test_families_compute_the_same(family: str, tmp_path: Path) -> None:
    save(tiny_model(FAMILIES[family]() if family in FAMILIES else config_of(family)), tmp_path / family)
    wanted = logits_of_two_trees(resident_model(open_checkpoint(tmp_path / family), "float32"))
    with StrictDevice():
        for attend in (None, attend_on_card):
            model = placed_model(family, tmp_path)
            model.attend_with(attend)
            logits = logits_of_two_trees(model)
            assert isinstance(logits, OnCard)
            torch.testing.assert_close(logits.held, wanted, **CLOSE)


@pytest.mark.parametrize("family", [*PER_LAYER, "llama", "llama-tied"])
def test_what_stays_and_what_goes_is_planned_so(family: str, tmp_path: Path) -> None:
    save(tiny_model(FAMILIES[family]() if family in FAMILIES else config_of(family)), tmp_path / family)
    shape = model_shape(open_checkpoint(tmp_path / family), "float32")
    with StrictDevice():
        model = placed_model(family, tmp_path)
    inside = {id(one) for one in model.meta_model.get_decoder().layers.parameters()}
    rest = {id(one): one for one in model.meta_model.parameters() if id(one) not in inside}.values()
    num_bytes = {is_here: sum(p.nbytes for p in rest if (p.device == place()) is is_here) for is_here in (True, False)}
    slack = 8 * 4096  # of blocks around what is read
    assert num_bytes[True] <= shape.head_bytes <= num_bytes[True] + slack
    assert num_bytes[False] <= shape.table_bytes <= num_bytes[False] + slack


class Recorder:
    """Stands in for a CUDA graph, in which nothing may cross over."""

    def __init__(self, card: StrictDevice) -> None:
        self._card, self.num_recorded = card, 0

    def __call__(self, work: Work) -> Work:
        before = len(self._card.looks), len(self._card.sends)
        work()
        assert (len(self._card.looks), len(self._card.sends)) == before, "a recording cannot wait or fetch"
        self.num_recorded += 1
        return work


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma3"])
def test_recorded_passes_stay_on_the_card(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(build(FAMILIES[family]()), tmp_path))
    plain = resident_model(checkpoint, "float32")
    wanted = passes(plain, KVCache(plain.num_layers, 29 + 24 + 12))
    with StrictDevice() as card:
        recorder, model = Recorder(card), resident_model(checkpoint, "float32", place())
        model.attend_with(attend_on_card)
        model.replay_with(Graphs(model, lambda: recorder))
        got = passes(model, KVCache(model.num_layers, 29 + 24 + 12))
    assert recorder.num_recorded > 2
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.held, theirs, atol=2e-5, rtol=1e-4)


def test_a_recording_that_looks_or_fetches_is_refused(tmp_path: Path) -> None:
    with StrictDevice() as card:
        held = torch.ones(4, device=place())
        for work in (
            lambda: float(held.sum()),
            lambda: held.cpu(),
            lambda: held.nonzero(),
            lambda: held[held > 0],
            lambda: held.copy_(torch.zeros(4)),
            lambda: held + torch.tensor([1, 2, 3, 4], device=place()),
        ):
            with pytest.raises(AssertionError, match="cannot wait or fetch"):
                Recorder(card)(work)


def noise_of_the_host(seed: int, position: int, vocab_size: int, device: Any) -> Tensor:
    return torch.zeros(vocab_size)


@pytest.mark.parametrize("mistake", ["noise", "masks", "numpy"])
def test_what_is_left_on_the_wrong_side_is_refused(
    mistake: str, card: StrictDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, _ = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["host"])
    if mistake == "noise":
        monkeypatch.setattr(sampling, "REFERENCES", sampling.REFERENCES._replace(keyed_gumbel=noise_of_the_host))
        monkeypatch.setattr(startup, "NO_KERNELS", startup.NO_KERNELS._replace(kernels=sampling.REFERENCES))
    elif mistake == "masks":
        build_masks = StreamedModel._build_masks

        def masks_of_the_host(*args: Any) -> Any:
            return {window: None if mask is None else mask.cpu() for window, mask in build_masks(*args).items()}

        monkeypatch.setattr(StreamedModel, "_build_masks", masks_of_the_host)
    else:
        monkeypatch.setattr(Tensor, "cpu", lambda tensor: tensor)
    refused = pytest.raises((RuntimeError, TypeError), match=r"(on|of) the card")
    with card, offload.load(target, draft, tree="8x3", **LOAD) as decoder, refused:
        decoder.generate(prompts()[1], temperature=0.8, max_new_tokens=4, tree="grown:8x3")
