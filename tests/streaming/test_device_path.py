"""The whole path of a device without one: pinned allocator, tiers, slots, host table, with copies that come late.

What must come out is what transformers computes, token for token, as in `test_races.py`; and every pass, whichever
thread runs it, is computed where the device says: Triton launches where a thread stands.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from marks import needs_cuda
from test_tiny import prompts, reference
from tiny import FAMILIES, build, displaced, save, save_pair

import offload
from offload.drafting.model_drafter import ModelDrafter
from offload.engine.request import Request
from offload.engine.service import Engine
from offload.memory import planner
from offload.memory.planner import MemoryPlan
from offload.memory.tiers import LayerTier
from offload.model.kv_cache import KVCache
from offload.model.tree_model import TreeModel
from offload.sampling_options import Sampling
from offload.streaming.layers import LayerStream

TREES = ("none", "8x3", "64x16")
NUM_NEW = 48
BUDGETS = {"gpu_memory": "1100MiB", "ram": "2GiB"}


@cache
def pair_of(family: str, base: Path) -> tuple[Path, Path, list[int]]:
    """A target, its draft, and what transformers writes after the prompt; made once per family."""
    target, draft = save_pair(FAMILIES[family](), base / family)
    return target, draft, reference(target, prompts()[1], NUM_NEW)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """`load` finds a device; slots hold NaN unless something valid lies in them."""
    fake = FakeDevice(seed=3)
    monkeypatch.setattr("offload.streaming.cuda.open_device", lambda *_, **__: fake)
    poison(monkeypatch)
    monkeypatch.setattr(FakeDevice, "torch_device", torch.device("cpu"))
    yield fake
    assert not fake.copies, "nothing may be on its way when memory goes"


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots hold NaN from the first start of a stream on."""
    start = LayerStream._start

    def poisoned(self: LayerStream) -> None:
        self.poison_released = True
        start(self)

    monkeypatch.setattr(LayerStream, "_start", poisoned)


def place_layers(monkeypatch: pytest.MonkeyPatch, *tiers: str, **experts: int) -> None:
    """Plans put layers where these tiers say, in turn; the sizes stay the plan's, except for slots of experts."""
    plan_once = planner._plan_once

    def planned(*args: Any, **settings: Any) -> MemoryPlan:
        plan = plan_once(*args, **settings)
        if experts and not plan.has_experts:
            return plan
        placed = tuple(LayerTier[tiers[layer % len(tiers)]] for layer in range(len(plan.tier_L)))
        streams = any(tier is not LayerTier.RESIDENT for tier in placed)
        sizes = {"layer_slot_bytes": max(plan.layer_bytes), "num_layer_slots": 2 if streams else 0}
        return replace(
            plan, tier_L=placed, num_host_layer_slots=2 if LayerTier.DISK in placed else 0, **sizes, **experts
        )

    monkeypatch.setattr(planner, "_plan_once", planned)


TIERS = {name.lower(): (name,) * 4 for name in ("PINNED", "DISK", "RESIDENT")}
TIERS["all three"] = ("PINNED", "DISK", "RESIDENT", "DISK")


def test_the_plan_decides_where_layers_lie(device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from the test: a GPU with room for everything, and the plan's own sums."""
    target, draft, wanted = pair_of("llama", base)
    with offload.load(target, draft, context=128, tree="8x3", threads=1, gpu_memory="2GiB", ram="2GiB") as decoder:
        assert decoder.plan.num_layer_slots == 0 and decoder.plan.device == "cuda"
        assert decoder.generate(prompts()[1], max_new_tokens=20).token_ids == wanted[:20]


def test_a_run_goes_on_from_one_that_was_stopped(
    device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a layer of its second sweep, whose copies are still under way."""
    target, draft, wanted = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["all three"])
    prompt, layers = prompts()[1], iter(range(10**6))

    def stop() -> None:
        if next(layers) == 5:
            raise InterruptedError

    with offload.load(target, draft, context=128, tree="8x3", threads=1, on_layer=stop, **BUDGETS) as decoder:
        with pytest.raises(InterruptedError):
            decoder.generate(prompt, max_new_tokens=NUM_NEW)
        run = decoder.run([*prompt, *wanted[:7]], Sampling(), max_new_tokens=20, continues=True)
        list(run)
        assert run.result().token_ids == wanted[7:27]
        assert len(prompt) <= run.result().stats.num_kept_tokens < len(prompt) + 7


@pytest.mark.parametrize("remainder", [0, 8, 248])
def test_weights_begin_where_wide_loads_can(
    remainder: int, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they lie in their file, in slots and in layers that stay: all are as long as a multiple of 256 bytes."""
    target = displaced(save(build(FAMILIES["llama"]()), tmp_path, max_shard_size="1GB"), remainder, 256)
    place_layers(monkeypatch, *TIERS["all three"])
    seen: set[tuple[int, int]] = set()

    def watch(self: TreeModel, layer: int, sent: torch.Tensor) -> dict[str, torch.Tensor]:
        views = views_of(self, layer, sent)
        seen.update((layer, view.data_ptr() % 256) for view in views.values())
        return views

    views_of = TreeModel._views_of
    monkeypatch.setattr(TreeModel, "_views_of", watch)
    with offload.load(target, tree="none", context=64, threads=1, invariant=False, **BUDGETS) as decoder:
        decoder.generate([5, 6, 7], max_new_tokens=3)
        layouts = decoder.target.stream.carrier.layouts
    assert {layout.slab_bytes - layout.sent.stop for layout in layouts} == {0}
    assert seen == {(layer, 0) for layer in range(4)}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_on_a_card_ids_equal_transformers(family: str, tiers: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, wanted = pair_of(family, base)
    place_layers(monkeypatch, *TIERS[tiers])
    poison(monkeypatch)
    options = {"device": "cuda", "gpu_memory": "2GiB", "ram": "4GiB"}
    with offload.load(target, draft, context=128, tree="64x16", **options) as decoder:
        refusals = ["O_DIRECT", *([] if decoder.invariance.holds else [decoder.invariance.reason])]
        others = [note for note in decoder.notes if not any(refusal in note for refusal in refusals)]
        assert not others, "a file system may lack O_DIRECT, and a card the same bits for every tree, and nothing else"
        assert decoder.comparisons and not any(pair.reason for pair in decoder.comparisons), "every kernel agrees"
        for tree in TREES:
            got = decoder.generate(prompts()[1], max_new_tokens=NUM_NEW, tree=tree)
            assert got.token_ids == wanted, tree
        assert 0 < got.stats.peak_device_bytes <= 2 << 30


COMPUTES = ((TreeModel, "_call"), (KVCache, "commit"), (KVCache, "copy_from"), (ModelDrafter, "accepted"))


class OneDevice(FakeDevice):
    """Knows which threads compute on it."""

    def __init__(self) -> None:
        super().__init__(seed=5)
        self.here = threading.local()

    @property
    def is_entered(self) -> bool:
        return getattr(self.here, "depth", 0) > 0

    @contextmanager
    def computing(self) -> Iterator[None]:  # type: ignore[override]
        self.here.depth = getattr(self.here, "depth", 0) + 1
        try:
            yield
        finally:
            self.here.depth -= 1


class Watch:
    """Notes what is computed, in which thread, and whether that stood on the device."""

    def __init__(self, device: OneDevice, patch: pytest.MonkeyPatch) -> None:
        self.seen, self._device = list[tuple[str, str, bool]](), device
        for kind, name in COMPUTES:
            patch.setattr(kind, name, self._watched(getattr(kind, name), f"{kind.__name__}.{name}"))

    def _watched(self, work: Any, name: str) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            self.seen.append((name, threading.current_thread().name, self._device.is_entered))
            return work(*args, **options)

        return noted

    def astray(self) -> set[tuple[str, str]]:
        return {(name, thread) for name, thread, is_entered in self.seen if not is_entered}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    place_layers(monkeypatch, *TIERS["all three"])
    return Watch(OneDevice(), monkeypatch)


def use(watch: Watch, base: Path) -> None:
    """Load, write, stream, go on, score, keep a session, and serve."""
    target, draft, wanted = pair_of("llama", base)
    prompt, device = prompts()[1], watch._device
    options: dict[str, Any] = {"device": device, "context": 128, "threads": 1, "profile": "none", **BUDGETS}
    with offload.load(target, draft, tree="8x3", parallel=2, **options) as decoder:
        got = decoder.generate(prompt, max_new_tokens=6)
        assert got.token_ids == wanted[:6]
        layouts = decoder.target.stream.carrier.layouts
        moved = sum(layouts[n].slab_bytes for n, name in enumerate(TIERS["all three"]) if name != "RESIDENT")
        assert (
            got.stats.bytes_streamed
            == got.stats.num_sweeps * moved
            <= got.stats.num_sweeps * decoder.plan.streamed_bytes
        )
        assert got.stats.stall_s > 0, "in virtual time every copy is waited for"
        run = decoder.run([*prompt, *wanted[:3]], Sampling(), max_new_tokens=4, continues=True)
        assert len(list(run)) > 0
        decoder.release(run)
        decoder.generate([prompt, prompt], max_new_tokens=4)
        decoder.score_texts([(prompt, 2)])
        with Engine(decoder) as engine:
            assert engine.submit(Request(prompt, Sampling(), 6)).result().token_ids == wanted[:6]
    assert not device.is_entered


def test_every_pass_is_computed_there(watch: Watch, base: Path) -> None:
    use(watch, base)
    assert {name for name, _, __ in watch.seen} == {f"{kind.__name__}.{name}" for kind, name in COMPUTES}
    assert {"MainThread", "offload-engine"} <= {thread for _, thread, __ in watch.seen}
    assert not watch.astray()
