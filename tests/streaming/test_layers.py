"""The cycle of layers through slots: order, read-ahead, reuse, interruption; of a store that obeys, and of decoders."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from plans import make_plan, model_shape
from random_files import Planned, write_file
from reciting import failing_reads
from tiny import FAMILIES, build, save

import offload
from offload.checkpoint.layout import BLOCK_BYTES, Placed, SlabLayout, TensorPart, slab_layout
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.safetensors import read_header
from offload.errors import ReadError
from offload.model.tree_model import TreeModel
from offload.streaming.carriers import Carrier
from offload.streaming.device import HOST
from offload.streaming.disk import DiskReader, finish
from offload.streaming.layers import LayerStream

NUM_LAYERS = 5
LAYOUTS = [SlabLayout((), {"w": Placed("F32", (4,), 0)}, BLOCK_BYTES, is_direct=True) for _ in range(NUM_LAYERS)]


class ToldStore:
    """Writes the layer's number into the slab when the test says so, in any order; remembers what was asked."""

    note = None

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once, self.bytes_read = at_once, 0
        self.asked: list[int] = []
        self.waiting: list[tuple[int, np.ndarray, Future[None]]] = []

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        layer = next(index for index, known in enumerate(LAYOUTS) if known is layout)
        self.asked.append(layer)
        self.waiting.append((layer, slab, Future()))
        future = self.waiting[-1][2]
        if self.at_once:
            self.finish(0)
        return [future]

    def finish(self, index: int) -> None:
        layer, slab, future = self.waiting.pop(index)
        if future.set_running_or_notify_cancel():
            slab[:BLOCK_BYTES] = layer
            self.bytes_read += BLOCK_BYTES
            future.set_result(None)


def stream_over(
    store: Any, resident: set[int], num_slots: int, layouts: Sequence[SlabLayout] = tuple(LAYOUTS)
) -> LayerStream:
    stream = LayerStream(Carrier(store, layouts, sorted(resident), HOST), num_slots)
    stream.load_resident()
    return stream


def sweep(stream: LayerStream) -> None:
    stream.begin_sweep()
    for layer in range(NUM_LAYERS):
        assert (stream.acquire(layer) == layer).all(), f"layer {layer} is not what arrived"
        stream.release(layer)


@pytest.mark.parametrize("resident", [set(), {0}, {1, 3}, {0, 1, 2, 3}, {1, 2, 3, 4}, {0, 1, 3, 4}], ids=str)
@pytest.mark.parametrize("num_slots", [2, 3])
def test_sweeps_follow_one_another_without_a_gap(num_slots: int, resident: set[int]) -> None:
    store = ToldStore()
    stream = stream_over(store, resident, num_slots)
    streamed = [layer for layer in range(NUM_LAYERS) if layer not in resident]
    num_first = len(resident) + num_slots
    assert store.asked == [*sorted(resident), *(streamed * 3)[:num_slots]]
    for count in range(1, 4):
        sweep(stream)
        cycle = (streamed * (count + num_slots))[: count * len(streamed) + num_slots]
        assert store.asked[len(resident) :] == cycle, "the first layers of the next sweep are read before it begins"
    assert len(store.asked) == num_first + 3 * len(streamed), "a resident layer was read again"


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_slot_is_refilled_only_after_its_release(num_slots: int) -> None:
    """While layers are held, no read may touch their slots; so holding all of them stops the stream."""
    store = ToldStore()
    stream = stream_over(store, set(), num_slots)
    held = [stream.acquire(layer) for layer in range(num_slots)]
    assert len({slab.data_ptr() for slab in held}) == num_slots
    assert store.asked == list(range(num_slots)), "a read was started into a slot that is in use"
    assert [int(slab[0]) for slab in held] == list(range(num_slots))
    stream.release(0)
    assert store.asked[num_slots:] == [num_slots % NUM_LAYERS]
    assert int(held[0][0]) == num_slots % NUM_LAYERS, "the released slot takes the next layer"


def test_a_layer_is_handed_out_only_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on when the layer arrives: waiting for the link is what `stall_s` counts."""
    store, now_s = ToldStore(at_once=False), [0.0]
    monkeypatch.setattr("offload.streaming.device.time.perf_counter", lambda: now_s[0])
    stream = stream_over(store, set(), 2)
    store.finish(1)  # layer 1 overtakes layer 0

    def arrive() -> None:
        now_s[0] = 5.0
        store.finish(0)

    timer = threading.Timer(0.15, arrive)
    timer.start()
    assert (stream.acquire(0) == 0).all()
    assert stream.stall_s == 5
    assert (stream.acquire(1) == 1).all()
    assert stream.stall_s == 5, "layer 1 had arrived already"
    timer.join()


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("num_done", range(NUM_LAYERS))
def test_an_interrupted_sweep_is_begun_again(num_done: int, is_held: bool) -> None:
    store = ToldStore()
    stream = stream_over(store, {3}, 2)
    for layer in range(num_done):
        stream.acquire(layer)
        if not (is_held and layer == num_done - 1):
            stream.release(layer)
    num_asked = len(store.asked)
    stream.begin_sweep()
    has_moved = bool({layer for layer in range(num_done) if layer != 3})
    assert store.asked[num_asked:] == ([0, 1] if has_moved else [])
    for _ in range(2):
        sweep(stream)


def test_begin_sweep_waits_for_readers_that_still_write() -> None:
    """A read under way cannot be called back: its slot must not be given to another before it ends."""
    store = ToldStore(at_once=False)
    stream = stream_over(store, set(), 2)
    for _ in range(2):
        store.finish(0)
    stream.acquire(0)
    stream.release(0)  # layer 2 is asked for
    layer, slab, future = store.waiting.pop()
    assert layer == 2 and future.set_running_or_notify_cancel()
    events = []

    def end_late() -> None:
        time.sleep(0.1)
        slab[:] = layer
        events.append("written")
        future.set_result(None)

    late = threading.Thread(target=end_late)
    late.start()
    stream.begin_sweep()
    events.append("begun")
    late.join()
    assert events == ["written", "begun"]
    store.at_once = True
    while store.waiting:
        store.finish(0)
    sweep(stream)


@pytest.fixture
def layer_file(tmp_path: Path) -> tuple[Path, list[SlabLayout]]:
    path = tmp_path / "model.safetensors"
    write_file(path, [Planned(f"layers.{n}.w", "F32", (1 << 14,)) for n in range(NUM_LAYERS)], np.random.default_rng(0))
    return path, [slab_layout({"w": (e.shape, [TensorPart(e)])}) for e in read_header(path).tensors.values()]


def test_a_read_error_reaches_whoever_acquires(layer_file: tuple[Path, list[SlabLayout]]) -> None:
    path, layouts = layer_file
    store = DiskReader([path])
    try:
        stream = stream_over(store, set(), 2, layouts)
        stream.begin_sweep()
        stream.acquire(0)
        for future in stream.cycle._transfers[0].parts:
            future.result()
        with failing_reads(1):
            stream.release(0)
            stream.acquire(1)
            with pytest.raises(ReadError, match=r"model\.safetensors failed: Input/output error"):
                stream.acquire(2)
        for _ in range(2):  # the failed read is not remembered: the next sweeps find the disk well again
            stream.begin_sweep()
            for layer in range(NUM_LAYERS):
                stream.acquire(layer)
                stream.release(layer)
    finally:
        store.close()


def tiny_target(directory: Path) -> tuple[Path, int]:
    """A checkpoint and a budget under which its four layers stream through three slots."""
    target = save(build(FAMILIES["llama"]()), directory / "target")
    roomy = make_plan(model_shape(open_checkpoint(target)), None, 1 << 40, context=128, num_nodes=1)
    return target, roomy.fixed_bytes + 3 * max(roomy.layer_bytes) + 100


def test_a_sweep_moves_the_bytes_of_the_plan(tmp_path: Path) -> None:
    target, ram = tiny_target(tmp_path)
    with offload.load(target, ram=ram, context=128, threads=1, tree="none") as decoder:
        plan, stream = decoder.plan, decoder.target.stream
        assert plan.num_layer_slots == 3 and plan.num_resident == 0
        num_runs = sum(len(layout.pieces) for layout in stream.carrier.layouts)
        moved, counted = [], []
        for _ in range(2):
            for num_new in (4, 9):
                decoder.generate([5, 6, 7], max_new_tokens=num_new)
                for transfer in stream.cycle._transfers:
                    finish(transfer.parts)
                moved.append(stream.carrier.source.bytes_read)
                counted.append(stream.bytes_read)
    # every token but the last needs one sweep of its own, and read-ahead is the same after each generation
    for figures in (moved, counted):
        for options, num_sweeps in zip(np.diff(figures).tolist(), (9, 4, 9), strict=True):
            assert options % num_sweeps == 0
            assert plan.streamed_bytes - 2 * BLOCK_BYTES * num_runs <= options / num_sweeps <= plan.streamed_bytes


def logits_of_a_generation(target: Path, ram: int) -> list[torch.Tensor]:
    seen, forward = list[torch.Tensor](), TreeModel.forward_parts

    def watch(*others: Any, **options: Any) -> torch.Tensor:
        seen.append(forward(*others, **options))
        return seen[-1]

    options: dict[str, Any] = {"context": 128, "threads": 1, "invariant": False, "tree": "none"}
    with offload.load(target, ram=ram, **options) as decoder, patch.object(TreeModel, "forward_parts", watch):
        decoder.target.stream.poison_released = True
        decoder.generate([5, 6, 7], max_new_tokens=12)
    return seen


def test_a_generation_never_reads_a_released_slot(tmp_path: Path) -> None:
    target, ram = tiny_target(tmp_path)
    streamed, resident = logits_of_a_generation(target, ram), logits_of_a_generation(target, 1 << 31)
    assert len(streamed) == len(resident) == 12
    for ours, theirs in zip(streamed, resident, strict=True):
        assert torch.equal(ours, theirs) and not ours.isnan().any()
