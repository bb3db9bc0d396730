"""Tiny models written as GGUF the way llama.cpp's converter does, with the weights that the files stand for.

Names, layouts and numbers come from the package gguf, and nothing from `offload`, so that the two can be compared.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from tiny import VOCAB_SIZE, build
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=24),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=128),
    "gemma3": lambda: Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 7}, head_dim=128, query_pre_attn_scalar=128,
        sliding_window=24, rope_local_base_freq=10000.0, rope_theta=1e6),
}  # fmt: skip
ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
K_KINDS = ("Q4_K", "Q5_K", "Q6_K")  # which the package only reads
KINDS = ("Q8_0", *K_KINDS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32")


class Written(NamedTuple):
    """A file, and the model that it stands for."""

    path: Path
    model: PreTrainedModel  # in float32


def random_blocks(kind: str, num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks (uint8, M x bytes) of any bits, with scales that make weights of a usual size."""
    block_MB = rng.integers(0, 256, (num_blocks, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), dtype=np.uint8)
    places = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(kind, [0])
    size = {"Q6_K": 3e-5, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q8_0": 1e-3}.get(kind, 1e-2)
    for place in places:
        scale_M1 = (rng.standard_normal((num_blocks, 1)) * size).astype(np.float16)
        block_MB[:, place : place + 2] = scale_M1.view(np.uint8)
    return block_MB


def write_gguf(
    config: PreTrainedConfig, path: Path, kind: str = "F16", *, seed: int = 0, max_tensors: int = 0,
    says: Mapping[str, Any] | None = None, changed: Callable[[str, np.ndarray], np.ndarray] | None = None,
    extra: Mapping[str, np.ndarray] | None = None, vectors: str = "F32",
) -> Written:  # fmt: skip
    """Write a random model whose matrices are of `kind`, the embedding Q6_K where these are Q4_K, as llama.cpp mixes.

    Args:
        max_tensors: of one part, where the file is to be split.
        says: metadata to be written over, or added to, what the converter says; None drops one.
        changed: stored rows by GGUF's name, for mistakes.
        extra: tensors that the model has not.
        vectors: their kind; converters leave them as they are, but the format has no such rule.
    """
    model, rng = build(config, seed).float(), np.random.default_rng(seed)
    arch, stored, weights = ARCH[config.model_type], {}, {}
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 99)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tied = set(model.all_tied_weights_keys)
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        part = own.split(".")[-2]
        num_heads = heads.get(part, 0) if arch == "llama" else 0
        added = np.float32(arch == "gemma3" and own.endswith("norm.weight"))
        used = _kind_of(own, kind) if tensor.dim() > 1 else vectors
        raw, values = _stored(tensor.numpy() + added, used, num_heads, rng)
        weights[name] = torch.from_numpy(values - added)
        stored[own] = raw, used
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if arch == "llama" and (factors := _factors(config)) is not None:
        stored["rope_freqs.weight"] = (factors, "F32")
    stored |= {own: (raw, "F32") for own, raw in (extra or {}).items()}
    if changed is not None:
        stored = {own: (changed(own, raw).astype(raw.dtype), used) for own, (raw, used) in stored.items()}
    return Written(_write(config, path, arch, stored, max_tensors, says or {}), model)


def interleaved(row_RD: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in llama.cpp's order: halves of each head in turn."""
    halves = row_RD.reshape(num_heads, 2, len(row_RD) // num_heads // 2, *row_RD.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(row_RD.shape)


def _kind_of(own: str, kind: str) -> str:
    return "Q6_K" if own == "token_embd.weight" and kind == "Q4_K" else kind


def _stored(values: np.ndarray, kind: str, num_heads: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What is written, with rows of heads in llama.cpp's order, and the numbers that it stands for, in the model's."""
    if num_heads and values.ndim == 1:
        raw, number = _stored(interleaved(values, num_heads), kind, 0, rng)
        return raw, number[interleaved(np.arange(len(values)), num_heads).argsort()]
    used = GGMLQuantizationType[kind]
    if kind in K_KINDS:
        raw = random_blocks(kind, values.size // 256, rng).reshape(*values.shape[:-1], -1)
    else:
        raw = quants.quantize(values, used)
    number = quants.dequantize(raw, used).reshape(values.shape).astype(np.float32)
    return (interleaved(raw, num_heads) if num_heads else raw), number


def _factors(config: PreTrainedConfig) -> np.ndarray | None:
    """As the converter computes them."""
    rope = config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    dim = config.head_dim
    freqs = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    factors = []
    for freq in freqs:
        wavelength = 2 * np.pi / freq
        if wavelength < high:
            factors.append(1)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def metadata_of(config: PreTrainedConfig, arch: str) -> dict[str, Any]:
    """What the converter says of the model."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    theta = rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]
    said: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.freq_base": float(theta),
        "attention.key_length": head_dim, "attention.value_length": head_dim, "vocab_size": config.vocab_size,
    }  # fmt: skip
    if arch == "llama":
        said["rope.dimension_count"] = head_dim
    if getattr(config, "sliding_window", None) and arch in ("llama", "gemma3"):
        said["attention.sliding_window"] = config.sliding_window
    named = {f"{arch}.{key}": value for key, value in said.items()}
    named |= {f"tokenizer.ggml.{one}_token_id": getattr(config, f"{one}_token_id") for one in ("bos", "eos")}
    return {**named, "tokenizer.ggml.padding_token_id": config.pad_token_id, "tokenizer.ggml.model": "no_vocab"}


def _write(
    config: PreTrainedConfig, path: Path, arch: str, stored: Mapping[str, tuple[np.ndarray, str]], max_tensors: int,
    says: Mapping[str, Any],
) -> Path:  # fmt: skip
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=max_tensors)
    for key, value in {**metadata_of(config, arch), **says}.items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, (raw, kind) in stored.items():
        used = GGMLQuantizationType[kind]
        writer.add_tensor(name, raw, raw_dtype=None if kind in ("F16", "F32") else used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
