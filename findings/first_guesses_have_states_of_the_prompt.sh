#!/usr/bin/env bash
# `generate(output_hidden_states=True, output_attentions=True)` returns what each token of the text was computed with. With an
# `assistant_model` the text is the same, and these should be so, too.
# Seen (transformers 5.24.0): for the guesses that are accepted in the first round, states and attentions of the first tokens of
# the prompt are returned instead: guess i has those of prompt token i. Shapes, number and logits are right, and so is all that
# follows from the second round on.
# Why it matters: who collects states to train a draft head or a probe, fast by drafting, gets a few false ones with each prompt;
# the better the draft, the more.
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
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.3, attn_implementation="eager",
)
model = LlamaForCausalLM(config).eval()
assistant = copy.deepcopy(model)
assistant.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0)
prompt = torch.randint(1, 32, (1, 12))
WANTED = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True, "output_logits": True}


def places(**draft):
    """Return the text, and for each of its tokens whose states and whose attentions are returned for it."""
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, **WANTED, **draft)
    with torch.no_grad():
        whole = model(made.sequences, output_hidden_states=True, output_attentions=True)
    assert torch.allclose(torch.cat(made.logits), whole.logits[0, prompt.shape[1] - 1 : -1], atol=1e-4)
    states = [int((whole.hidden_states[-1][0] - state[-1][0, 0]).norm(dim=-1).argmin()) for state in made.hidden_states[1:]]
    attentions = []
    for rows in made.attentions[1:]:
        row = rows[-1][0, :, 0]
        attentions.append(int((whole.attentions[-1][0, :, :, : row.shape[-1]] - row[:, None]).norm(dim=(0, 2)).argmin()))
    return made.sequences.tolist(), states, attentions


text, states, attentions = places()
drafted_text, drafted_states, drafted_attentions = places(assistant_model=assistant)
print("alone:  states of positions", states, "attentions of", attentions)
print("drafts: states of positions", drafted_states, "attentions of", drafted_attentions)
assert drafted_text == text
assert states == attentions == list(range(12, 21)), (states, attentions)
assert drafted_states == drafted_attentions == [0, 1, 2, 3, *range(16, 21)], (drafted_states, drafted_attentions)
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
