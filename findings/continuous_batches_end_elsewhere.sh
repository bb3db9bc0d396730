#!/usr/bin/env bash
# `generate` fills what a `GenerationConfig` leaves open from the model's own generation config, which names the end token, and
# from defaults; it refuses settings that it does not know. `generate_batch`, which takes the same config, should do so, too.
# Seen (transformers 5.24.0): it fills nothing. With a config that leaves `eos_token_id` open a text runs past the model's end
# token (one line of the log says that there is none), and -1 is written into the caller's config, by which `generate` runs
# past it as well from then on. `top_k`, 50 in `generate` where it is open, is off. Settings passed by name
# (`eos_token_id=...`, a misspelt `temperture=...`) are taken and passed over, but `max_new_tokens`.
# Why it matters: who moves a loop from `generate` to `generate_batch` for speed samples from other odds and gets answers that
# go on with the next turn; the same config, used again with `generate`, has been changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 psutil==7.2.2
cat > "$work/run.py" <<'PY'
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.3,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(4, 256, (1, 5))


def usual(*configs, **settings):
    ids = model.generate(prompt, *configs, attention_mask=torch.ones_like(prompt), **settings)
    return ids[:, prompt.shape[1] :].tolist()


def batched(*configs, copies=1, **settings):
    cache = ContinuousBatchingConfig(num_blocks=32, page_size=32, max_batch_tokens=512, seed=0)
    results = model.generate_batch(prompt.tolist() * copies, *configs, continuous_batching_config=cache, **settings)
    return [result.generated_tokens for result in results.values()]


end = usual(max_new_tokens=10)[0][2]
model.generation_config.eos_token_id = end
own = GenerationConfig(max_new_tokens=10)
lengths = {"generate": len(usual(own)[0]), "generate_batch": len(batched(own)[0]), "generate again": len(usual(own)[0])}
print(f"tokens written with one config, the end token being the third: {lengths}; its eos_token_id is now {own.eos_token_id}")
assert lengths == {"generate": 3, "generate_batch": 10, "generate again": 10}, lengths
assert own.eos_token_id == -1

sampled = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=20.0, eos_token_id=end)
tokens = {
    "generate": len({ids[0] for ids in usual(sampled, num_return_sequences=400)}),
    "generate_batch": len({ids[0] for ids in batched(sampled, copies=400)}),
}
print(f"different tokens among 400 sampled ones, top_k being open: {tokens}")
assert tokens["generate"] <= 50 and tokens["generate_batch"] > 100, tokens

model.generation_config.eos_token_id = -1
assert len(usual(max_new_tokens=10, eos_token_id=end)[0]) == 3
for settings in ({"eos_token_id": end}, {"temperture": 0.5}):
    text = batched(max_new_tokens=10, **settings)[0]
    print(f"generate_batch with {next(iter(settings))} by name: {len(text)} tokens")
    assert len(text) == 10, text
try:
    usual(max_new_tokens=10, temperture=0.5)
    refused = False
except ValueError as error:
    refused = "temperture" in str(error)
assert refused
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
