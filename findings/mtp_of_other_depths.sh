#!/usr/bin/env bash
# A checkpoint of DeepSeek-V3's kind carries its MTP layer as `model.layers.N`, N being the number of its decoder layers.
# Expected: transformers looks for it there, for N stands in config.json (`num_hidden_layers`).
# Seen (transformers 5.24.0): it looks for `model.layers.61` alone, which is right for DeepSeek-V3 itself. Of a model of
# three layers all MTP tensors are reported missing, and `generate(use_mtp=True)` raises RuntimeError.
# Why it matters: a distilled or pruned relative, or a second MTP depth, cannot use the draft that it was trained with.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$work/run.py" <<'PY'
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.modeling_layers import MtpModel

transformers.logging.set_verbosity_error()
MODULES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}


def published(name: str, num_layers: int) -> str:
    """Return the name that checkpoints of this kind give a tensor of the library's MtpModel."""
    _, depth, module, *rest = name.split(".")
    where = f"model.layers.{num_layers + int(depth)}"
    return ".".join([where, *rest] if module == "mtp_block" else [where, MODULES[module], *rest])


def write(folder: str, num_layers: int) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        num_nextn_predict_layers=1, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    file = f"{folder}/model.safetensors"
    tensors = load_file(file)
    for name, tensor in MtpModel(model, 1).state_dict().items():
        if not name.startswith("layers."):
            continue
        stored = published(name, num_layers)
        if not stored.endswith(("gate_up_proj", "down_proj")):
            tensors[stored] = torch.randn_like(tensor)
            continue
        stack = torch.randn_like(tensor)
        halves = ("down_proj",) if stored.endswith("down_proj") else ("gate_proj", "up_proj")
        for expert, matrix in enumerate(stack):
            for half, part in zip(halves, matrix.chunk(len(halves))):
                tensors[f"{stored.rsplit('.', 1)[0]}.{expert}.{half}.weight"] = part.contiguous().clone()
    save_file(tensors, file, metadata={"format": "pt"})


def outcome(folder: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([[1, 5, 9, 5, 9, 7, 3]])
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    try:
        model.generate(prompt, use_mtp=True, **settings)
    except RuntimeError as error:
        return str(error).split(" from ")[0]
    return "drafts"


seen = {}
for num_layers in (3, 61):
    folder = f"{sys.argv[1]}/of-{num_layers}"
    write(folder, num_layers)
    seen[num_layers] = outcome(folder)
    print(num_layers, "layers:", seen[num_layers])
assert seen == {3: "The following MtpModel weights are missing", 61: "drafts"}, seen
PY
"$work/env/bin/python" "$work/run.py" "$work"
echo "as it was seen"
