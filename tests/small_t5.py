"""Tiny random T5 checkpoints of every layout, drafts that often agree, and what transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import torch
from plans import model_shape, plan_memory
from rounding import beyond_doubt
from torch import nn
from transformers import AutoModelForSeq2SeqLM, MT5Config, PreTrainedModel, T5Config
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from offload.checkpoint.open import open_checkpoint
from offload.model.library import CACHE

VOCAB_SIZE, START = 199, 0
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 4,
    "num_heads": 5,  # times d_kv: not d_model
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 24,  # texts are longer
    "pad_token_id": 0,
    "eos_token_id": None,
}
LAYOUTS: dict[str, tuple[type[T5Config] | type[MT5Config], dict[str, Any]]] = {
    "v1.0": (T5Config, {"feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "v1.1": (T5Config, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": (MT5Config, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


_SEEDS = {"v1.0": 8}  # with seed 0 its texts are a few words


def build(layout: str, **sizes: Any) -> PreTrainedModel:
    """A random model whose every part matters: relative positions, the prompt, the head's scale."""
    torch.manual_seed(_SEEDS.get(layout, 0))
    kind, options = LAYOUTS[layout]
    model = AutoModelForSeq2SeqLM.from_config(kind(**{**_SIZES, **options, **sizes})).eval()
    if not options["tie_word_embeddings"]:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
    for name, parameter in model.named_parameters():
        scale = 1.0 if "relative" in name else 0.25 if parameter.ndim > 1 else 0.15
        parameter.data.normal_(float(parameter.ndim == 1), scale)
    if options["tie_word_embeddings"]:  # embeddings that double as the head are small, or a token would repeat itself
        model.shared.weight.data *= 0.2
        model.decoder.final_layer_norm.weight.data *= 60
    return model


def save(model: PreTrainedModel, directory: Path, layout: str) -> Path:
    """As the hub has it: in shards that cut through layers, with a start, and tied or not by its config."""
    model.generation_config.decoder_start_token_id = START
    model.save_pretrained(directory, max_shard_size="60KB")
    config = json.loads((directory / "config.json").read_text())
    config |= {key: value for key, value in LAYOUTS[layout][1].items() if key.startswith("tie")}
    config.pop("scale_decoder_outputs", None)  # which the hub's do not have
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_pair(layout: str, directory: Path, *, noise: float = 0.01, **sizes: Any) -> tuple[Path, Path]:
    """A target, and as its draft the same model with noise on every matrix."""
    model = build(layout, **sizes)
    target = save(model, directory / "target", layout)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += noise * parameter.data.std() * torch.randn_like(parameter)
    return target, save(model, directory / "draft", layout)


def streaming_ram(target: Path, draft: Path | None, *, context: int, num_nodes: int) -> int:
    """A budget with room for three slots and no layer, of the encoder neither."""
    files = (open_checkpoint(target), None if draft is None else open_checkpoint(draft))
    roomy = plan_memory(files, ram=1 << 40, dtype="auto", context=context, num_nodes=num_nodes)
    shape = model_shape(files[0])
    return roomy.fixed_bytes - roomy.encoder_bytes + 3 * max(*shape.layer_bytes, *shape.encoder_bytes) + 100


def reference(directory: Path, prompt: list[int], num_new: int) -> list[int]:
    """What transformers writes greedily; its own cache is as long as the encoder, which may be shorter."""
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids, cache = torch.tensor([prompt]), EncoderDecoderCache(DynamicCache(), DynamicCache())
    options = {"max_new_tokens": num_new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, **options)
    return beyond_doubt(torch.cat(out.logits)).tolist()
