#!/usr/bin/env bash
# `generate_batch` serves many requests at once. Greedy texts and their log-probabilities should be those of `generate`, beyond
# rounding.
# Seen (transformers 5.24.0, on a CPU): a model of eager attention is switched to `paged|eager`, a function that knows nothing
# of `attn_logit_softcapping`. Gemma 2 and VaultGemma, which have no other attention there because of their softcap (sdpa
# refuses it), are computed without it: other log-probabilities, other texts, and not a line in the log. Without a softcap in
# the config both ways agree to 1e-7.
# Why it matters: the model is run as it never was in training, the further off the larger its attention logits are; rollouts
# and evaluations that are batched for speed carry the texts and log-probabilities of another model.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 psutil==7.2.2
cat > "$work/run.py" <<'PY'
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, Gemma2Config, GenerationConfig, VaultGemmaConfig

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3, "tie_word_embeddings": False,
}
PROMPTS, LENGTH, TOKENS = 8, 24, 16
for kind in (Gemma2Config, VaultGemmaConfig):
    for cap in (None, 50.0):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**SIZES, attn_logit_softcapping=cap)).eval()
        with torch.no_grad():  # logits of attention reach beyond the cap, as they may in a trained model
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(16)
        prompts = torch.randint(1, 64, (PROMPTS, LENGTH))
        usual = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=TOKENS, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )
        batched = model.generate_batch(
            prompts.tolist(), generation_config=GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=16, page_size=64, max_batch_tokens=256, return_logprobs=True, auto_switch_to_flash=False
            ),
        )
        results = list(batched.values())
        first = usual.logits[0].log_softmax(-1)
        gaps = [abs(first[row, result.generated_tokens[0]].item() - result.logprobs[0]) for row, result in enumerate(results)]
        gap = max(gaps)
        same = sum(usual.sequences[row, LENGTH:].tolist() == result.generated_tokens for row, result in enumerate(results))
        print(f"{kind.model_type}, softcap {cap}: {same} of {PROMPTS} texts are the same; log-probabilities off by {gap:.1g}")
        assert model.config._attn_implementation == "eager"
        assert (same == PROMPTS and gap < 1e-4) if cap is None else (same < PROMPTS and gap > 0.01), (same, gaps)
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
