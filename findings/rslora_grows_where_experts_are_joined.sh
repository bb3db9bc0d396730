#!/usr/bin/env bash
# transformers 5 keeps gate and up of a mixture's experts as one parameter. peft converts adapters that were trained with
# transformers 4 and have a LoRA for each: the two become one of twice the rank, and alpha is doubled, so that alpha / r stays.
# Merged into the model, an adapter should change its weights by what it did with transformers 4.
# Seen (peft 0.21.2, transformers 4.57.6 and 5.24.0): with `use_rslora=True` the scale is alpha / sqrt(r), which grows: gate and up
# of all experts are changed by 1.414 times what was trained, down and attention by as much as before. An `alpha_pattern` for gate
# and up is dropped (of 32 in place of 8 a quarter is left), a `rank_pattern` for them ends with an error. peft says that patterns
# were ignored, but of every such adapter, of those that are right as well, and also of patterns for `down_proj`, which it applies.
# Why it matters: an adapter that worked before transformers 5 loads and writes, but is tuned too far where most weights are; merged
# and quantised, that is there to stay.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check \
  torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2 requests==2.34.2
"$work/env/bin/pip" install -q --disable-pip-version-check --no-deps --target "$work/old" \
  transformers==4.57.6 huggingface_hub==0.36.0 tokenizers==0.22.1
cat > "$work/run.py" <<'PY'
import sys
import warnings
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()
folder = Path(sys.argv[1])
is_old = transformers.__version__.startswith("4.")
PARTS = ["q_proj", "gate_proj", "up_proj", "down_proj"]
WAYS = {
    "alpha of 8": {},
    "alpha of 8, use_rslora": {"use_rslora": True},
    "alpha of 32 for gate and up": {"alpha_pattern": {"gate_proj": 32, "up_proj": 32}},
    "alpha of 32 for down": {"alpha_pattern": {"down_proj": 32}},
    "rank of 8 for gate and up": {"rank_pattern": {"gate_proj": 8, "up_proj": 8}},
}


def projections(model):
    """Return copies of the weights under the names that they have in transformers 4."""
    found = {}
    for name, weight in model.state_dict().items():
        experts, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for number, both in enumerate(weight):
                for half, name in zip(both.chunk(2), ("gate_proj", "up_proj")):
                    found[f"{experts}.{number}.{name}.weight"] = half.clone()
        elif part == "down_proj":
            found |= {f"{experts}.{number}.down_proj.weight": one.clone() for number, one in enumerate(weight)}
        elif "_proj." in name:
            found[name] = weight.clone()
    return found


def updates(way):
    """Return by what merging the adapter changes the weights, and what is warned of."""
    base = Qwen3MoeForCausalLM.from_pretrained(folder / "base")
    before = projections(base)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        merged = PeftModel.from_pretrained(base, folder / way).merge_and_unload()
    after = projections(merged)
    return {name: after[name] - before[name] for name in before}, [str(warning.message) for warning in said]


if is_old:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "base")
    for way, settings in WAYS.items():
        base = Qwen3MoeForCausalLM.from_pretrained(folder / "base")
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=PARTS, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        get_peft_model(base, lora).save_pretrained(folder / way)
        torch.save(updates(way)[0], folder / f"{way}.pt")
    sys.exit()
seen, warned = {}, {}
for way in WAYS:
    wanted = torch.load(folder / f"{way}.pt")
    try:
        found, warned[way] = updates(way)
    except RuntimeError as error:
        print(f"{way}: RuntimeError")
        assert "size mismatch" in str(error) and way.startswith("rank"), error
        continue
    assert found.keys() == wanted.keys()
    for part in PARTS:
        factors = []
        for name, update in wanted.items():
            if f".{part}." in name:
                factors.append(float((found[name] * update).sum() / update.square().sum()))
                assert (found[name] - factors[-1] * update).norm() < 1e-4 * update.norm(), name
        assert max(factors) - min(factors) < 1e-4, factors
        seen[way, part] = round(factors[0], 3)
    print(f"{way}: changed, as a part of the change with transformers 4:", *(f"{part} {seen[way, part]}" for part in PARTS))
expected = {"alpha of 8, use_rslora": 1.414, "alpha of 32 for gate and up": 0.25}
for (way, part), factor in seen.items():
    assert factor == (expected.get(way, 1) if part in ("gate_proj", "up_proj") else 1), seen
assert len(seen) == 4 * len(PARTS), seen
plain = warned["alpha of 8"]
assert warned["alpha of 8, use_rslora"] == plain and any("gate_up_proj" in line and "ignored" in line for line in plain), warned
assert any("down_proj" in line and "ignored" in line for line in warned["alpha of 32 for down"]), warned
PY
PYTHONPATH=$work/old "$work/env/bin/python" "$work/run.py" "$work" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/env/bin/python" "$work/run.py" "$work" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
