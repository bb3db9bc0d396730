#!/usr/bin/env bash
# In Gemma 4's config, layers that reuse keys (`num_kv_shared_layers`) and a table of inputs to each layer
# (`hidden_size_per_layer_input`, 0 where there is none) are set apart from each other. All four cases should run.
# Seen (transformers 5.24.0): a prompt of more than one token raises TypeError where keys are shared and there is no table: the
# step that would drop the rows nobody asks for cuts the missing inputs. One token at a time runs.
# Why it matters: a smaller relative without the table, which a config may describe, cannot read a prompt.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$work/run.py" <<'PY'
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

seen = {}
for table in (8, 0):
    for shared in (0, 2):
        config = Gemma4TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, global_head_dim=16, vocab_size_per_layer_input=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=table, num_kv_shared_layers=shared,
        )
        model = Gemma4ForCausalLM(config).eval()
        for tokens in ([1], [1, 2, 3]):
            try:
                model(torch.tensor([tokens]))
                seen[table, shared, len(tokens)] = "runs"
            except TypeError:
                seen[table, shared, len(tokens)] = "TypeError"
print({case: result for case, result in seen.items() if result != "runs"})
assert [case for case, result in seen.items() if result != "runs"] == [(0, 2, 3)], seen
print("as it was seen")
PY
"$work/env/bin/python" "$work/run.py"
