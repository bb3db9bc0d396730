#!/usr/bin/env bash
# `generate(cache_implementation="static")` makes a cache for the text that was asked for. Drafts are allowed with it, since it
# can be cropped, so `prompt_lookup_num_tokens` should give the text that it gives with the usual cache.
# Seen (transformers 5.24.0): the cache has one place less than the text has tokens, and in the last rounds lookup goes on guessing
# as if there were more: of the 20 lengths below 12 raise IndexError, those where the guesses do not fit. With an `assistant_model`,
# which guesses less near the end, all lengths are written. A model keeps its cache, so a longer text before hides it.
# Why it matters: it happens when nearly all of the text is written, and the text is lost.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$work/run.py" <<'PY'
import copy

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=None, eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():  # the model writes 1 to 7 over and over, so that what lookup finds is always right
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    model.lm_head.weight.zero_()
    before = torch.nn.functional.normalize(model.model.embed_tokens.weight[1:8], dim=-1)
    model.lm_head.weight[1:8] = before.roll(1, dims=0)
prompt = torch.arange(1, 8).repeat(2)[None]
lookup, assistant = {"prompt_lookup_num_tokens": 4}, {"assistant_model": model}
LENGTHS = range(1, 21)


def write(num_tokens, **settings):
    fresh = copy.deepcopy(model)  # a model keeps its static cache, and a long one hides what is seen here
    ids = fresh.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False, **settings
    )
    return ids[0, prompt.shape[1] :].tolist()


def failing(**settings):
    """Return the lengths that cannot be written; a text that is written is right."""
    lengths = []
    for num_tokens in LENGTHS:
        try:
            assert write(num_tokens, **settings) == [1 + place % 7 for place in range(num_tokens)], num_tokens
        except IndexError as error:
            assert "out of bounds" in str(error), error
            lengths.append(num_tokens)
    return lengths


seen = {
    "usual cache, lookup": failing(**lookup),
    "static cache": failing(cache_implementation="static"),
    "static cache, assistant": failing(cache_implementation="static", **assistant),
    "static cache, lookup": failing(cache_implementation="static", **lookup),
}
for way, lengths in seen.items():
    print(f"{way}: IndexError at lengths {lengths} of 1 to 20 tokens")
assert len(seen.pop("static cache, lookup")) == 12, seen
assert not any(seen.values()), seen
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
