"""What others make of the same bytes on the same GPU: accelerate's CPU offload, one token at a time.

With the very slabs that we stream from, page-locked as they are, its copies are as fast as they can be; its users have
their weights in ordinary memory, so that is measured too. The layers that stay with us stay with it: the same caps.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from offload.engine.decoder import Decoder
from offload.machine import available_ram_bytes
from offload.memory.plan import Tier
from offload.model.kv_cache import KVCache
from offload.model.weights import StreamedModel
from offload.streaming.device import Device
from offload.streaming.device_carrier import DeviceCarrier
from offload.streaming.disk import allocate
from offload.streaming.pinned import RegisterWay

SlabOf = Callable[[int], Tensor]  # layer -> flat bytes
_NUM_TOKENS = 3
_SHARE = 0.9  # of free memory, to a copy of the weights


def accelerate_s(decoder: Decoder, card: Device, *, is_pinned: bool) -> float | None:
    """Seconds per token, None where memory lacks; the decoder must rest from now on.

    Args:
        is_pinned: whether its weights are page-locked; ask for that first, since unlocking may be for good.
    """
    stream, ours = decoder.target.stream, decoder.target._model
    carrier = stream.carrier
    assert isinstance(carrier, DeviceCarrier), "the bench streams to a device"
    stream.stop()
    slab_of = _slabs(carrier) if is_pinned else _ordinary_slabs(carrier)
    if slab_of is None:
        return None
    ours._views.clear()
    stream.stage.slots.clear()  # their room is what a layer at a time needs
    model = _reference(ours)
    for layer, module in enumerate(model.meta_model.get_decoder().layers):
        if layer in carrier.resident:
            model.bind_layer(layer, carrier.resident[layer])
            continue
        assert decoder.plan.tier_L[layer] is Tier.HOST, "side by side needs layers in host memory"
        _give_weights(model, layer, module, slab_of(layer))
        cpu_offload(module, execution_device=card.place)
    try:
        return _token_s(model, card)
    finally:
        model.close()
        del model, module
        gc.collect()  # hooks and modules refer to each other, and hold the weights


def _give_weights(model: StreamedModel, layer: int, module: nn.Module, slab: Tensor) -> None:
    for name, weight in model._views_of(layer, slab).items():
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._parameters[key] = nn.Parameter(weight, requires_grad=False)


def _slabs(carrier: DeviceCarrier) -> SlabOf:
    return lambda layer: torch.from_numpy(carrier.hosted[layer].array[carrier.layouts[layer].sent])


def _ordinary_slabs(carrier: DeviceCarrier) -> SlabOf | None:
    """In memory that is not locked: the same pages where they can be unlocked, else a copy, if there is room."""
    slab_of = _slabs(carrier)
    if carrier.pinned.ways == RegisterWay.name:
        carrier.pinned.close()
        return slab_of
    if sum(len(buffer.array) for buffer in carrier.hosted.values()) > _SHARE * available_ram_bytes():
        return None
    return lambda layer: torch.from_numpy(allocate(slab_of(layer).nbytes)).copy_(slab_of(layer))


def _token_s(model: StreamedModel, card: Device) -> float:
    cache, seconds = KVCache(model.num_layers, 8), []
    for position in range(_NUM_TOKENS + 1):
        started = time.perf_counter()
        _one_token(model, cache, position)
        card.synchronize(card.record(card.compute))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _reference(ours: StreamedModel) -> StreamedModel:
    """Another meta model with our embeddings and head."""
    reference = StreamedModel(ours.checkpoint, str(ours.dtype).removeprefix("torch."), ours.place, has_host_table=True)
    for (_, own), (_, other) in zip(ours._rest_places, reference._rest_places, strict=True):
        other.table[other.key] = own.table[own.key]
    return reference


def _one_token(model: StreamedModel, cache: KVCache, position: int) -> Any:
    at, sees = torch.tensor([position]), torch.ones(1, 1, dtype=torch.bool)
    logits = model.forward(torch.tensor([5]), at, sees, cache)
    cache.commit([0])
    return logits
