"""The layers of a model in the order of a weight pass: some stay, others pass through a few slots.

This holds for a CPU, whose slots a disk fills, and for a device, to which layers are sent.
`acquire` makes the compute stream wait until a layer has arrived; `release` says that all of its
use has been enqueued.

Invariant: nothing is overwritten before the event after which it is no longer read, nor read before
the event after which it has arrived. The host only waits where a disk has not delivered.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import le

import torch
from torch import Tensor

from offload.checkpoint.layout import SlabLayout
from offload.memory.plan import MemoryPlan
from offload.streaming.carriers import Carrier, DeviceCarrier
from offload.streaming.device import POISON, Device, Stall
from offload.streaming.disk import ByteSource
from offload.streaming.slot_cycle import SlotCycle


class LayerStream:
    """Hands out the layers of one checkpoint; some stay, others pass through `num_slots` slots.

    On a device everything but a wait for the disk is only enqueued.
    """

    def __init__(self, carrier: Carrier, num_slots: int) -> None:
        self.carrier = carrier
        self._device = carrier.device
        passing = [*carrier.streamed, *carrier.once]
        slot_bytes = max((carrier.layouts[n].slab_bytes for n in passing), default=0)
        slots = [self._device.allocate(slot_bytes) for _ in range(num_slots if passing else 0)]
        self.cycle = SlotCycle(carrier.carry, carrier.streamed, slots)
        # tests fill slots with NaN as soon as they are free
        self.poison_released = False
        # bytes of handed-out layers that do not stay
        self.bytes_read = 0
        self._stall = Stall(self._device)

    @property
    def stall_s(self) -> float:
        """Return the seconds that compute has waited for layers."""
        return self._stall.known_s

    @property
    def reading_s(self) -> float:
        """Return the seconds of disk reading if the disk is the link; else 0."""
        return 0.0 if self._device.has_own_memory else self.carrier.source.reading_s

    def load_resident(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Read all layers that stay, in any tier, then start the cycle. Raises `ReadError`."""
        self.carrier.load(on_bytes)
        self._start()

    def begin_sweep(self) -> None:
        """Make the first layer the next to come; an interrupted pass left others queued."""
        if not self.cycle.is_at_start:
            self.stop()
            self._start()

    def begin_prompt(self) -> None:
        """Next bring the layers that a prompt passes once, then those of a pass."""
        if self.carrier.once:
            self.stop()
            self._start(self.carrier.once)

    def acquire(self, layer: int) -> Tensor:
        """Return the weights of `layer`, in order, for work enqueued before its release.

        Raises `ReadError`.
        """
        device = self._device
        if layer in self.carrier.resident:
            return self.carrier.weights(layer, self.carrier.resident[layer])
        before = device.mark(device.compute, is_timed=True)
        slot, ready = self.cycle.acquire(layer)
        device.wait(device.compute, ready)
        self._stall.add(before, device.mark(device.compute, is_timed=True))
        self.bytes_read += self.carrier.layouts[layer].slab_bytes
        return self.carrier.weights(layer, slot)

    def release(self, layer: int) -> None:
        """Note that all work that reads the weights of `layer` has been enqueued."""
        device = self._device
        slot = self.cycle.lent.get(layer)
        if slot is None:
            return
        if self.poison_released:
            device.fill(slot, POISON, device.compute)
        self.cycle.release(layer, device.mark(device.compute))

    def stop(self) -> None:
        """Cancel what is on its way; on return nothing moves."""
        self.cycle.cancel()
        self.carrier.stop()
        self.cycle.stop()

    def close(self) -> None:
        """Stop, and free the memory."""
        self.stop()
        self.cycle.slots.clear()
        self.carrier.close()

    def _start(self, once: Sequence[int] = ()) -> None:
        self.carrier.start()
        # an abandoned pass may still read the slots
        self.cycle.start(self._device.mark(self._device.compute), once)


def open_layers(
    source: ByteSource,
    layouts: Sequence[SlabLayout],
    plan: MemoryPlan,
    device: Device,
    resources: ExitStack,
) -> LayerStream:
    """Return layers placed by the plan, none of them read yet; `resources` closes them."""
    sizes = [layout.slab_bytes for layout in layouts]
    of_encoder = sizes[len(plan.layer_bytes) :]
    has_room = sum(of_encoder) <= plan.encoder_bytes or max(of_encoder) <= plan.layer_slot_bytes
    assert has_room and all(map(le, sizes, plan.layer_bytes)), "a layer is larger than planned"
    if not device.has_own_memory:
        encoder = range(len(plan.tier_L), len(layouts))
        stays = [layer for layer, is_resident in enumerate(plan.is_resident) if is_resident]
        stays += encoder if plan.encoder_bytes else []
        carrier = Carrier(source, layouts, stays, device, encoder)
    else:
        if device.torch_device.type == "cuda":
            # slots will not fit into memory that trials have left
            torch.cuda.empty_cache()
        pinned = device.open_allocator()
        resources.callback(pinned.close)
        carrier = DeviceCarrier(
            source,
            layouts,
            plan.tier_L,
            device=device,
            pinned=pinned,
            num_host_slots=plan.num_host_layer_slots,
        )
    layers = LayerStream(carrier, plan.num_layer_slots)
    resources.callback(layers.close)
    return layers
