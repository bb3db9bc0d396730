#!/usr/bin/env bash
# compressed-tensors' format "pack-quantized" keeps integers of 1 to 8 bits in words of 32. config.json has the format's name and
# the version that wrote the file. What one release wrote, a later one should read, or refuse.
# Seen (compressed-tensors 0.17.1 and 0.20.1, transformers 5.24.0): 0.17.1 fills words with whole weights and leaves the last bits
# empty (ten weights of 3 bits in a word); 0.20.1 packs without gaps. The name is the same, and the version is not looked at. Of
# 3, 5, 6 and 7 bits `from_pretrained` with `dequantize=True`, and compressed-tensors' own `convert_checkpoint`, make weights that
# are off by 166 to 177 %, worse than random ones, and raise nothing; transformers says no more than of right ones. Without
# `dequantize=True` sizes do not fit and loading fails. 2, 4 and 8 bits, which leave no gaps, are right.
# Why it matters: a 3-bit checkpoint that was made with 0.17.1 (the version that llm-compressor 0.12 requires) turns into noise
# where it is expanded, for fine-tuning or to quantise it otherwise, and only the text that it writes shows it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
  compressed-tensors==0.20.1
"$work/env/bin/pip" install -q --disable-pip-version-check --no-deps --target "$work/old" compressed-tensors==0.17.1
cat > "$work/write.py" <<'PY'
import sys

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
GROUP = 32
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
plain = LlamaForCausalLM(config)
plain.save_pretrained(f"{sys.argv[1]}/plain")
for bits in range(2, 9):
    model = LlamaForCausalLM(config)
    model.load_state_dict(plain.state_dict())
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            groups = module.weight.data.unflatten(-1, (-1, GROUP))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), module.quantization_scheme.weights)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(f"{sys.argv[1]}/{bits}")
    compressor.update_config(f"{sys.argv[1]}/{bits}")
PY
cat > "$work/read.py" <<'PY'
import json
import logging
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

warnings.simplefilter("ignore")
work = Path(sys.argv[1])
wanted = {name: weight for name, weight in load_file(work / "plain/model.safetensors").items() if "_proj" in name}
said = []
handler = logging.Handler()
handler.emit = lambda record: record.levelno >= logging.WARNING and said.append(record.getMessage())
transformers.logging.add_handler(handler)


def load(folder, dequantize):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=dequantize))
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))  # weights that are still packed are unpacked by the first pass
    return model.state_dict()


def convert(folder):
    dense = work / version("compressed-tensors") / folder.name
    convert_checkpoint(folder, dense, CompressedTensorsDequantizer(folder, dtype=torch.float32))
    return load_file(dense / "model.safetensors")


def off(weights):
    """Return how far the weights are off from those before they were quantised, or what is raised."""
    try:
        loaded = weights()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return max(float((loaded[name] - weight).norm() / weight.norm()) for name, weight in wanted.items())


found, lines = {}, {}
for bits in range(2, 9):
    folder = work / str(bits)
    description = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (description["format"], description["version"]) == ("pack-quantized", "0.17.1"), description
    said.clear()
    found[bits] = [off(lambda: load(folder, True)), off(lambda: convert(folder))]
    lines[bits] = list(said)
    found[bits].append(off(lambda: load(folder, False)))
assert all(lines[bits] == lines[4] for bits in lines), lines
(work / f"{sys.argv[2]}.json").write_text(json.dumps(found))
PY
cat > "$work/check.py" <<'PY'
import json
import sys
from pathlib import Path

old, new = (json.loads(Path(sys.argv[1], name).read_text()) for name in ("old.json", "new.json"))
for bits in old:
    for package, found in (("0.17.1", old[bits]), ("0.20.1", new[bits])):
        shown = [f"off by {way:.1%}" if isinstance(way, float) else way.partition(":")[0] for way in found]
        print(f"{bits} bits, {package}: dequantize=True {shown[0]}, convert_checkpoint {shown[1]}, kept packed {shown[2]}")
for bits in old:
    exact = 2 / 2 ** int(bits)
    assert max(old[bits]) < exact and max(old[bits]) - min(old[bits]) < 1e-6, (bits, old[bits])
    if bits in ("2", "4", "8"):
        assert all(abs(way - old[bits][0]) < 1e-6 for way in new[bits]), (bits, new[bits])
    else:
        assert min(new[bits][:2]) > 1.5 and "ignore_mismatched_sizes" in new[bits][2], (bits, new[bits])
PY
run() { PYTHONPATH=$1 "$work/env/bin/python" "$work/$2.py" "$work" "${3:-}" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }; }
run "$work/old" write
run "$work/old" read old
run "" read new
"$work/env/bin/python" "$work/check.py" "$work"
echo "as it was seen"
