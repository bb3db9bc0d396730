"""Headers of large mixtures of experts, expert by expert or in stacks: no files, no weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.imagined import imagined
from offload.checkpoint.spec import LayerSpec
from offload.checkpoint.tensors import Coded, TensorEntry
from offload.encoding.floats import Mxfp4

Shapes = dict[str, tuple[int, ...]]
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 32000, "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}  # fmt: skip


def mixture(num_dense: int = 0, *, is_stacked: bool = False, **changes: Any) -> Checkpoint:
    """Layers with attention and routed experts, except for the first `num_dense`, in bfloat16."""
    config = {**CONFIG, **changes}
    width, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        layer_shapes: Shapes = {f"self_attn.{name}_proj.weight": (1024, width) for name in "qkvo"}
        layer_shapes["mlp.shared_experts.up_proj.weight"] = (inner, width)
        if layer >= num_dense:
            layer_shapes["mlp.gate.weight"] = (count, width)
            layer_shapes |= _stacks(count, inner, width) if is_stacked else _each(count, inner, width)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    shapes["lm_head.weight"] = (config["vocab_size"], width)
    named = {name: ("bfloat16", shape) for name, shape in shapes.items()}
    kept, chosen = (8, 128), config["num_experts_per_tok"]
    sparse = LayerSpec(feed_forward="experts", keys=kept, values=kept, num_experts=count, num_chosen=chosen)
    dense = LayerSpec(feed_forward="other", keys=kept, values=kept)
    layers = ([dense] * num_dense + [sparse] * config["num_hidden_layers"])[: config["num_hidden_layers"]]
    return replace(imagined(config, Path("/nowhere/mixture/config.json"), named), layers=tuple(layers))


def coded_stacks(checkpoint: Checkpoint) -> Checkpoint:
    """Return it with its stacks' matrices in 4 bits, their scales behind them."""
    tensors: dict[str, TensorEntry] = {}
    for name, entry in checkpoint.tensors.items():
        is_matrix = ".mlp.experts." in name and len(entry.shape) == 3
        coding, scales = Mxfp4(), (*entry.shape[:-1], entry.shape[-1] // 32)
        words_end = entry.lo + coding.stored_bytes(entry.shape)
        beside = TensorEntry(0, "U8", scales, words_end, words_end + entry.num_bytes // 64)
        coded = Coded(coding, (("_scales", beside),))
        tensors[name] = entry._replace(dtype="U8", hi=words_end, coded=coded) if is_matrix else entry
    return replace(checkpoint, tensors=tensors)


def _each(count: int, inner: int, width: int) -> Shapes:
    parts = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"mlp.experts.{expert}.{part}.weight": shape for expert in range(count) for part, shape in parts.items()}


def _stacks(count: int, inner: int, width: int) -> Shapes:
    stacks = {"gate_up_proj": (count, width, 2 * inner), "gate_up_proj_bias": (count, 2 * inner)}
    return {f"mlp.experts.{name}": shape for name, shape in {**stacks, "down_proj": (count, inner, width)}.items()}
