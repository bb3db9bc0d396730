"""What others make of the same bytes on the same card: accelerate's CPU offload, one token at a time.

Its weights are the very slabs that we stream from, page-locked as they are, and the layers that stay with us stay with
it: the same caps, and its copies as fast as they can be.
"""

import statistics
import time
from typing import Any

import torch
from accelerate import cpu_offload
from torch import nn

from offload.decode import Decoder
from offload.device import Device
from offload.device_stream import DeviceStream
from offload.kv_cache import KVCache
from offload.memory_plan import Tier
from offload.model import BorrowedModel

_NUM_TOKENS = 3


def accelerate_s(decoder: Decoder, card: Device) -> float:
    """Seconds per token; the decoder must rest meanwhile."""
    stream, ours = decoder.target.stream, decoder.target._model
    assert isinstance(stream, DeviceStream), "the bench streams to a device"
    stream._stop()
    stream._slots.clear()  # their room is what a layer at a time needs
    model = _twin(ours)
    for layer, module in enumerate(model.skeleton.get_decoder().layers):
        if layer in stream._resident:
            model.bind_layer(layer, stream._resident[layer])
            continue
        assert decoder.plan.tier_L[layer] is Tier.HOST, "side by side needs layers in host memory"
        for name, weight in model._views_of(layer, torch.from_numpy(stream._hosted[layer].array)).items():
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = nn.Parameter(weight, requires_grad=False)
        cpu_offload(module, execution_device=card.place)
    cache, seconds = KVCache(model.num_layers, 8), []
    for position in range(_NUM_TOKENS + 1):
        started = time.perf_counter()
        _one_token(model, cache, position)
        card.synchronize(card.record(card.compute))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _twin(ours: BorrowedModel) -> BorrowedModel:
    """Another skeleton with our embeddings and head."""
    twin = BorrowedModel(ours.checkpoint, str(ours.dtype).removeprefix("torch."), ours.place, has_host_table=True)
    for (_, own), (_, other) in zip(ours._rest_places, twin._rest_places, strict=True):
        other.table[other.key] = own.table[own.key]
    return twin


def _one_token(model: BorrowedModel, cache: KVCache, position: int) -> Any:
    at, sees = torch.tensor([position]), torch.ones(1, 1, dtype=torch.bool)
    logits = model.forward(torch.tensor([5]), at, sees, cache)
    cache.commit([0])
    return logits
