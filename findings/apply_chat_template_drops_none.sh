#!/usr/bin/env bash
# A chat template may ask whether a message has no content (`content is none`), which OpenAI's clients send beside a call:
# templates of DeepSeek's first models show calls there and nowhere else. `apply_chat_template` should pass on what it is given.
# Seen (transformers 5.24.0): keys whose value is None are dropped before the template runs, so `is none` is false, the content
# is undefined, and the call is gone from the prompt. `render_jinja_template`, which it calls, keeps them.
# Why it matters: an agent's earlier call vanishes from its history while the call's result stays; nothing is reported.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 jinja2
cat > "$work/run.py" <<'PY'
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

template = (
    "{% for m in messages %}{% if m.content is none %}<call>{% elif m.content is defined %}{{ m.content }}"
    "{% else %}<undefined>{% endif %}{% endfor %}"
)
call = {"type": "function", "function": {"name": "f", "arguments": {}}}
messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
applied = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
rendered = render_jinja_template(conversations=[messages], chat_template=template)[0][0]
print("apply_chat_template:", applied)
print("render_jinja_template:", rendered)
assert (applied, rendered) == ("hi<undefined>", "hi<call>")
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
