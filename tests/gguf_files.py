"""Tiny models written as GGUF the way llama.cpp's converter does, with the weights that the files stand for.

Names, layouts and numbers come from the package gguf, and nothing from `offload`, so that the two can be compared.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from tiny import VOCAB_SIZE, build
from transformers import (
    CONFIG_MAPPING,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_LATENT: dict[str, Any] = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1}  # fmt: skip
_DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 64, "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"]}  # fmt: skip


def _known(kind: str, **changes: Any) -> PreTrainedConfig:
    usual = CONFIG_MAPPING[kind]().to_dict()
    return CONFIG_MAPPING[kind](**{**{key: value for key, value in SIZES.items() if key in usual}, **changes})


# Experts, states, latent attention; most need a config beside the file.
CURRENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3moe": lambda: Qwen3MoeConfig(**SIZES, head_dim=128, norm_topk_prob=True, **_EXPERTS),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=3.0),
    "phi3": lambda: Phi3Config(**SIZES),
    "glm4moe": lambda: _known("glm4_moe", n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=256, n_shared_experts=1, first_k_dense_replace=1, head_dim=64, attention_bias=True,
        use_qk_norm=True),
    "deepseek2": lambda: _known("deepseek_v3", **_LATENT),
    "qwen35": lambda: _known("qwen3_5_text", **_DELTA),
    "qwen35moe": lambda: _known("qwen3_5_moe_text", **_DELTA, **_EXPERTS, shared_expert_intermediate_size=256),
    "gemma4": lambda: _known("gemma4_text", num_hidden_layers=4, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        head_dim=64, global_head_dim=128, num_kv_shared_layers=0, hidden_size_per_layer_input=32, num_experts=6,
        top_k_experts=2, moe_intermediate_size=64, enable_moe_block=True, vocab_size_per_layer_input=VOCAB_SIZE),
    "gpt-oss-moe": lambda: _known("gpt_oss", num_local_experts=6, num_experts_per_tok=2, head_dim=64,
        sliding_window=24),
}  # fmt: skip
ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3",
        "qwen3_moe": "qwen3moe", "mixtral": "llama", "granite": "granite", "phi3": "phi3", "glm4_moe": "glm4moe",
        "deepseek_v3": "deepseek2", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
        "gemma4_text": "gemma4", "gpt_oss": "gpt-oss"}  # fmt: skip
K_KINDS = ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")  # which the package only reads
KINDS = ("Q8_0", *K_KINDS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16", "BF16", "F32")


class Written(NamedTuple):
    """A file, and the model that it stands for."""

    path: Path
    model: PreTrainedModel  # in float32


def random_blocks(kind: str, num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks (uint8, M x bytes) of any bits, with scales that make weights of a usual size."""
    block_MB = rng.integers(0, 256, (num_blocks, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), dtype=np.uint8)
    if kind == "MXFP4":  # whose scales are exponents
        block_MB[:, :1] = rng.integers(117, 123, (num_blocks, 1))
        return block_MB
    places = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82],
              "Q3_K": [108]}.get(kind, [0])  # fmt: skip
    sizes = {"Q6_K": 3e-5, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q8_0": 1e-3, "Q2_K": 2e-3, "Q3_K": 1e-3, "IQ4_XS": 3e-5,
             "IQ4_NL": 1e-3}  # fmt: skip
    size = sizes.get(kind, 1e-2)
    for place in places:
        scale_M1 = (rng.standard_normal((num_blocks, 1)) * size).astype(np.float16)
        block_MB[:, place : place + 2] = scale_M1.view(np.uint8)
    return block_MB


def write_gguf(
    config: PreTrainedConfig, path: Path, kind: str = "F16", *, seed: int = 0, max_tensors: int = 0,
    says: Mapping[str, Any] | None = None, changed: Callable[[str, np.ndarray], np.ndarray] | None = None,
    extra: Mapping[str, np.ndarray] | None = None, vectors: str = "F32", mix: Mapping[str, str] | None = None,
    fuses: bool = False,
) -> Written:  # fmt: skip
    """Write a random model whose matrices are of `kind`, the embedding Q6_K where these are Q4_K, as llama.cpp mixes.

    Args:
        max_tensors: of one part, where the file is to be split.
        says: metadata to be written over, or added to, what the converter says; None drops one.
        changed: stored rows by GGUF's name, for mistakes.
        extra: tensors that the model has not.
        mix: the kind of some tensors, by their names in a layer and maybe the layer's number.
        vectors: their kind; converters leave them as they are, but the format has no such rule.
        fuses: let the gate and up projections of experts be one stack.
    """
    model, rng = build(config, seed).float(), np.random.default_rng(seed)
    arch, stored, weights = ARCH[config.model_type], {}, {}
    known = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    if not known:
        pytest.skip(f"this gguf has no {arch}")
    names = gguf.get_tensor_name_map(known[0], 99)
    is_turned = arch in ("llama", "granite")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if is_turned else {}
    tied = set(model.all_tied_weights_keys)
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        values = tensor.numpy().copy()
        if fuses and name.endswith("experts.gate_up_proj"):
            pieces, rebuild = [(name, values)], lambda stored: stored[0]
        else:
            pieces, rebuild = _pieces(arch, config, name, values)
        numbers = []
        for full, values in pieces:
            own_name = OWN_NAMES.get(full.rpartition("layers.")[2].partition(".")[2])
            own_name = own_name and f"blk.{full.split('.')[2]}.{own_name}"
            own_name = own_name or names.get_name(full, try_suffixes=(".weight", ".bias"))
            assert own_name is not None, full
            is_vector = values.ndim < 2 or own_name.endswith(("ssm_conv1d.weight", ".bias"))
            used = vectors if is_vector else _kind_of(own_name, kind, mix or {})
            raw, number = _stored(values, used, heads.get(own_name.split(".")[-2], 0), rng)
            stored[own_name] = raw, used
            numbers.append(number)
        weights[name] = torch.from_numpy(rebuild(numbers)).reshape(tensor.shape)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if arch == "llama" and (factors := _factors(config)) is not None:
        stored["rope_freqs.weight"] = (factors, "F32")
    stored |= {value: (raw, "F32") for value, raw in (extra or {}).items()}
    if changed is not None:
        stored = {value: (changed(value, raw).astype(raw.dtype), used) for value, (raw, used) in stored.items()}
    return Written(_write(config, path, arch, stored, max_tensors, says or {}), model)


# of layers, which the package's table does not have
OWN_NAMES = {
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    **dict.fromkeys(("experts.gate_up_proj", "mlp.experts.gate_up_proj"), "ffn_gate_up_exps.weight"),
    "experts.down_proj": "ffn_down_exps.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
_Rebuild = Callable[[list[np.ndarray]], np.ndarray]


def _pieces(
    arch: str, config: PreTrainedConfig, name: str, values: np.ndarray
) -> tuple[list[tuple[str, np.ndarray]], _Rebuild]:
    """What a converter makes of a tensor, by transformers' names in files, and the way back."""
    if arch == "gpt-oss" and ".experts." in name:
        return _pieces_of_gpt_oss(name, values)
    if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
        base = name.replace("mlp.experts", "block_sparse_moe.experts") if arch == "llama" else name
        if name.endswith("down_proj"):
            name = base.replace("down_proj", "w2") if arch == "llama" else base
            return [(f"{name}.weight", values)], lambda stored: stored[0]
        ends = ("w1", "w3") if arch == "llama" else ("gate_proj", "up_proj")
        both = zip(ends, np.split(values, 2, 1), strict=True)
        return [
            (base.replace("gate_up_proj", end) + ".weight", half) for end, half in both
        ], lambda stored: np.concatenate(stored, 1)
    if arch == "llama":
        name = name.replace("mlp.gate.", "block_sparse_moe.gate.")
    if name.endswith("kv_b_proj.weight"):
        nope, heads = config.qk_nope_head_dim, config.num_attention_heads
        value_HRD = values.reshape(heads, -1, values.shape[1])
        keys, rows = value_HRD[:, :nope].swapaxes(1, 2), value_HRD[:, nope:]
        pieces = [(name.replace("kv_b", "k_b"), np.ascontiguousarray(keys)), (name.replace("kv_b", "v_b"), rows)]
        return pieces, lambda stored: np.concatenate([stored[0].swapaxes(1, 2), stored[1]], 1)
    added = np.float32(
        name.endswith("norm.weight") and "linear_attn" not in name and arch in ("gemma3", "qwen35", "qwen35moe")
    )
    if "linear_attn." not in name or name.endswith("norm.weight"):
        return [(name, values + added)], lambda stored: stored[0] - added
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv1d" in name:
        values = values.squeeze(1)
    order = _tiled_order(config, name, values)
    axis = int("out_proj" in name)
    log = np.log if name.endswith("A_log") else None
    back = lambda stored: np.take(stored[0], order.argsort(), axis)  # noqa: E731
    rebuild = (lambda stored: log(-back(stored))) if log is not None else back
    return [(name, np.ascontiguousarray(np.take(values, order, axis)))], rebuild


def _pieces_of_gpt_oss(name: str, values: np.ndarray) -> tuple[list[tuple[str, np.ndarray]], _Rebuild]:
    """Matrices of experts are turned, and those of gate and up, which alternate, are stored apart."""
    stem, end = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    rows = values if end == "bias" else np.ascontiguousarray(values.swapaxes(1, 2))
    turned = (lambda stored: stored) if end == "bias" else (lambda stored: stored.swapaxes(1, 2))
    if stem.endswith("down_proj"):
        return [(f"{stem}.{end}", rows)], lambda stored: turned(stored[0])
    halves = [np.ascontiguousarray(rows[:, turn::2]) for turn in (0, 1)]
    named = [(f"{stem.replace('gate_up', half)}.{end}", part)
             for half, part in zip(("gate", "up"), halves, strict=True)]  # fmt: skip
    return named, lambda stored: turned(np.stack(stored, 2).reshape(rows.shape))


def _tiled_order(config: PreTrainedConfig, name: str, values: np.ndarray) -> np.ndarray:
    """Order rows or columns: the first value head of each key head, then the second ones, as ggml repeats key heads."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    width = (
        1
        if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"))
        else config.linear_value_head_dim
    )
    first = 2 * groups * config.linear_key_head_dim if "in_proj_qkv" in name or "conv1d" in name else 0
    tiled = np.arange(heads * width).reshape(groups, heads // groups, width).swapaxes(0, 1).ravel()
    return np.concatenate([np.arange(first), first + tiled])


def interleaved(row_RD: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in llama.cpp's order: halves of each head in turn."""
    halves = row_RD.reshape(num_heads, 2, len(row_RD) // num_heads // 2, *row_RD.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(row_RD.shape)


def _kind_of(name: str, kind: str, mix: Mapping[str, str]) -> str:
    usual = "Q6_K" if name == "token_embd.weight" and kind == "Q4_K" else kind
    stem = name.removesuffix(".weight")
    return mix.get(stem.removeprefix("blk."), mix.get(stem.rpartition(".")[2], usual))


def _stored(values: np.ndarray, kind: str, num_heads: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What is written, with rows of heads in llama.cpp's order, and the numbers that it stands for, in the model's."""
    if num_heads and values.ndim == 1:
        raw, number = _stored(interleaved(values, num_heads), kind, 0, rng)
        return raw, number[interleaved(np.arange(len(values)), num_heads).argsort()]
    used = GGMLQuantizationType[kind]
    if kind in K_KINDS:
        raw = random_blocks(kind, values.size // GGML_QUANT_SIZES[used][0], rng).reshape(*values.shape[:-1], -1)
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
    settings = config.to_dict()  # which some configs do not let be read one by one
    head_dim = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    theta = rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]
    num_experts = next((getattr(config, key) for key in ("num_experts", "num_local_experts", "n_routed_experts")
                        if getattr(config, key, None)), 0)  # fmt: skip
    said: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": settings.get("intermediate_size") or config.moe_intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": settings["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.freq_base": float(theta),
        "attention.key_length": head_dim, "attention.value_length": head_dim, "vocab_size": config.vocab_size,
    }  # fmt: skip
    if settings.get("kv_lora_rank"):  # of heads as they are computed
        said["attention.key_length"] = config.qk_nope_head_dim + config.qk_rope_head_dim
        said["attention.value_length"] = config.v_head_dim
    if num_experts:
        num_used = settings.get("num_experts_per_tok") or config.top_k_experts
        said |= {"expert_count": num_experts, "expert_used_count": num_used}
        width = getattr(config, "moe_intermediate_size", None)
        said |= {"expert_feed_forward_length": width} if width else {}
    if arch == "llama":
        said["rope.dimension_count"] = head_dim
    if getattr(config, "sliding_window", None) and arch in ("llama", "gemma3", "gpt-oss"):
        said["attention.sliding_window"] = config.sliding_window
    named = {f"{arch}.{key}": value for key, value in said.items()}
    named |= {f"tokenizer.ggml.{entry}_token_id": getattr(config, f"{entry}_token_id") for entry in ("bos", "eos")}
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
