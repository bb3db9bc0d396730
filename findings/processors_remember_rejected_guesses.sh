#!/usr/bin/env bash
# A logits processor is asked for the scores behind a text. With drafts (`prompt_lookup_num_tokens`, `assistant_model`) a greedy
# text should be what it is without them, and a watermark be in the text: the caller's processors still apply.
# Seen (transformers 5.24.0, xgrammar 0.2.9): processors that remember are asked about guesses, and not told which are rejected.
# SynthID's watermark is made for other tokens than are written, and its score falls to that of an unmarked text; with
# `guidance_scale` a greedy text becomes another; xgrammar's processor for transformers raises AssertionError. Nothing warns.
# `repetition_penalty`, which looks at the text each time, gives the same text.
# Why it matters: who turns on drafts to save time writes texts that their own detector takes for unmarked, and finds out later.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 xgrammar==0.2.9
cat > "$work/run.py" <<'PY'
import string

import torch
import transformers
import xgrammar
from transformers import LlamaConfig, LlamaForCausalLM, SynthIDTextWatermarkingConfig
from xgrammar.contrib.hf import LogitsProcessor

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
letters = ["", *string.ascii_letters, *string.digits, "-"]
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.2,
)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(1, 64, (1, 12)).repeat(1, 2)
lookup = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
ways = {"alone": {}, "lookup": lookup, "assistant": {"assistant_model": model}}


def write(num_tokens, **settings):
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, **settings)
    return ids[:, prompt.shape[1] :]


mark = SynthIDTextWatermarkingConfig(ngram_len=5, keys=list(range(100, 1100, 100)))
judge = mark.construct_processor(64, torch.device("cpu"))


def marked(ids):
    """Return the mean of the bits that the watermark raises: half without it."""
    return float(judge.compute_g_values(ids)[judge.compute_context_repetition_mask(ids).bool()].float().mean())


def sampled(**settings):
    torch.manual_seed(1)
    return marked(write(300, do_sample=True, top_k=0, **settings))


scores = {"unmarked": sampled(), **{way: sampled(watermarking_config=mark, **draft) for way, draft in ways.items()}}
print("score of the watermark:", {way: round(score, 2) for way, score in scores.items()})
assert scores["alone"] > 0.65, scores
assert all(abs(scores[way] - 0.5) < 0.04 for way in ("unmarked", "lookup", "assistant")), scores

for setting, differs in ({"repetition_penalty": 1.3}, False), ({"guidance_scale": 1.5}, True):
    texts = {way: write(40, do_sample=False, **setting, **draft).tolist() for way, draft in ways.items()}
    same = [texts[way] == texts["alone"] for way in ("lookup", "assistant")]
    print(f"{setting}: with lookup, with an assistant the same text: {same}")
    assert same == [not differs] * 2, setting

tokens = xgrammar.TokenizerInfo(letters, vocab_type=xgrammar.VocabType.RAW, vocab_size=64, stop_token_ids=[0])
grammar = xgrammar.GrammarCompiler(tokens).compile_grammar("root ::= ([a-z] [a-z] [0-9])*")
for way, draft in ways.items():
    try:
        ids = write(12, do_sample=False, logits_processor=[LogitsProcessor(grammar)], **draft)
        found = "".join(letters[token] for token in ids[0].tolist())
    except AssertionError:
        found = "AssertionError"
    print(f"with a grammar, {way}: {found}")
    assert (found == "AssertionError") == (way != "alone"), found
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
