#!/usr/bin/env bash
# `from_pretrained(folder, gguf_file=...)` reads a model from a GGUF file, whose header and tensors say all that llama.cpp needs.
# It should compute what the file describes, or say what it does not read.
# Seen (transformers 5.24.0, gguf 0.19.0): scaling of rotary positions is dropped without a word, in all three forms: Llama 3's,
# which is a tensor (`rope_freqs.weight`), linear and YaRN, which are keys (`llama.rope.scaling.*`). `rope_theta` is read.
# Why it matters: every Llama 3.1, 3.2 and 3.3 in GGUF comes back without the scaling that it was trained with, and the longer the
# text, the more its scores are off; perplexity "of the quantised model" that is measured so counts the missing scaling as well.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
cat > "$work/run.py" <<'PY'
import sys

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
HEADS, WIDTH, NUM_ORIGINAL = 4, 64, 16
SIZES = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}
COMMON = {"rope_theta": 10_000.0, "factor": 8.0}
OLD = {"original_max_position_embeddings": NUM_ORIGINAL}
SCALINGS = {
    "default": {"rope_theta": 10_000.0},
    "linear": COMMON,
    "yarn": COMMON | OLD,
    "llama3": COMMON | OLD | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
weights = LlamaForCausalLM(LlamaConfig(**SIZES)).state_dict()
weights = {name: tensor * (4 if tensor.ndim > 1 else 1) for name, tensor in weights.items()}


def of(kind):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={"rope_type": kind, **SCALINGS[kind]})).eval()
    model.load_state_dict(weights)
    return model


def write(file, kind):
    """Write what llama.cpp's converter writes of such a Llama."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(64)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(8.0)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(NUM_ORIGINAL)
    if kind == "llama3":
        plain, scaled = (of(name).model.rotary_emb.inv_freq for name in ("default", "llama3"))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for name, tensor in weights.items():
        name = name.removesuffix(".weight")
        array = tensor.numpy()
        if name.endswith(("q_proj", "k_proj")):
            array = array.reshape(HEADS, 2, -1, WIDTH).swapaxes(1, 2).reshape(array.shape)
        if name not in TOP:
            _, _, layer, rest = name.split(".", 3)
            name = f"blk.{layer}.{IN_LAYER[rest]}"
        writer.add_tensor(f"{TOP.get(name, name)}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ids = torch.randint(1, 64, (1, 60))
with torch.no_grad():
    unscaled = of("default")(ids).logits
    for kind in SCALINGS:
        write(f"{sys.argv[1]}/{kind}.gguf", kind)
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=f"{kind}.gguf", dtype=torch.float32).eval()
        scores, wanted = model(ids).logits, of(kind)(ids).logits
        print(f"{kind}: read as {model.config.rope_parameters}; off by {float((scores - wanted).abs().max()):.2g}")
        assert torch.allclose(scores, unscaled, atol=1e-5), kind
        assert torch.allclose(wanted, unscaled, atol=1e-3) == (kind == "default"), kind
PY
"$work/env/bin/python" "$work/run.py" "$work" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
