"""No access races with another: over slots, locked buffers, bounce buffers, the ring of uploads, recordings, experts.

Every tier and pool is run by `vector_clocks`, which needs no luck to see a race. Then each place of the program that
waits, or records what is waited for, is forgotten, one after the other: each has to show.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_device_experts as expert_tests
import test_device_layers as layer_tests
import torch
from clock_graphs import ClockCard, ClockPaper
from paper_cuda import draft_on_card
from strict_place import OnCard, StrictDevice, place
from test_cuda_graphs import passes
from test_device_experts import NUM_EXPERTS, POOLS, RECORDS, SIZES, chosen, place_experts
from test_device_layers import LAYOUTS, LEAD_BYTES, NUM_LAYERS, TIERS
from test_device_path import BUDGETS, pair_of, place_layers
from test_device_path import TIERS as PLACED
from test_tiny import prompts
from tiny import FAMILIES, build, save
from torch import Tensor
from vector_clocks import ClockDevice, Clocks, follow_threads

import offload
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import open_checkpoint
from offload.model import cuda_graphs
from offload.model.cuda_graphs import use_graphs
from offload.model.headers import describe
from offload.model.kv_cache import KVCache
from offload.planning.cost_model import NEVER
from offload.streaming import cuda as staging
from offload.streaming import expert_carrier, sender
from offload.streaming.carriers import DeviceCarrier
from offload.streaming.cuda import StagingRing
from offload.streaming.experts import open_pool
from offload.streaming.layers import LayerStream

Run = Callable[[ClockDevice], None]


def watched(store: Any, clocks: Clocks) -> Any:
    """Its readers write into what they are given."""
    fill = store._fill

    def filled(number: int, part: np.ndarray) -> None:
        clocks.access(clocks.thread(), part, "a disk fills", writes=True)
        fill(number, part)

    store._fill = filled
    return store


def assert_is(slab: Tensor, number: int) -> None:
    """What is in order is right for every schedule where it is right for this one."""
    assert bool((slab[: BLOCK_BYTES - LEAD_BYTES] == number).all()), f"{number} saw {int(slab[0])}"


def sweep(stream: LayerStream, clocks: Clocks, num_layers: int = NUM_LAYERS) -> None:
    stream.begin_sweep()
    for layer in range(num_layers):
        slab = stream.acquire(layer)
        assert_is(slab, layer)
        clocks.use("compute", slab, "a layer computes")
        clocks.use("compute", slab, "a layer computes")
        stream.release(layer)


def layers(kind: str, num_slots: int) -> Run:
    """Sweeps, one that is cut short, and the end."""

    def run(device: ClockDevice) -> None:
        clocks, store = device.clocks, watched(layer_tests.own_store(), device.clocks)
        pinned = device.open_allocator()
        carrier = DeviceCarrier(store, LAYOUTS, TIERS[kind], device=device, pinned=pinned, num_host_slots=2)
        stream = LayerStream(carrier, num_slots)
        stream.poison_released = True
        try:
            stream.load_resident()
            for num_layers in (NUM_LAYERS, NUM_LAYERS, 3, NUM_LAYERS):
                sweep(stream, clocks, num_layers)
        finally:
            stream.close()
            device.give_back()
            pinned.close()
            store.close()

    return run


def experts(num_slots: int, num_host_slots: int, ahead_rows: int = NEVER, *, poison: bool = False) -> Run:
    """Passes that need few and all, and one that is cut short."""

    def run(device: ClockDevice) -> None:
        clocks, store = device.clocks, watched(expert_tests.own_store(), device.clocks)
        with ExitStack() as resources:
            resources.callback(store.close)
            resources.callback(device.give_back)
            options = {"num_host_slots": num_host_slots, "ahead_rows": ahead_rows}
            pool = open_pool(store, RECORDS, num_slots, device, resources, **options)
            pool.poison_released = poison
            for num_chosen, num_layers in ((2, 3), (NUM_EXPERTS, 3), (3, 2), (3, 3)):
                for experts_L in chosen(3, num_chosen):
                    pool.begin_pass(1)
                    for layer, wanted in enumerate(experts_L[:num_layers]):
                        for expert, _, slab in pool.bring(layer, wanted, [1] * len(wanted)):
                            assert_is(slab, layer * NUM_EXPERTS + expert)
                            clocks.use("compute", slab, "an expert computes")
                            clocks.use("compute", slab, "an expert computes")
                            if layer == num_layers - 1 == 1:
                                break  # the pass ends with a kernel under way, whose slot is wanted at once

    return run


class Staged:
    """Memory of the ring: the host writes into it, and a kernel reads it."""

    def __init__(self, array: np.ndarray, clocks: Clocks) -> None:
        self.array, self.clocks = array, clocks

    def __len__(self) -> int:
        return len(self.array)

    def __setitem__(self, part: slice, values: np.ndarray) -> None:
        self.clocks.access(self.clocks.thread(), self.array[part], "the host writes an upload", writes=True)
        self.array[part] = values


class Seen(NamedTuple):
    words: Tensor
    clocks: Clocks

    def __getitem__(self, part: Any) -> Any:
        return Seen(self.words[part], self.clocks)

    def bitwise_or(self, _: int) -> Tensor:
        self.clocks.use("compute", self.words, "a kernel reads an upload")
        return self.words.clone()


def ring(num_bytes: int) -> Run:
    """Uploads of all sizes, many times around; the memory is unlocked in the end."""

    def run(device: ClockDevice) -> None:
        pinned = device.open_allocator()
        buffer = pinned.allocate(num_bytes)
        device.clocks.know(buffer.array, 256)
        staged, seen = Staged(buffer.array, device.clocks), torch.from_numpy(buffer.array).view(torch.int64)
        uploads = StagingRing(
            staged,
            Seen(seen, device.clocks),
            lambda: device.mark(device.compute),
            device.synchronize,  # type: ignore[arg-type]
        )
        draw = np.random.default_rng(0)
        for _ in range(60):
            source = torch.from_numpy(draw.integers(0, 255, int(draw.integers(1, num_bytes // 3)), dtype=np.uint8))
            assert torch.equal(uploads.send(source), source)
        transposed, bf16 = torch.arange(12).view(3, 4).t(), torch.ones(3, 5, dtype=torch.bfloat16)
        for source in (torch.tensor(7), transposed, bf16, torch.ones(9) > 0):
            there = uploads.send(source)
            assert there.dtype == source.dtype and there.shape == source.shape and torch.equal(there, source)
        device.synchronize(device.mark(device.compute))
        pinned.close()

    return run


LOCKED, _NUM_TRIES = float("inf"), 3  # threads come by in another order each time
HANDED_ON = ("exception at disk.drop", "result at disk.finish", "result at slot_cycle.arrived")
RUNS: dict[str, tuple[Run, float]] = {
    **{f"layers, {kind}, {slots} slots": (layers(kind, slots), LOCKED) for kind in TIERS for slots in (2, 3)},
    **{f"layers, {kind}, not locked": (layers(kind, 2), 3 * 4096) for kind in ("host", "mixed", "disk first")},
    **{f"experts, {here} of {behind}": (experts(here, behind), LOCKED) for here, behind in SIZES},
    **{f"experts, {here} of {behind}, ahead": (experts(here, behind, 1), LOCKED) for here, behind in SIZES},
    **{
        f"experts, {here} of {behind}, poisoned": (experts(here, behind, 1, poison=True), LOCKED)
        for here, behind in SIZES
    },
    **{f"experts, {here} of {behind}, not locked": (experts(here, behind, 1), 0.0) for here, behind in SIZES[:3]},
    **{f"uploads, a ring of {size}": (ring(size), LOCKED) for size in (4096, 65536)},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounce buffers and regions that start over many times."""
    monkeypatch.setattr(sender, "_BOUNCE_BYTES", 1536)
    monkeypatch.setattr(expert_carrier, "_REGION_BYTES", 3 * 4096)
    monkeypatch.setattr(staging, "_PART_BYTES", 1024)


def ran(name: str, forgets: str | None = None) -> ClockDevice:
    """The device behind a run, in which one place was forgotten."""
    run, limit_bytes = RUNS[name]
    with pytest.MonkeyPatch.context() as patch:
        device = ClockDevice(Clocks(), forgets=forgets, limit_bytes=limit_bytes)
        follow_threads(patch, device)
        run(device)
    return device


@pytest.mark.parametrize("name", RUNS)
def test_nothing_races(name: str) -> None:
    device = ran(name)
    assert device.clocks.num_accesses > 50 and not device.clocks.races


def forgotten(sites: Mapping[str, Sequence[str]], run: Callable[[str, str], ClockDevice]) -> list[str]:
    """Return, of places, each with the runs that come by there, those that can be forgotten without a race."""
    tries = {site: [*names] * _NUM_TRIES for site, names in sorted(sites.items())}
    return [site for site, names in tries.items() if not any(run(name, site).clocks.races for name in names)]


def places() -> dict[str, list[str]]:
    runs_of = dict[str, list[str]]()
    for name in RUNS:
        for site in ran(name).sites:
            runs_of.setdefault(site, []).append(name)
    return runs_of


def test_every_wait_that_is_forgotten_shows() -> None:
    """All streams wait, and the host for them; threads of the host show where memory goes from one to another."""
    runs_of = places()
    of_threads = {site: runs_of.pop(site) for site in list(runs_of) if site.startswith(("result", "exception"))}
    assert len(runs_of) > 25 and not forgotten(runs_of, ran)
    handed_on = {site: names for site, names in of_threads.items() if site.partition(":")[0] in HANDED_ON}
    assert len(handed_on) == len(HANDED_ON) and not forgotten(handed_on, ran)


def recorded(checkpoint: Checkpoint, forgets: str | None = None, *, strays: bool = False) -> ClockDevice:
    """Passes of a draft that are recorded and replayed, in all widths, on one cache after another."""
    device = ClockDevice(Clocks(), forgets=forgets)
    paper = ClockPaper(device, strays=strays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "WIDTHS", (2, 5, 12))
        paper.install(patch)
        with ClockCard(paper, knows_all=True):
            model = draft_on_card(checkpoint)
            assert use_graphs(model) is None
            for _ in range(2):
                passes(model, KVCache(model.num_layers, 29 + 24 + 12))
    assert paper.num_replays > 6
    return device


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(build(FAMILIES["llama"]()), tmp_path_factory.mktemp("draft")))


def test_recordings_race_with_nothing_and_one_that_waits_for_nobody_shows(draft: Checkpoint) -> None:
    device = recorded(draft)
    assert device.clocks.num_accesses > 1000 and not device.clocks.races
    assert recorded(draft, strays=True).clocks.races, "a replay on a stream of its own shows"
    # A recording that waits for nothing shows.
    sites = recorded(draft).sites
    assert len(sites) == 2 and all(recorded(draft, site).clocks.races for site in sites)


def upload_by(device: ClockDevice) -> Callable[[Tensor], Tensor]:
    """Through a ring of 64 KiB, which kernels of the card read."""
    array = device.open_allocator().allocate(1 << 16).array
    with StrictDevice():
        seen = OnCard(torch.from_numpy(array).view(torch.int64))
    staged: Any = Staged(array, device.clocks)
    uploads = StagingRing(staged, seen, lambda: device.mark(device.compute), device.synchronize)

    def send(tensor: Tensor) -> Tensor:
        is_here = isinstance(tensor, OnCard)
        return tensor if is_here else uploads.send(tensor) if uploads.has_room_for(tensor) else tensor.to(place())

    return send


def written(family: str, base: Path, patch: pytest.MonkeyPatch, **options: Any) -> ClockDevice:
    """The whole of a decoder: every operation on the card is looked at, in the step that does it."""
    device = ClockDevice(Clocks(), torch_device=place())
    target, draft, wanted = pair_of(family, base)
    for model in (target, draft):
        describe(model)  # is kept: the pass without numbers is none of the card's
    follow_threads(patch, device)
    settings = {"context": 128, "threads": 1, "profile": "none", **BUDGETS, **options}
    with ClockCard(ClockPaper(device)), offload.load(target, draft, device=device, tree="16x6", **settings) as decoder:
        for model in (decoder.target._model, decoder.drafter.model):
            model.set_uploader(upload_by(device))
        for tree in ("none", "grown:16x6"):
            ids = decoder.generate(prompts()[1], max_new_tokens=6, tree=tree).token_ids
            assert ids == wanted[:6]
    assert device.clocks.num_accesses > 500
    return device


@pytest.mark.parametrize("sizes", [None, "least", "some"])
def test_decoding_races_with_nothing(sizes: str | None, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sizes is None:
        place_layers(monkeypatch, *PLACED["all three"])
        assert not written("llama", base, monkeypatch).clocks.races
    else:
        place_experts(monkeypatch, *POOLS[sizes], "DISK", "PINNED")
        assert not written("qwen3-moe", base, monkeypatch, experts="demand", invariant=False).clocks.races


def test_a_decoder_that_waits_for_nothing_shows(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model's own operations read from slots is seen."""
    place_experts(monkeypatch, *POOLS["some"], "PINNED")
    monkeypatch.setattr(ClockDevice, "wait", lambda *_: None)
    races = written("qwen3-moe", base, monkeypatch, experts="demand", invariant=False).clocks.races
    assert {before for before, _ in races} >= {"a copy writes"} and any("aten::" in behind for _, behind in races)
