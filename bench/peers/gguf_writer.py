"""A checkpoint for llama.cpp: a Llama or Qwen3-MoE written as GGUF, bit for bit where possible.

Matrices keep their 16 bits, or are rounded as gguf-py rounds them; norms and routers become float32
and experts one stack by part. Rows of a Llama's query and key projections are reordered: its rotary
embedding turns neighbours (2i, 2i+1) there where Hugging Face's turns (i, i + K/2). No vocabulary
is written, because the bench speaks in token ids.

    python -m offload.bench.peers.gguf_writer FOLDER FILE.gguf [Q8_0 | Q4_0]
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import replacing
from offload.checkpoint.open import open_checkpoint
from offload.errors import UserError
from offload.families.gguf import ARCHITECTURES, Architecture

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_TOLD = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "vocab_size": "vocab_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
}
_TOLD_OF_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}


def write_gguf(source: Path, destination: Path, kind: str = "BF16") -> None:
    """Write `source` whole or not at all, matrices as blocks of `kind`. Raises `UserError`."""
    checkpoint = open_checkpoint(source)
    config = {"num_local_experts": checkpoint.config.get("num_experts"), **checkpoint.config}
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0), **stated}
    architecture = _ARCHITECTURES.get(config.get("model_type", ""))
    if architecture is None or rope["rope_type"] != "default":
        complaint = "only a Llama or a Qwen3-MoE with plain rotary positions is written as GGUF"
        raise UserError(f"{source.name}: {complaint}: leave it out")
    import gguf

    with replacing(destination) as place:
        writer = gguf.GGUFWriter(place, architecture, use_temp_file=True)  # stacks are copies
        for name, key in (_TOLD | ({} if architecture == "llama" else _TOLD_OF_EXPERTS)).items():
            getattr(writer, f"add_{name}")(config[key])
        even_width = config["hidden_size"] // config["num_attention_heads"]
        head_width = config.get("head_dim") or even_width
        for name in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{name}")(head_width)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_tokenizer_model("no_vocab")
        for name, values in _tensors(checkpoint, ARCHITECTURES[architecture]):
            raw_dtype = None if values.dtype == np.float32 else gguf.GGMLQuantizationType[kind]
            if raw_dtype is not None and kind != "BF16":
                values = gguf.quants.quantize(_widened(values), raw_dtype)
            writer.add_tensor(name, values, raw_dtype=raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def reordered(rows_RD: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave both halves of each head of a projection, which is llama.cpp's order."""
    num_rows, width = rows_RD.shape
    halves = rows_RD.reshape(num_heads, 2, num_rows // num_heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(num_rows, width)


def _tensors(
    checkpoint: Checkpoint, architecture: Architecture
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield norms and routers in float32, matrices as views in bf16 (uint16), experts stacked."""
    config = checkpoint.config
    stacks = dict[str, dict[int, np.ndarray]]()
    heads = dict[str, int]()
    in_layer = {theirs: part for part, theirs in architecture.parts.items()}
    if architecture.has_interleaved_heads:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    shards = [np.memmap(path, dtype=np.uint8, mode="r") for path in checkpoint.shards]
    for name, entry in checkpoint.tensors.items():
        stem = name.removesuffix(".weight")
        index = part = ""
        if stem.startswith("model.layers."):
            _, _, index, part = stem.split(".", 3)
        expert = _EXPERT.fullmatch(part)
        new_part = _OUTER.get(stem) or in_layer.get(part)
        new_part = f"ffn_{expert[2]}_exps" if expert else new_part
        if entry.dtype != "BF16" or new_part is None:
            raise UserError(f"{name} is not bf16 or has no place in that GGUF: leave llama.cpp out")
        values = shards[entry.shard][entry.lo : entry.hi].view(np.uint16).reshape(entry.shape)
        if new_part in heads:
            values = reordered(values, heads[new_part])
        new_name = f"blk.{index}.{new_part}.weight" if index else f"{new_part}.weight"
        if expert:
            stacks.setdefault(new_name, {})[int(expert[1])] = values
        else:
            is_wide = values.ndim == 1 or new_part == "ffn_gate_inp"
            yield new_name, _widened(values) if is_wide else values
    for name, stack in stacks.items():
        yield name, np.stack([stack[expert] for expert in range(len(stack))])


def _widened(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
