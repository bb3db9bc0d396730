#!/usr/bin/env bash
# `generate(use_mtp=True)` asks for drafts of the layer that the checkpoint carries. With `num_beams=2` it should draft, or
# refuse, as it refuses more than one prompt and more than one returned sequence.
# Seen (transformers 5.24.0): with beams the MTP layer is not even loaded; the beams are searched without drafts, and no
# warning says so.
# Why it matters: a benchmark of beams "with MTP" measures beams.
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
from transformers import AutoModelForCausalLM, MellumConfig
from transformers.modeling_layers import MtpModel

transformers.logging.set_verbosity_error()
MODULES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}
torch.manual_seed(0)
config = MellumConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    layer_types=["full_attention", "sliding_attention"], mlp_layer_types=["sparse", "sparse"],
    num_nextn_predict_layers=1, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)
folder = sys.argv[1] + "/model"
model = AutoModelForCausalLM.from_config(config)
model.save_pretrained(folder)
file = folder + "/model.safetensors"
tensors = load_file(file)
for name, tensor in MtpModel(model, 1).state_dict().items():
    if not name.startswith("layers."):
        continue
    _, depth, module, *rest = name.split(".")
    parts = ["mtp", "layers", depth, *rest] if module == "mtp_block" else ["mtp", MODULES[module], *rest]
    stored = ".".join(parts)
    noise = torch.randn_like(tensor)
    if not stored.endswith(("gate_up_proj", "down_proj")):
        tensors[stored] = noise
        continue
    halves = ("down_proj",) if stored.endswith("down_proj") else ("gate_proj", "up_proj")
    for expert, matrix in enumerate(noise):
        for half, part in zip(halves, matrix.chunk(len(halves))):
            tensors[f"{stored.rsplit('.', 1)[0]}.{expert}.{half}.weight"] = part.contiguous().clone()
save_file(tensors, file, metadata={"format": "pt"})

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
loaded = []
original = MtpModel.from_pretrained.__func__
MtpModel.from_pretrained = classmethod(lambda cls, *args, **kw: loaded.append(1) or original(cls, *args, **kw))
prompt = torch.tensor([[1, 5, 9, 5, 9, 7, 3]])
settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
seen = {}
for num_beams in (1, 2):
    loaded.clear()
    model.generate(prompt, use_mtp=True, num_beams=num_beams, **settings)
    seen[num_beams] = bool(loaded)
    print(num_beams, "beams, the MTP layer is loaded:", seen[num_beams])
assert seen == {1: True, 2: False}, seen
PY
"$work/env/bin/python" "$work/run.py" "$work"
echo "as it was seen"
