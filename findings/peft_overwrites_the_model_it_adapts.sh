#!/usr/bin/env bash
# An adapter is put on a model in memory. The model's files are read for that, and should stay as they are.
# Seen (peft 0.21.2, transformers 5.24.0, accelerate 1.15.0): layers on disk (`device_map`, `offload_folder`) are read from the
# model's own file, and `PeftModel.from_pretrained` writes that file anew, all tensors under its own names and the adapter's
# matrices among them. A comment there says that the original must not be overwritten, but for that only a folder of the Hub's
# cache gets another name. Of a model opened as "base", relative to the working directory, model.safetensors is replaced: its 21
# tensors become 49, none with its old name. Nothing is said, and the adapted model is right to the bit. The next
# `from_pretrained("base")` finds no tensor that it knows and draws all weights at random, which its log reports. Where peft gets
# no `device_map` or `max_memory` of its own the file is replaced as well, before the call fails. Opened by its absolute name the
# model stays as it is, and the new file, as large as the old one, appears in new folders below the working directory.
# Why it matters: layers are left on disk where a model is larger than memory. A download of tens of gigabytes, or the only copy of
# a merge, is no longer that model after one look at an adapter.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check \
  torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 requests==2.34.2
cat > "$work/run.py" <<'PY'
import logging
import os
import warnings
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.disable_progress_bar()
said = []


class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


for name in ("transformers", "accelerate", "peft"):
    logging.getLogger(name).addHandler(Listener(logging.WARNING))
PARTS = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
PLACES = {part: "disk" if part == "model.layers.1" else "cpu" for part in PARTS}
OWN_PLACES = {f"base_model.model.{part}": place for part, place in PLACES.items()}
ids = torch.arange(10)[None]


def save():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained("base")
    return Path("base/model.safetensors").read_bytes()


@torch.no_grad()
def score(model):
    return model.eval()(ids).logits


original = save()
lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
get_peft_model(AutoModelForCausalLM.from_pretrained("base"), lora).save_pretrained("adapter")
plain = score(AutoModelForCausalLM.from_pretrained("base"))
wanted = score(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter"))
assert Path("base/model.safetensors").read_bytes() == original

for way, settings in {"device_map": {"device_map": OWN_PLACES}, "max_memory": {"max_memory": {"cpu": 30000}}, "none": {}}.items():
    assert save() == original
    base = AutoModelForCausalLM.from_pretrained("base", device_map=PLACES, offload_folder="offload")
    assert torch.equal(score(base), plain) and Path("base/model.safetensors").read_bytes() == original
    said.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            end = torch.equal(score(PeftModel.from_pretrained(base, "adapter", offload_folder="offload", **settings)), wanted)
        except NotImplementedError:
            end = "NotImplementedError"
    names = set(load_file("base/model.safetensors"))
    print(f"peft's own places by {way}: adapted scores are right: {end}; the model's file has {len(names)} tensors")
    assert end == ("NotImplementedError" if way == "none" else True)
    assert len(names) == 49 and all(name.startswith("base_model.model.") for name in names), names
    assert sum("lora_" in name for name in names) == 28 and not os.listdir("offload")
    about_files = [line for line in [*said, *(str(warning.message) for warning in warned)] if "safetensors" in line.lower()]
    assert not about_files, about_files

said.clear()
again = AutoModelForCausalLM.from_pretrained("base")
off = ((score(again) - plain).abs().max() / plain.std()).item()
print(f"opened again, the model is off by {off:.1f} deviations; its log names missing weights: {'MISSING' in ''.join(said)}")
assert off > 0.5 and "MISSING" in "".join(said)

assert save() == original
base = AutoModelForCausalLM.from_pretrained(Path("base").absolute(), device_map=PLACES, offload_folder="offload")
adapted = PeftModel.from_pretrained(base, "adapter", offload_folder="offload", device_map=OWN_PLACES)
assert torch.equal(score(adapted), wanted) and Path("base/model.safetensors").read_bytes() == original
copy = Path(*Path("base/model.safetensors").absolute().parts[1:])
print(f"opened by its absolute name, the model is as it was; below the working directory there is a copy: {copy.exists()}")
assert len(load_file(copy)) == 49
PY
mkdir "$work/place"
cd "$work/place"
"$work/env/bin/python" "$work/run.py" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
