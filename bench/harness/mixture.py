"""An untrained mixture of experts, cut from the packaged target where no good text is needed.

Invariant: the folder has its name only when it is whole.
"""

import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from offload.bench.moe_pair.upcycle import ExpertSizes, upcycled
from offload.checkpoint.files import cache_folder
from offload.cli.demo import PAIR, inflated_target

_COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def untrained_mixture(size_bytes: int) -> Path:
    """Return the mixture inflated to this size; made once, then reused."""
    folder = cache_folder() / "moe-untrained"
    if not folder.is_dir():
        scratch = folder.with_name(f"{folder.name}.part")
        dense = LlamaForCausalLM.from_pretrained(
            PAIR / "target", dtype=torch.float32, use_safetensors=True
        )
        tokens_BS = torch.randint(
            dense.config.vocab_size, (4, 128), generator=torch.Generator().manual_seed(0)
        )
        upcycled(dense, ExpertSizes(), tokens_BS, 0).eval().bfloat16().save_pretrained(scratch)
        for name in _COMPANIONS:
            shutil.copyfile(PAIR / "target" / name, scratch / name)
        scratch.rename(folder)
    return inflated_target(size_bytes, lambda done, total: None, folder, folder.name)
