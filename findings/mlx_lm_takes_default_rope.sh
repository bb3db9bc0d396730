#!/usr/bin/env bash
# A Llama that today's transformers has saved should have the same scores in today's mlx-lm, or be refused by it.
# Seen (mlx-lm 0.32.2, transformers 5.24.0): transformers writes base and scaling of rotary positions into `rope_parameters` alone.
# Families whose ModelArgs require `rope_theta` fail or find it; those that have a default for it (llama, mistral, mixtral, qwen2,
# phi3, olmo2, smollm3, seed_oss, hunyuan) load without a word and compute with that default, or without Llama 3's scaling.
# Likewise `sliding_window` of mistral, qwen2, qwen3 and phi3, and `hidden_act` of llama, are passed over.
# Why it matters: a model that was fine-tuned or merged with the newest transformers loads, writes fluent short answers, and gets
# worse with every token of context; the same weights are right in transformers.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 mlx-lm==0.32.2 "mlx[cpu]"
cat > "$work/run.py" <<'PY'
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}
BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
SCALED = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}
WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
HEAD = {"head_dim": 16}
CASES = {
    "llama, nothing special": ("llama", {}, True),
    "llama, 4 of 4 heads": ("llama", {"num_key_value_heads": 4}, True),
    "qwen3, base": ("qwen3", BASE | HEAD, True),
    "llama, base": ("llama", BASE, False),
    "llama, Llama 3's scaling": ("llama", SCALED, False),
    "mistral, base": ("mistral", BASE, False),
    "mixtral, base": ("mixtral", BASE | {"num_local_experts": 4}, False),
    "qwen2, base": ("qwen2", BASE, False),
    "phi3, base": ("phi3", BASE, False),
    "olmo2, base": ("olmo2", BASE, False),
    "smollm3, base": ("smollm3", BASE, False),
    "seed_oss, base": ("seed_oss", BASE | HEAD, False),
    "hunyuan, base": ("hunyuan_v1_dense", BASE | HEAD, False),
    "mistral, window": ("mistral", {"sliding_window": 8}, False),
    "qwen2, window": ("qwen2", WINDOW, False),
    "qwen3, window": ("qwen3", WINDOW | HEAD, False),
    "phi3, window": ("phi3", {"sliding_window": 8}, False),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}, False),
}
seen = {}
for number, (case, (kind, settings, _)) in enumerate(CASES.items()):
    torch.manual_seed(0)
    folder = Path(sys.argv[1]) / str(number)
    config = AutoConfig.for_model(kind, **SIZES | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    ids = torch.randint(3, 64, (1, 40))
    with torch.no_grad():
        wanted = model(ids).logits[0].numpy()
    scores = np.array(load_model(folder)[0](mx.array(ids.numpy()))[0])
    distance = np.abs(scores - wanted).max() / np.abs(wanted).max()
    seen[case] = bool(distance < 1e-4)
    print(f"{case:26} farthest score off by {distance:.1e} of the largest: {'same' if seen[case] else 'OTHER'}")
assert seen == {case: same for case, (_, _, same) in CASES.items()}, seen
PY
"$work/env/bin/python" "$work/run.py" "$work" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
