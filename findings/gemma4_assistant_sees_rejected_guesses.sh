#!/usr/bin/env bash
# An assistant of Gemma 4 keeps no keys: it attends to those of the target's last layers. After a round in which guesses were
# rejected, the next round should attend to committed tokens alone, as the first one behind the prompt does.
# Seen (transformers 5.24.0): from the second round on the assistant is given the key of one rejected guess as well, in every
# pass, beside the keys of committed tokens. The text stays the target's own, so nobody notices.
# Why it matters: the assistant guesses behind a token that is not there, so fewer guesses are right than it could make;
# acceptance that is measured with this loop is too low.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$work/run.py" <<'PY'
import torch
import transformers
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
kinds = ["sliding_attention", "full_attention"]
sizes = {
    "vocab_size": 64, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "global_head_dim": 16, "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "hidden_size_per_layer_input": 0,
}
target_config = Gemma4TextConfig(
    hidden_size=32, num_hidden_layers=4, layer_types=kinds * 2, num_kv_shared_layers=0, **sizes
)
text_config = {
    **sizes, "hidden_size": 16, "num_hidden_layers": 2, "layer_types": kinds, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 0,
}
target = Gemma4ForCausalLM(target_config).eval()
assistant = Gemma4AssistantForCausalLM(
    Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=32)
).eval()
with torch.no_grad():
    for model in (target, assistant):
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))

surplus = []


def note(_, args, arguments):
    keys, _ = arguments["shared_kv_states"]["full_attention"]
    surplus.append(keys.shape[2] - int(arguments["position_ids"].max()))


assistant.register_forward_pre_hook(note, with_kwargs=True)
prompt = torch.tensor([[1, 5, 9, 5, 9, 7, 3, 11, 4, 8]])
settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
plain = target.generate(prompt, **settings)
assistant.generation_config.num_assistant_tokens = 4
drafted = target.generate(prompt, assistant_model=assistant, **settings)
assert torch.equal(plain, drafted), "the text is greedy either way"
print("keys beyond the committed tokens, pass by pass of the assistant:", surplus)
num_guesses = 4  # passes of the first chain, behind the prompt: nothing has been rejected there
assert not any(surplus[:num_guesses]), surplus
assert all(count == 1 for count in surplus[num_guesses:]), surplus
PY
"$work/env/bin/python" "$work/run.py" "$work"
echo "as it was seen"
