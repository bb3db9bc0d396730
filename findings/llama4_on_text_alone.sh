#!/usr/bin/env bash
# Llama4ForConditionalGeneration is what config.json of every published Llama 4 names. It should take a prompt of text alone.
# Seen (transformers 5.24.0): the forward pass raises AttributeError, for it asks the language model's output for
# `image_outputs` whether or not there were pictures. 5.23.0 writes. The language model inside runs by itself.
# Why it matters: whoever compares with the library on text has to take `model.language_model` as the reference.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$work/run.py" <<'PY'
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
text_config = {
    **sizes, "vocab_size": 64, "intermediate_size_mlp": 48, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}
vision_config = {
    **sizes, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "image_size": 28,
    "patch_size": 14,
}
config = CONFIG_MAPPING["llama4"](text_config=text_config, vision_config=vision_config)
model = AutoModelForImageTextToText.from_config(config).eval()
prompt = torch.tensor([[1, 5, 9]])
try:
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    seen = "writes"
except AttributeError as error:
    seen = str(error)
print("a prompt of text alone:", seen)
print("its language model by itself:", tuple(model.language_model(input_ids=prompt).logits.shape))
assert seen == "'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'", seen
PY
"$work/env/bin/python" "$work/run.py" "$work"
echo "as it was seen"
