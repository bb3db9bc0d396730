"""airllm: one file per layer, each loaded and dropped in every pass. It splits the checkpoint at its first start."""

from pathlib import Path

import torch
from airllm import AutoModel

from offload.bench.memory_cap import drop_pages
from offload.bench.peer_child import Emit, Order
from offload.bench.peer_transformers import Bursts


class AirLLM:
    """A model on the CPU; the split copy lies beside the checkpoint and is kept."""

    def __init__(self, order: Order) -> None:
        split = Path(order.target).with_name(f"{Path(order.target).name}-airllm")
        if split.is_dir():
            drop_pages(split)
        self._model = AutoModel.from_pretrained(order.target, device="cpu", layer_shards_saving_path=str(split))

    def use_threads(self, count: int) -> None:
        """Of the next passes."""
        torch.set_num_threads(count)

    def generate(self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Emit) -> None:
        """Greedy, one token per pass."""
        prompt_1T = torch.tensor([prompt_ids])
        limits = {"max_new_tokens": num_tokens, "max_time": limit_s, "do_sample": False}
        mask = torch.ones_like(prompt_1T)
        self._model.generate(prompt_1T, attention_mask=mask, streamer=Bursts(emit), use_cache=True, **limits)


def open_peer(order: Order) -> AirLLM:
    """What the child asks for."""
    return AirLLM(order)
