#!/usr/bin/env bash
# A JSON string of bounded length, or of a pattern that allows it, may hold a quote, a backslash or a line break: as an escape,
# which counts as one character.
# Seen (xgrammar 0.2.9): with `minLength`, `maxLength` or `pattern` no escape is allowed at all, so a field of `"minLength": 1` can
# hold no quote and no line break, however long it may be; without them all escapes are allowed. A pattern must match the whole
# string, too, where JSON Schema looks for it anywhere: `b` refuses "abc". llguidance 1.9.1 takes all of these.
# Why it matters: generators of schemas write `minLength: 1` for any field that must not be empty. A model that is held to it
# cannot quote, and cannot write two lines of code; it ends the string or writes something else, and nothing says why.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check xgrammar==0.2.9 llguidance==1.9.1 jsonschema==4.26.0
cat > "$work/run.py" <<'PY'
import json
import sys

import jsonschema
import llguidance
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

SCHEMAS = [{}, {"minLength": 1}, {"maxLength": 100}, {"pattern": "^[^x]+$"}]
TEXTS = ["abc", 'a "b" c', "a\\b", "a\nb"]


def by_xgrammar(schema, text):
    return _is_grammar_accept_string(xgrammar.Grammar.from_json_schema(json.dumps(schema)), text)


def by_llguidance(schema, text):
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(schema)
    )
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def taken(engine, schema, texts):
    schema = {"type": "string", **schema}
    for text in texts:
        jsonschema.validate(text, schema)
    return [engine(schema, json.dumps(text)) for text in texts]


seen = {}
for engine in (by_xgrammar, by_llguidance):
    seen[engine.__name__] = [taken(engine, schema, TEXTS) for schema in SCHEMAS]
    seen[engine.__name__] += taken(engine, {"pattern": "b"}, ["abc"])
    print(engine.__name__)
    for schema, row in zip(SCHEMAS, seen[engine.__name__]):
        print(f"  {schema}: {dict(zip(TEXTS, row))}")
no_escape = [True, False, False, False]
wanted = {
    "by_xgrammar": [[True] * 4, no_escape, no_escape, no_escape, False],
    "by_llguidance": [[True] * 4] * 4 + [True],
}
sys.exit(seen != wanted)
PY
"$work/env/bin/python" "$work/run.py"
echo "as seen before"
