#!/usr/bin/env bash
# DeepSeek's FP8 has a scale for each block of 128 x 128 weights; where a matrix ends inside a block, the last block is smaller. The
# size stands in config.json (`weight_block_size`). `from_pretrained` on a CPU, which expands such weights, should go by it.
# Seen (transformers 5.24.0): the size is guessed, as rows divided by rows of scales. Of 192 rows the first 96 get the first scale
# instead of 128, without a word; of 320 rows, which 3 does not divide, loading fails. FP8Linear, for GPUs, goes by the config.
# Why it matters: DeepSeek-V3's own `kv_a_proj_with_mqa` has 576 rows, so it cannot be loaded where there is no GPU for FP8 (with
# `dequantize=True` neither); a relative whose sizes do divide is computed with other weights than it has.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cat > "$work/run.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
BLOCK = 128
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}


def pack(weight):
    """Return the words, the scales and the weights that these stand for."""
    words, back = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty([-(-size // BLOCK) for size in weight.shape])
    for row, column in torch.cartesian_prod(*(torch.arange(size) for size in scales.shape)).tolist():
        block = tuple(slice(place * BLOCK, (place + 1) * BLOCK) for place in (row, column))
        scales[row, column] = weight[block].abs().max() / 448
        words[block] = (weight[block] / scales[row, column]).to(words.dtype)
        back[block] = words[block].float() * scales[row, column]
    return words, scales, back


def load(num_rows):
    """Return how far the weights of a checkpoint whose `gate_proj` has so many rows are off, or what is raised."""
    config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=num_rows, num_hidden_layers=1, num_attention_heads=4)
    tensors, wanted = LlamaForCausalLM(config).state_dict(), {}
    for name in [name for name in tensors if "_proj." in name]:
        rows_differ = 1 + torch.arange(tensors[name].shape[0])[:, None] / 32
        tensors[name], tensors[f"{name}_scale_inv"], wanted[name] = pack(tensors[name] * rows_differ)
    folder = Path(sys.argv[1], str(num_rows))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    description = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(description))
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    loaded = model.state_dict()
    return max(float((loaded[name] - weight).norm() / weight.norm()) for name, weight in wanted.items())


seen = {num_rows: load(num_rows) for num_rows in (256, 64, 192, 320, 576)}
for num_rows, found in seen.items():
    print(f"{num_rows} rows: {found if isinstance(found, str) else f'weights are off by {found:.2%}'}")
assert seen[256] == seen[64] == 0, seen
assert seen[192] > 0.05, seen
assert all("automatic conversion of the weights" in str(seen[num_rows]) for num_rows in (320, 576)), seen
PY
"$work/env/bin/python" "$work/run.py" "$work" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
