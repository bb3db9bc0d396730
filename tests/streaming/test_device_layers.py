"""Slots on a device: every wait is needed. Copies and kernels run late; without an event something shows.

Layers carry their number in every byte from their first weight on. A kernel looks at its slot when the compute stream
gets to it, not when it was enqueued, and a released slot holds NaN.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, ThreadStore, fake_arena
from waiting import until

from offload.checkpoint.layout import BLOCK_BYTES, Placed, SlabLayout
from offload.errors import ReadError
from offload.memory.tiers import LayerTier
from offload.streaming import sender
from offload.streaming.carriers import DeviceCarrier
from offload.streaming.layers import LayerStream

NUM_LAYERS, LEAD_BYTES = 7, 24


def layouts(count: int) -> list[SlabLayout]:
    weights = {"w": Placed("F32", (4,), LEAD_BYTES)}
    return [SlabLayout((), weights, BLOCK_BYTES, is_direct=True) for _ in range(count)]


LAYOUTS = layouts(NUM_LAYERS)
R, H, D = LayerTier.RESIDENT, LayerTier.PINNED, LayerTier.DISK
TIERS = {
    "host": [H] * 7,
    "disk": [D] * 7,
    "mixed": [H, D, D, H, R, D, H],
    "disk first": [D, H, H, H, R, R, H],
    "one on disk": [R, R, R, D, R, R, R],
    "resident": [R] * 7,
}


def own_store() -> ThreadStore:
    return ThreadStore(LAYOUTS, LEAD_BYTES)


def layers_over(
    store: Any, tiers: list[LayerTier], num_slots: int, device: FakeDevice, limit_bytes: float = float("inf")
) -> LayerStream:
    options: dict[str, Any] = {"device": device, "pinned": fake_arena(limit_bytes), "num_host_slots": 2}
    return LayerStream(DeviceCarrier(store, LAYOUTS, tiers, **options), num_slots)


@contextmanager
def streaming(
    tiers: list[LayerTier], num_slots: int = 2, *, seed: int = 0, limit_bytes: float = float("inf"), **options: Any
) -> Iterator[tuple[LayerStream, FakeDevice, ThreadStore]]:
    device, store = FakeDevice(seed, **{"is_compute_late": True, "haste": 0.4, **options}), own_store()
    stream = layers_over(store, tiers, num_slots, device, limit_bytes)
    stream.poison_released = True
    try:
        stream.load_resident()
        yield stream, device, store
    finally:
        stream.close()
        assert not device.copies, "memory may go only when every copy has ended"
        device.finish()
        store.close()


def sweep(stream: LayerStream, device: FakeDevice) -> list[str]:
    """One sweep; what the kernels will have seen that was not their layer, once the device has run them."""
    wrong: list[str] = []

    def look(layer: int, slab: torch.Tensor) -> None:
        if not (slab[: BLOCK_BYTES - LEAD_BYTES] == layer).all():
            wrong.append(f"layer {layer} saw {int(slab[0])}")

    stream.begin_sweep()
    for layer in range(NUM_LAYERS):
        slab = stream.acquire(layer)
        for _ in range(2):  # the later kernel of a layer is the one that a hasty copy would hit
            device.launch(lambda layer=layer, slab=slab: look(layer, slab))
        stream.release(layer)
    return wrong


def sweeps(stream: LayerStream, device: FakeDevice, count: int = 3) -> list[str]:
    wrong = [sweep(stream, device) for _ in range(count)]
    device.finish()
    return [*chain.from_iterable(wrong)]


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("kind", TIERS)
def test_every_kernel_sees_its_own_layer(kind: str, num_slots: int) -> None:
    for seed in range(6):
        with streaming(TIERS[kind], num_slots, seed=seed) as (stream, device, _):
            assert not sweeps(stream, device)


def test_pinned_buffers_wait_for_their_copies_and_host_layers_for_nothing() -> None:
    """With copies that nothing hurries, the reader stops at the buffers it has."""
    with streaming(TIERS["disk"], num_slots=3, haste=0.0) as (stream, device, store):
        until(lambda: len(store.asked) >= 2)
        assert not sweeps(stream, device, count=2)
    # A whole sweep is enqueued while the device has not begun; the next one's first layers are behind it.
    with streaming(TIERS["host"], num_slots=3, haste=0.0) as (stream, device, _):
        waits = device.num_host_waits
        sweep(stream, device)
        assert device.num_host_waits == waits and device.num_copies == 0, "the host waited for the device"
        device.finish()
        assert device.num_copies == NUM_LAYERS + 3
        assert stream.bytes_read == NUM_LAYERS * BLOCK_BYTES


@pytest.mark.parametrize(
    ("kind", "limit_bytes"),
    [("host", 0), ("host", 2500), ("host", 3 * BLOCK_BYTES), ("host", 3 * BLOCK_BYTES + 3000),
     ("disk", 0), ("disk", 2500), ("disk", BLOCK_BYTES)],
)  # fmt: skip
def test_memory_that_cannot_be_locked_is_sent_in_pieces(
    kind: str, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is read ahead: to copy from there, the feeding thread would hold up the one that computes."""
    monkeypatch.setattr(sender, "_BOUNCE_BYTES", 1000)
    with streaming(TIERS[kind], limit_bytes=limit_bytes, seed=limit_bytes) as (stream, device, _):
        assert not sweeps(stream, device)
        note = stream.carrier.note
        assert note and "could not be page-locked" in note and "the wall is at" in note
        pinned = {bounce.is_pinned for bounce in stream.carrier.sender._bounces.buffers}
        assert pinned <= {limit_bytes > 1000, False}


@pytest.mark.parametrize(("kind", "layer"), [("mixed", 5), ("disk", 0)])
def test_a_failed_read_reaches_whoever_wants_the_layer(kind: str, layer: int) -> None:
    with streaming(TIERS[kind]) as (stream, device, store):
        assert not sweeps(stream, device, count=1)
        store.failing = {layer}
        with pytest.raises(ReadError, match=f"block {layer} cannot be read"):
            sweeps(stream, device, count=2)
        store.failing = set()
        assert not sweeps(stream, device, count=2), "the stream must recover with the next sweep"


@pytest.mark.parametrize("kind", ["host", "disk", "mixed"])
def test_an_interrupted_sweep_begins_anew(kind: str) -> None:
    for stop in range(1, NUM_LAYERS):
        with streaming(TIERS[kind], seed=stop) as (stream, device, _):
            stream.begin_sweep()
            for layer in range(stop):
                stream.acquire(layer)
                if layer < stop - 1 or stop % 2:
                    stream.release(layer)
            assert not sweeps(stream, device, count=2)


def test_an_abandoned_kernel_is_not_overwritten() -> None:
    """After an interruption slots are refilled although their layers were never released, here 2 by 0."""
    with streaming(TIERS["host"], compute_share=0.0) as (stream, device, _):
        seen: list[int] = []
        stream.begin_sweep()
        for layer in range(3):
            slab = stream.acquire(layer)
            if layer < 2:
                stream.release(layer)
        device.launch(lambda: seen.append(int(slab[0])))
        assert not sweeps(stream, device, count=1)
        assert seen == [2]


def test_stall_is_what_compute_waited_and_nobody_waits_to_learn_it() -> None:
    """A copy takes a second of virtual time and a kernel none: all of a sweep is waiting."""
    with streaming(TIERS["host"], num_slots=2, haste=0.0) as (stream, device, _):
        sweep(stream, device)
        assert stream.stall_s == 0, "not known before the device gets there"
        device.finish()
        assert stream.stall_s == NUM_LAYERS
        assert stream.stall_s == NUM_LAYERS, "counted once"


def test_what_goes_to_the_device_passes_before_the_arena_is_filled() -> None:
    """The host's budget counts on it: both never lie in its memory at once."""
    order: list[str] = []

    class Loading(FakeDevice):
        def copy(self, *args: Any) -> None:
            order.append("copy")
            super().copy(*args)

    class TierAllocation(ThreadStore):
        def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
            order.append("host" if TIERS["disk first"][self.number_of(layout)] is H else "device")
            return super().read(layout, slab)

    store = TierAllocation(LAYOUTS, LEAD_BYTES)
    with closing(store), closing(layers_over(store, TIERS["disk first"], 2, Loading())) as stream:
        stream.load_resident()
        first_host = order.index("host")
        assert order[:first_host].count("copy") == TIERS["disk first"].count(R) == 2, order


def test_closing_leaves_no_thread_and_waits_for_no_read_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    with streaming(TIERS["disk"]) as (stream, _, store):
        store.delay_s = 0.1
        stream.acquire(0)
    assert threading.active_count() <= before
    # Closing does not wait for reads that have not begun.
    store, queued = own_store(), list[Future[None]]()
    monkeypatch.setattr(store, "read", lambda *_: queued.append(Future()) or queued[-1:])
    stream = layers_over(store, TIERS["disk"], 2, FakeDevice())
    stream.load_resident()
    closing = threading.Thread(target=stream.close)
    closing.start()
    closing.join(30)
    is_over = not closing.is_alive()
    for read in queued:
        if not read.cancel() and not read.done():
            read.set_result(None)
    closing.join()
    assert is_over and len(queued) == 2


def test_a_reader_thread_that_breaks_is_heard_and_a_dropped_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with streaming(TIERS["disk"]) as (stream, device, store):
        assert not sweeps(stream, device, count=1)
        monkeypatch.setattr(store, "read", lambda *_: 1 / 0)
        stream.stop()
        stream.begin_sweep()
        with pytest.raises(ZeroDivisionError):
            stream.acquire(0)
    # A dropped read has ended before its buffer is used again.
    with streaming(TIERS["disk"]) as (stream, device, store):
        assert not sweeps(stream, device, count=1)
        store.delay_s = 0.05
        stream.acquire(0)
        stream.release(0)
        time.sleep(0.02)
        stream.stop()
        buffers = stream.carrier.ahead.slots
        held = [buffer.clone() for buffer in buffers]
        time.sleep(0.12)
        assert all(torch.equal(buffer, before) for buffer, before in zip(buffers, held, strict=True))
        store.delay_s = 0
        assert not sweeps(stream, device, count=1)
