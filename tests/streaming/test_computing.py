"""Every pass, whichever thread runs it, is computed where the device says: Triton launches where a thread stands."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice
from test_device_path import BUDGETS, TIERS, pair_of, place_layers
from test_tiny import prompts

import offload
from offload.distributed.pipeline import Services
from offload.drafting.model import ModelDrafter
from offload.engine import sharing as turn
from offload.engine.request import Request
from offload.engine.service import Engine
from offload.model.kv_cache import KVCache
from offload.model.streamed import StreamedModel
from offload.sampling_options import Sampling

COMPUTES = ((StreamedModel, "_call"), (KVCache, "commit"), (KVCache, "copy_from"), (ModelDrafter, "commit"))


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
    how: dict[str, Any] = {"device": device, "context": 128, "threads": 1, "profile": "none", **BUDGETS}
    with offload.load(target, draft, tree="8x3", parallel=2, **how) as decoder:
        assert decoder.generate(prompt, max_new_tokens=6).token_ids == wanted[:6]
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


def test_a_turn_that_stands_anywhere_is_found(watch: Watch, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def elsewhere(self: turn.DecoderLock) -> Iterator[None]:
        with self._lock:
            yield

    monkeypatch.setattr(turn.DecoderLock, "held", elsewhere)
    use(watch, base)
    assert {"offload-engine", "MainThread"} <= {thread for _, thread in watch.astray()}


def test_services_of_stages_are_computed_there() -> None:
    device, seen = OneDevice(), list[bool]()
    for one in (device, None):
        Services([lambda: seen.append(device.is_entered)] * 2, one).run()
    assert seen == [True, True, False, False]


def test_a_closed_decoder_keeps_nothing_by_its_turn(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn enters is the device's, not the target's: its weights would stay."""
    place_layers(monkeypatch, *TIERS["host"])
    target, _, __ = pair_of("llama", base)
    decoder = offload.load(target, device=FakeDevice(), tree="none", context=64, threads=1, **BUDGETS)
    held = decoder._turn._computing
    decoder.close()
    assert not hasattr(held, "__self__") and all(not isinstance(one, StreamedModel) for one in held.args)  # type: ignore[attr-defined]
