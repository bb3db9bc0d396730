"""The whole path of a device without one: pinned allocator, tiers, slots, host table, with copies that come late.

What must come out is what transformers computes, token for token.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from matrix import matrix
from test_tiny import prompts, reference
from tiny import FAMILIES, build, save, save_pair

import offload
from offload.calibration import link as card_link
from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.build import resident_model
from offload.engine.resolve import ResolvedRun
from offload.memory import planner
from offload.memory.planner import LayerTier, MemoryPlan
from offload.model.streamed import StreamedModel
from offload.sampling_options import Sampling
from offload.streaming.carriers import DeviceCarrier
from offload.streaming.layers import Layers

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
    monkeypatch.setattr("offload.streaming.device.open_device", lambda *_, **__: fake)
    poison(monkeypatch)
    monkeypatch.setattr(FakeDevice, "place", torch.device("cpu"))
    yield fake
    assert not fake.copies, "nothing may be on its way when memory goes"


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots hold NaN from the first start of a stream on."""
    start = Layers._start

    def poisoned(self: Layers) -> None:
        self.poison_released = True
        start(self)

    monkeypatch.setattr(Layers, "_start", poisoned)


def place_layers(monkeypatch: pytest.MonkeyPatch, *tiers: str) -> None:
    """Plans put the four layers where the test wants them; the sizes stay the plan's."""
    from dataclasses import replace

    plan_memory = planner.plan_memory

    def planned(*args: Any, **settings: Any) -> MemoryPlan:
        plan = plan_memory(*args, **settings)
        placed = tuple(LayerTier[name] for name in tiers)
        streams = any(tier is not LayerTier.RESIDENT for tier in placed)
        sizes = {"slot_bytes": max(plan.layer_bytes), "num_slots": 2 if streams else 0}
        return replace(plan, tier_L=placed, num_host_slots=2 if LayerTier.DISK in placed else 0, **sizes)

    monkeypatch.setattr(planner, "plan_memory", planned)


TIERS = {
    "host": ("HOST",) * 4,
    "disk": ("DISK",) * 4,
    "resident": ("RESIDENT",) * 4,
    "all three": ("HOST", "DISK", "RESIDENT", "DISK"),
}


@matrix("tiers", TIERS, always=["all three"], daily=1)
@matrix("family", ["llama", "llama-tied", "qwen3"], always=["llama"], daily=1)
def test_greedy_ids_equal_transformers(
    family: str, tiers: str, device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, wanted = pair_of(family, base)
    place_layers(monkeypatch, *TIERS[tiers])
    prompt = prompts()[1]
    with offload.load(target, draft, context=128, tree="64x16", threads=1, **BUDGETS) as decoder:
        assert isinstance(decoder.target.stream.carrier, DeviceCarrier)
        for tree in TREES:
            got = decoder.generate(prompt, max_new_tokens=NUM_NEW, tree=tree)
            assert got.token_ids == wanted, tree
        streamed = decoder.plan.streamed_bytes
        stats = got.stats
        if tiers != "resident":
            layouts = decoder.target.stream.carrier.layouts
            moved = sum(layouts[n].slab_bytes for n, name in enumerate(TIERS[tiers]) if name != "RESIDENT")
            assert stats.bytes_streamed == stats.num_sweeps * moved and 0.8 * streamed < moved <= streamed
            assert stats.stall_s > 0, "in virtual time every copy is waited for"
        else:
            assert stats.bytes_streamed == 0


def test_the_plan_decides_where_layers_lie(device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from the test: a GPU with room for everything, and the plan's own sums."""
    target, draft, wanted = pair_of("llama", base)
    with offload.load(target, draft, context=128, tree="8x3", threads=1, gpu_memory="2GiB", ram="2GiB") as decoder:
        assert decoder.plan.num_slots == 0 and decoder.plan.device == "cuda"
        assert decoder.generate(prompts()[1], max_new_tokens=20).token_ids == wanted[:20]


@pytest.mark.parametrize("tiers", ["host", "all three"])
def test_an_automatic_tree_goes_by_the_link_to_the_card(
    tiers: str, device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes a virtual second, however large: the link of the fake GPU is as slow as that."""
    target, draft, wanted = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS[tiers])
    seen: list[float] = []
    monkeypatch.setattr(card_link, "_COPY_BYTES", 1 << 16)
    link = ResolvedRun.measure_link
    monkeypatch.setattr(ResolvedRun, "measure_link", lambda run: seen.append(link(run)) or seen[-1])
    with offload.load(target, draft, context=128, tree="auto", threads=1, profile="none", **BUDGETS) as decoder:
        assert decoder.generate(prompts()[1], max_new_tokens=12).token_ids == wanted[:12]
    assert seen == [pytest.approx(1 << 16)], "the disk behind it is faster"


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


def test_the_embedding_table_stays_and_the_head_goes(tmp_path: Path) -> None:
    """On the meta device everything that was sent can be told from what stayed behind."""
    from offload.streaming.disk import DiskReader

    for family in ("llama", "llama-tied", "gemma3"):
        target, _ = save_pair(FAMILIES[family](), tmp_path / family)
        checkpoint = open_checkpoint(target)
        model = StreamedModel(checkpoint, place=torch.device("meta"), has_host_table=True)
        store = DiskReader(checkpoint.shards)
        try:
            model.bind_rest(store.fetch(model.rest_layout))
            model.bind_layer(0, store.fetch(model.layer_layouts[0]))
        finally:
            store.close()
        meta_model = model.meta_model
        assert meta_model.get_input_embeddings().weight.device.type == "cpu"
        assert meta_model.get_output_embeddings().weight.device.type == "meta"
        assert meta_model.get_decoder().norm.weight.device.type == "meta"
        assert {p.device.type for p in meta_model.get_decoder().layers[0].parameters()} == {"meta"}
        tables = dict(meta_model.get_input_embeddings().named_buffers())
        assert {buffer.device.type for buffer in tables.values()} <= {"cpu"}
        others = {name: b.device.type for name, b in meta_model.named_buffers() if "embed" not in name}
        assert others and set(others.values()) == {"meta"}
        rows = meta_model.get_input_embeddings()(torch.tensor([[1, 2]]))
        assert rows.device.type == "meta", "rows are gathered on the host and sent"
        model.close()


def begin_behind(path: Path, remainder: int) -> None:
    """Let the tensors of a file begin at `remainder` modulo 256, a multiple of 8, as far as the format goes."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size] + b" " * ((remainder - 8 - size) % 256)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])


@pytest.mark.parametrize("remainder", [0, 8, 248])
def test_weights_begin_where_wide_loads_can(
    remainder: int, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they lie in their file, in slots and in layers that stay: all are as long as a multiple of 256 bytes."""
    target = save(build(FAMILIES["llama"]()), tmp_path, max_shard_size="1GB")
    begin_behind(target / "model.safetensors", remainder)
    place_layers(monkeypatch, *TIERS["all three"])
    seen: set[tuple[int, int]] = set()

    def watch(self: StreamedModel, layer: int, sent: torch.Tensor) -> dict[str, torch.Tensor]:
        views = views_of(self, layer, sent)
        seen.update((layer, view.data_ptr() % 256) for view in views.values())
        return views

    views_of = StreamedModel._views_of
    monkeypatch.setattr(StreamedModel, "_views_of", watch)
    with offload.load(target, tree="none", context=64, threads=1, invariant=False, **BUDGETS) as decoder:
        decoder.generate([5, 6, 7], max_new_tokens=3)
        layouts = decoder.target.stream.carrier.layouts
    assert {layout.slab_bytes - layout.sent.stop for layout in layouts} == {0}
    assert seen == {(layer, 0) for layer in range(4)}


@pytest.mark.parametrize("remainder", [0, 8, 248])
def test_a_layer_that_is_sent_at_once_begins_with_its_first_weight(remainder: int, tmp_path: Path) -> None:
    """As those of the draft, which a GPU gets in memory of their own; the others lie there one by one."""
    target = save(build(FAMILIES["llama"]()), tmp_path, max_shard_size="1GB")
    begin_behind(target / "model.safetensors", remainder)
    model = resident_model(open_checkpoint(target), "float32", torch.device("meta"))
    weights = [weight for layer in model.meta_model.get_decoder().layers for weight in layer.parameters()]
    assert len(weights) == 4 * 9 and all(weight.storage_offset() * 4 % 256 == 0 for weight in weights)
    assert min(weight.storage_offset() for weight in weights) == 0
    assert model.meta_model.get_output_embeddings().weight.storage_offset() == 0


def test_views_of_a_slot_are_made_once(base: Path) -> None:
    from offload.streaming.disk import DiskReader

    target = pair_of("llama", base)[0]
    checkpoint = open_checkpoint(target)
    model, store = StreamedModel(checkpoint), DiskReader(checkpoint.shards)
    layout = model.layer_layouts[0]
    slots = [torch.from_numpy(store.fetch(layout)[layout.sent]) for _ in range(2)]
    bound = []
    for slot in (slots[0], slots[1], slots[0]):
        model.bind_layer(0, slot)
        bound.append(model.meta_model.get_decoder().layers[0].mlp.up_proj.weight)
        model.unbind_layer(0)
    assert bound[0] is bound[2] and bound[0].data_ptr() != bound[1].data_ptr()
    store.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_on_a_card_ids_equal_transformers(family: str, tiers: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is so on the real thing: poisoned slots, page-locked memory, recorded draft steps."""
    target, draft, wanted = pair_of(family, base)
    place_layers(monkeypatch, *TIERS[tiers])
    poison(monkeypatch)
    how = {"device": "cuda", "gpu_memory": "2GiB", "ram": "4GiB"}
    with offload.load(target, draft, context=128, tree="64x16", **how) as decoder:
        refusals = ["O_DIRECT", *([] if decoder.invariance.holds else [decoder.invariance.reason])]
        others = [note for note in decoder.notes if not any(refusal in note for refusal in refusals)]
        assert not others, "a file system may lack O_DIRECT, and a card the same bits for every tree, and nothing else"
        assert decoder.comparisons and not any(comparison.reason for comparison in decoder.comparisons), (
            "every kernel runs and agrees"
        )
        for tree in TREES:
            got = decoder.generate(prompts()[1], max_new_tokens=NUM_NEW, tree=tree)
            assert got.token_ids == wanted, tree
        assert 0 < got.stats.peak_device_bytes <= 2 << 30


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_recorded_passes_give_the_same_logits(tmp_path: Path) -> None:
    from test_cuda_graphs import passes

    from offload.kernels.registry import KERNELS
    from offload.model.cuda_graphs import use_graphs
    from offload.model.kv_cache import KVCache

    checkpoint = open_checkpoint(pair_of("llama", tmp_path)[0])
    place = torch.device("cuda", 0)
    plain, replayed = (resident_model(checkpoint, "float32", place) for _ in range(2))
    replayed.attend_with(KERNELS.path_attention)
    assert use_graphs(replayed) is None
    both = [passes(model, KVCache(model.num_layers, 29 + 24 + 12)) for model in (plain, replayed)]
    for theirs, ours in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
