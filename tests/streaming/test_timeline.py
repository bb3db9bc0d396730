"""What a device did and when, layer by layer: told late, never waited for.

On the fake device a copy takes a second, and a layer, here, three.
"""

from itertools import pairwise

import pytest
from fake_device import FakeDevice
from test_device_layers import NUM_LAYERS, TIERS, streaming
from waiting import until

from offload.bench.harness.steps import Event
from offload.memory.plan import LayerTier
from offload.streaming.layers import Layers

KERNEL_S = 3.0


def sweep(stream: Layers, device: FakeDevice) -> None:
    def work() -> None:
        device.compute.now += KERNEL_S

    stream.begin_sweep()
    for layer in range(NUM_LAYERS):
        stream.acquire(layer)
        device.launch(work)
        stream.release(layer)


def spans_of(kind: str, *, num_slots: int = 2, limit_bytes: float = float("inf")) -> dict[str, list[Event]]:
    """Return the spans of two sweeps, by kind, in the order of their starts."""
    told: list[Event] = []
    with streaming(TIERS[kind], num_slots, limit_bytes=limit_bytes) as (stream, device, _):
        sweep(stream, device)
        device.finish()
        stream.record = lambda *span: told.append(Event(*span))
        assert stream.record is not None
        waits = device.num_host_waits
        for _ in range(2):
            sweep(stream, device)
        until(lambda: all(transfer.parts[0].done() for transfer in stream.stage._transfers))
        device.finish()
        if kind == "host" and limit_bytes:
            assert device.num_host_waits == waits, "the host waited for the device to learn the times"
        assert not told, "nothing is told before it is asked for"
        stream.record = None
        assert stream.record is None
        sweep(stream, device)
        device.finish()
    assert {event.kind for event in told} <= {"copy", "wait", "compute"}
    by_start = sorted(told, key=lambda event: (event.start_s, event.end_s))
    return {kind: [event for event in by_start if event.kind == kind] for kind in ("copy", "wait", "compute")}


@pytest.mark.parametrize("kind", TIERS)
def test_every_layer_is_told_in_the_order_of_its_use(kind: str) -> None:
    spans = spans_of(kind)
    streamed = [layer for layer, tier in enumerate(TIERS[kind]) if tier is not LayerTier.RESIDENT]
    assert [event.layer for event in spans["compute"]] == [*range(NUM_LAYERS)] * 2
    assert [event.layer for event in spans["wait"]] == streamed * 2
    copies = spans["copy"]
    if kind in ("host", "disk"):  # a layer from disk may be sent after one behind it that lies in memory
        begins = streamed.index(copies[0].layer)
        assert [event.layer for event in copies] == [*streamed * 4][begins : begins + len(copies)]
    assert {event.layer for event in copies} == set(streamed)
    for event in copies:
        assert event.end_s - event.start_s == pytest.approx(1), "a copy is told without the wait for its slot"
    for event in spans["compute"]:
        assert event.end_s - event.start_s == pytest.approx(KERNEL_S), "waiting is no part of it"
    for one, two in pairwise(copies):
        assert one.end_s <= two.start_s + 1e-9, "copies follow one another"


def test_a_slot_is_copied_into_when_its_layer_is_no_longer_used() -> None:
    """With two slots, the copy of a layer begins when the one two places before it has been computed with."""
    spans = spans_of("host")
    uses = {(event.layer, index // NUM_LAYERS): event for index, event in enumerate(spans["compute"])}
    for (layer, number), used in uses.items():
        behind = (layer + 2) % NUM_LAYERS
        following = uses.get((behind, number + (behind < layer)))
        if following is None:
            continue
        own = [e for e in spans["copy"] if e.layer == behind and used.end_s - 1e-9 <= e.start_s < following.start_s]
        assert len(own) == 1 and own[0].end_s <= following.start_s + 1e-9, (layer, number)


def test_pieces_through_a_bounce_buffer_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.streaming import carriers

    monkeypatch.setattr(carriers, "_BOUNCE_BYTES", 1000)
    spans = spans_of("host", limit_bytes=0)
    assert spans["copy"] and all(event.end_s - event.start_s >= 5 - 1e-9 for event in spans["copy"])
