#!/usr/bin/env bash
# Drafting changes how fast `generate` writes, not what: with `prompt_lookup_num_tokens` or `assistant_model` a greedy text should
# end where it ends without them, at an end token, at one of `stop_strings` or where a `StoppingCriteria` says so.
# Seen (transformers 5.24.0): criteria are asked once a round, about its last token. A stop string, or a token that a criterion of
# the caller waits for, that lies among accepted guesses is written past, and the text runs to its limit. An end token alone is
# seen there. With `assistant_model` stop strings raise ValueError: the assistant is asked to stop, too, but not given the
# tokenizer that the caller gave.
# Why it matters: text behind a stop string is where a model goes on with the user's next turn, or with a second tool call.
# The better the draft, the more often it happens.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$work/run.py" <<'PY'
import string

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
letters = Tokenizer(models.BPE({letter: token for token, letter in enumerate("?" + string.ascii_letters)}, merges=[]))
letters.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
config = LlamaConfig(
    vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
)


def speller():
    """Return a model that writes the alphabet from a to k, over and over."""
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        before = torch.nn.functional.normalize(model.model.embed_tokens.weight[1:12], dim=-1)
        model.lm_head.weight[1:12] = before.roll(1, dims=0)
    return model


class At(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == tokenizer.convert_tokens_to_ids("f")


model = speller()
prompt = torch.tensor([tokenizer.convert_tokens_to_ids(list("abcdefghijkabc"))])
ways = {"alone": {}, "lookup": {"prompt_lookup_num_tokens": 5}, "assistant": {"assistant_model": speller()}}
stops = {
    "end token": {"eos_token_id": tokenizer.convert_tokens_to_ids("f")},
    "stop string": {"stop_strings": ["f"], "tokenizer": tokenizer},
    "criterion": {"stopping_criteria": StoppingCriteriaList([At()])},
}
seen = {}
for stop, settings in stops.items():
    for way, draft in ways.items():
        try:
            ids = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=14, do_sample=False, **settings, **draft
            )
            seen[stop, way] = "".join(tokenizer.convert_ids_to_tokens(ids[0, prompt.shape[1] :]))
        except ValueError as error:
            assert "could not locate a tokenizer" in str(error), error
            seen[stop, way] = "ValueError"
        print(f"{stop:12} {way:10} {seen[stop, way]}")
past = "defghijkabcdef"
assert all(seen["end token", way] == "def" for way in ways), seen
assert [seen["stop string", way] for way in ways] == ["def", past, "ValueError"], seen
assert [seen["criterion", way] for way in ways] == ["def", past, past], seen
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
