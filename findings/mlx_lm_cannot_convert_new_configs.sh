#!/usr/bin/env bash
# A Qwen3-MoE that today's transformers has saved should be convertible by today's mlx-lm.
# Seen (mlx-lm 0.32.2, transformers 5.24.0): transformers writes `rope_parameters` in place of `rope_theta`, and
# `num_local_experts` in place of `num_experts`; mlx-lm's ModelArgs knows the older names alone, so `mlx_lm.convert` ends with a
# TypeError about missing positional arguments.
# Why it matters: a model that was fine-tuned or resaved with the newest transformers has to be mended by hand first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 mlx-lm==0.32.2 "mlx[cpu]"
cat > "$work/run.py" <<'PY'
import sys

from mlx_lm import convert
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

folder = sys.argv[1] + "/model"
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
try:
    convert(folder, mlx_path=sys.argv[1] + "/converted")
    seen = "converted"
except TypeError as error:
    seen = str(error)
print("mlx_lm.convert:", seen)
assert "missing" in seen and "'num_experts' and 'rope_theta'" in seen, seen
PY
"$work/env/bin/python" "$work/run.py" "$work"
echo "as it was seen"
