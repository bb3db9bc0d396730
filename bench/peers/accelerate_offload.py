"""What accelerate's CPU offload takes for a token of the same model on the same device.

Its layers are as many and as large as ours, and as many of them stay on the device. All streamed
layers share the weights of two, in ordinary memory as its users have them, since there is no room
for a second copy of the model. What it writes is therefore noise, and only its time counts.
"""

import time
from pathlib import Path
from statistics import median

import torch
from accelerate import cpu_offload, init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from offload.model.library import CACHE
from offload.streaming.device import Device

_NUM_TOKENS = 3
_NUM_SHARED = 2


def accelerate_s(model: Path, device: Device, num_resident: int, *, is_pinned: bool) -> float:
    """Return seconds per token of a folder with a config, whose weights are not read."""
    with init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        theirs = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, dtype=torch.bfloat16
        ).eval()
    layers = theirs.get_decoder().layers
    for part in (
        theirs.get_input_embeddings(),
        theirs.get_output_embeddings(),
        theirs.get_decoder().norm,
    ):
        _give(part, _weights(part, device.torch_device))
    theirs.get_decoder().rotary_emb.to(device.torch_device)
    if num_resident:
        stays = _weights(layers[0], device.torch_device)
        for layer in layers[:num_resident]:
            _give(layer, stays)
    sources = [_weights(layers[-1], torch.device("cpu"), is_pinned) for _ in range(_NUM_SHARED)]
    for index, layer in enumerate(layers[num_resident:]):
        _give(layer, sources[index % _NUM_SHARED])
        cpu_offload(layer, execution_device=device.torch_device)
    cache = None
    seconds = []
    token = torch.tensor([[5]], device=device.torch_device)
    for _ in range(_NUM_TOKENS + 1):
        started = time.perf_counter()
        with torch.inference_mode():
            cache = theirs(input_ids=token, use_cache=True, **{CACHE: cache})[CACHE]
        device.synchronize(device.mark(device.compute))
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def _weights(
    module: nn.Module, device: torch.device, is_pinned: bool = False
) -> dict[str, nn.Parameter]:
    made = {}
    for name, like in module.named_parameters():
        weight = torch.empty(
            like.shape, dtype=torch.bfloat16, device=device, pin_memory=is_pinned
        ).fill_(0.01)
        made[name] = nn.Parameter(weight, requires_grad=False)
    return made


def _give(module: nn.Module, weights: dict[str, nn.Parameter]) -> None:
    for name, weight in weights.items():
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._parameters[key] = weight
