#!/usr/bin/env bash
# A model that is larger than memory may leave layers on disk (`device_map`, `offload_folder`), and an adapter may be put on it by
# `load_adapter`, or by `from_pretrained` of the adapter's folder. It should change the scores as it does where all is in memory.
# Seen (transformers 5.24.0, accelerate 1.15.0, peft 0.21.2, torch 2.13.0, on a CPU): LoRA's matrices of a layer on disk are made
# on the meta device, as the layer's own are there, and what is read for them is dropped. No hook brings them back, as one does for
# the layer's own, and `torch.nn.functional.linear` of numbers and a meta matrix raises nothing: it returns memory that nobody has
# filled. The report of loading names no missing key, nothing is logged or warned, and scores are noise, often nan. The same model
# without the adapter is right to the bit, and the adapter is right where only what has no LoRA is on disk.
# Why it matters: `device_map="auto"` leaves layers on disk whenever memory is short. The same call with the same adapter then
# writes garbage in place of an error, and where that memory happens to be zero, a fluent text that lacks half the adapter.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check \
  torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 requests==2.34.2
cat > "$work/run.py" <<'PY'
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
transformers.logging.disable_progress_bar()
said = []


class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


for name in ("transformers", "accelerate", "peft"):
    logging.getLogger(name).addHandler(Listener(logging.WARNING))

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=None, bos_token_id=None, eos_token_id=None, initializer_range=0.2,
)
LlamaForCausalLM(config).save_pretrained(folder / "base")
ids = torch.randint(0, 64, (1, 10))
lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), lora).save_pretrained(folder / "adapter")
PARTS = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]


def open_model(part, name="base"):
    """Open a model that has one part, or none, on disk."""
    places = {"device_map": {each: "disk" if each == part else "cpu" for each in PARTS}} if part else {}
    return AutoModelForCausalLM.from_pretrained(folder / name, offload_folder=folder / "offload", **places).eval()


@torch.no_grad()
def score(model):
    return model(ids).logits


def count_empty(model):
    return sum(weight.is_meta for name, weight in model.named_parameters() if "lora_" in name)


plain, wanted = score(open_model(None)), score(PeftModel.from_pretrained(open_model(None), folder / "adapter"))
assert (plain - wanted).abs().max() > 0.1
for part in (None, "model.norm", "model.layers.1"):
    is_right = part != "model.layers.1"
    model = open_model(part)
    assert torch.equal(score(model), plain)
    said.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = model.load_adapter(folder / "adapter")
        found = score(model)
    assert not said and not warned, (said, warned)
    assert not report.missing_keys and not report.mismatched_keys and not report.error_msgs, report
    direct = open_model(part, "adapter")
    for way, model, scores in (("load_adapter", model, found), ("from_pretrained of the adapter", direct, score(direct))):
        empty, is_same = count_empty(model), torch.allclose(scores, wanted, atol=1e-4)
        print(f"on disk: {part}; {way}: {empty} of 28 matrices of LoRA are empty, scores are as wanted: {is_same}")
        assert empty == (0 if is_right else 14) and is_same == is_right

product = torch.nn.functional.linear(torch.ones(1, 10, 32), torch.empty(4, 32, device="meta"))
print(f"numbers times a meta matrix: a tensor on {product.device}")
assert product.device.type == "cpu"
PY
"$work/env/bin/python" "$work/run.py" "$work" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
