#!/usr/bin/env bash
# In a causal model the scores behind a token depend on that token and those before it. Quantised weights should not change this.
# Seen (bitsandbytes 0.50.2, transformers 5.24.0): with `load_in_8bit=True` they depend on tokens that follow. A column of inputs
# that exceeds `llm_int8_threshold` (6 by default) for one token is multiplied unquantised for all tokens of the pass. With a
# threshold of 0, and in 4 bits, earlier scores stay the same to the bit.
# Why it matters: a pass over guesses scores even the right ones otherwise where a wrong one follows, so drafting changes the text;
# and perplexity from whole texts is that of a model that sees a little of what comes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check \
  torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2
cat > "$work/run.py" <<'PY'
import logging
import sys
import warnings

import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
)
model = LlamaForCausalLM(config)
with torch.no_grad():
    model.model.embed_tokens.weight[63, 5] = 2  # as trained models have it: one column is large for a few tokens
    for layer in model.model.layers:
        layer.input_layernorm.weight[5] = 4
model.save_pretrained(sys.argv[1])
ways = {
    "unquantised": None,
    "4 bits": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "8 bits, threshold 0": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "8 bits": BitsAndBytesConfig(load_in_8bit=True),
}
text = torch.randint(1, 60, (1, 16))
other = text.clone()
other[0, -1] = 63
seen = {}
for way, quantisation in ways.items():
    loaded = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], quantization_config=quantisation, device_map="cpu", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        scores, others = (loaded(ids).logits[0, :-1].float() for ids in (text, other))
    seen[way] = float((scores - others).norm() / scores.norm())
    print(f"{way}: scores behind the first 15 tokens differ by {seen[way]:.2%} where the 16th is another")
assert seen.pop("8 bits") > 1e-3, seen
assert not any(seen.values()), seen
PY
"$work/env/bin/python" "$work/run.py" "$work/model" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
