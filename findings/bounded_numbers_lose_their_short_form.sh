#!/usr/bin/env bash
# 0.9 lies within {"minimum": 0, "maximum": 0.95}. An engine that holds a model to this schema should let it write 0.9.
# Seen (llguidance 1.9.1): 0.9 is refused, 0.90 is taken. A number is refused where the bound goes on behind its digits: 0.9 for
# .95, 99.9 for 99.99, 0.2 for .25, 1.0 for 1.05, 0.0 for 0. xgrammar 0.2.9 takes all of these. Both refuse exponents where there
# are bounds, which they take without.
# Why it matters: after "0.9" the model cannot end the number; it must write a further digit, which it had not chosen. Scores,
# prices and confidences just below a bound come out altered (0.9 as 0.94, 99.9 as 99.98), and the answer keeps the schema.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check xgrammar==0.2.9 llguidance==1.9.1 jsonschema==4.26.0
cat > "$work/run.py" <<'PY'
import json

import jsonschema
import llguidance
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

BOUNDS = {(0, 0.95): ["0.9", "0.90", "0.89"], (0, 99.99): ["99.9", "99.90", "99.8"], (0, 0.25): ["0.2", "0.20", "0.1"],
          (0, 1.05): ["1.0", "1", "1.00"], (-1, 0): ["0.0", "0", "-0.5"]}


def by_xgrammar(schema, text):
    return _is_grammar_accept_string(xgrammar.Grammar.from_json_schema(json.dumps(schema)), text)


def by_llguidance(schema, text):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


for (low, high), texts in BOUNDS.items():
    schema = {"type": "number", "minimum": low, "maximum": high}
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    seen = {engine.__name__: [engine(schema, text) for text in texts] for engine in (by_xgrammar, by_llguidance)}
    print(f"from {low} to {high}: {texts}: {seen}")
    assert seen["by_xgrammar"] == [True, True, True], seen
    assert seen["by_llguidance"] == [False, True, True], seen
for engine in (by_xgrammar, by_llguidance):
    assert engine({"type": "number"}, "5e-1") and not engine({"type": "number", "minimum": 0}, "5e-1"), engine
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
