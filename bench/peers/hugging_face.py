"""`transformers` beyond memory: layers from disk by accelerate for every pass, or the mapped file.

Options: `weights` is `disk` or `mmap`; `assistant` is None or settings of an assistant model, {}
for its defaults; `lookup` is `prompt_lookup_num_tokens` in place of one.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from offload.bench.peers.child import Emit, Order, free_bytes

_LAYER_ROOM_BYTES = 256 << 20  # for the layer at work, activations, keys and values


class Transformers:
    """A model as `from_pretrained` makes it, and `generate`."""

    def __init__(self, order: Order) -> None:
        room: dict[str, Any] = {}
        if order.options["weights"] == "disk":
            # as many layers in memory as the cap leaves room for
            room["max_memory"] = {"cpu": free_bytes(order) - _LAYER_ROOM_BYTES}
            room["device_map"] = "auto"
        self._model = _loaded(order.target, room)
        self._options: dict[str, Any] = {}
        if "lookup" in order.options:
            self._options["prompt_lookup_num_tokens"] = order.options["lookup"]
        if order.options["assistant"] is not None:
            assistant = _loaded(order.draft, {})
            assistant.generation_config.update(**order.options["assistant"])
            self._options["assistant_model"] = assistant

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def generate(self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Emit) -> None:
        prompt_1T = torch.tensor([prompt_ids])
        limits = {"max_new_tokens": num_tokens, "max_time": limit_s, "do_sample": False}
        inputs = {"attention_mask": torch.ones_like(prompt_1T), "streamer": _Bursts(emit)}
        self._model.generate(prompt_1T, **limits, **inputs, **self._options)


def _loaded(folder: str, room: dict[str, Any]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, use_safetensors=True, dtype=torch.bfloat16, **room
    )


class _Bursts(BaseStreamer):
    """Passes on what `generate` streams, without the prompt that comes first."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._emit(value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None: ...


open_peer = Transformers
