#!/usr/bin/env bash
# `save_pretrained` into a folder that holds an earlier state of the model replaces it: shards of an earlier save are even deleted,
# so that none is left over. `from_pretrained` of that folder should give the weights that were saved last.
# Seen (transformers 5.24.0): where the earlier save was one file and the later one is sharded, `model.safetensors` stays beside the
# shards, and is what `from_pretrained` reads: it loads the old weights, to the bit, and no line says so. huggingface_hub 2.4.0
# reads the new ones from the same folder. The other way round, shards and then one file, the old index is left and names shards
# that were deleted: transformers reads the new weights, huggingface_hub raises.
# Why it matters: a model that outgrew one file (dequantised, in float32, with a larger vocabulary) or that is saved with a smaller
# `max_shard_size` for uploading is reloaded, evaluated and quantised as what it was before, with the new config.json.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 huggingface_hub==2.4.0
cat > "$work/run.py" <<'PY'
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from huggingface_hub import load_torch_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
said = []
handler = logging.Handler()
handler.emit = lambda record: record.levelno >= logging.WARNING and said.append(record.getMessage())
transformers.logging.add_handler(handler)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(state, other):
    return all(torch.equal(state[name], other[name]) for name in state)


def which(model, states):
    return [name for name, known in states.items() if same(known, state(model))] or ["neither"]


def with_hub(folder):
    model = LlamaForCausalLM(config)
    try:
        load_torch_model(model, folder)
    except Exception as error:  # which one is not the point
        return f"raises {type(error).__name__}"
    return model


seen = {}
for sizes in (("50GB", "50GB"), ("50GB", "100KB"), ("100KB", "50GB"), ("100KB", "200KB")):
    folder = Path(sys.argv[1], "-".join(sizes))
    torch.manual_seed(0)
    model, states = LlamaForCausalLM(config), {}
    for name, size in zip(("first", "second"), sizes):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 50)
        model.save_pretrained(folder, max_shard_size=size)
        states[name] = state(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said.clear()
        loaded = which(AutoModelForCausalLM.from_pretrained(folder), states)
        assert not said and not warned, (said, warned)
    hub = with_hub(folder)
    seen[sizes] = *loaded, *([hub] if isinstance(hub, str) else which(hub, states))
    print(f"limits of {sizes[0]}, then {sizes[1]}: transformers loads the {seen[sizes][0]} save, huggingface_hub {seen[sizes][1]}")
    print("   ", *sorted(path.name for path in folder.glob("model*")))
assert seen["50GB", "50GB"] == seen["100KB", "200KB"] == ("second", "second"), seen
assert seen["50GB", "100KB"] == ("first", "second"), seen
assert seen["100KB", "50GB"][0] == "second" and seen["100KB", "50GB"][1].startswith("raises"), seen
PY
"$work/env/bin/python" "$work/run.py" "$work" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
