#!/usr/bin/env bash
# Engines that hold a model to a JSON schema should refuse a schema that they cannot keep, or keep all of it.
# Seen (xgrammar 0.2.9, outlines-core 0.2.14, lm-format-enforcer 0.11.3): each compiles 7 to 11 of the 12 schemas below without an
# error, and then takes a document that the schema forbids. xgrammar passes over bounds beside a `$ref`, `allOf` of two (with a
# line in its log), `uniqueItems`, `not`, `if`, `dependentRequired` and a name that `required` alone has; the others pass over
# `minimum`, `multipleOf`, `minProperties` and `contains` as well, lm-format-enforcer even over `maxItems: 0`.
# llguidance 1.9.1 refuses by name what it does not know, and keeps the rest.
# Why it matters: an answer "by schema" is handed to a program that does not look again. A server that takes such an engine must
# read the schema first, or check the answer.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check \
  xgrammar==0.2.9 outlines-core==0.2.14 lm-format-enforcer==0.11.3 llguidance==1.9.1 jsonschema==4.26.0
cat > "$work/run.py" <<'PY'
import json
import re
import sys

import jsonschema
import llguidance
import xgrammar
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema
from xgrammar.testing import _is_grammar_accept_string

INTEGER = {"type": "integer"}
NUMBERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False}
# by keyword: a schema, and a document that it forbids
CASES = {
    "$ref with a sibling": ({"$ref": "#/$defs/s", "maxLength": 1, "$defs": {"s": {"type": "string"}}}, "ab"),
    "allOf": ({"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]}, "a"),
    "uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 1]),
    "not": ({"type": "string", "not": {"enum": ["a"]}}, "a"),
    "if": ({**NUMBERS, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, {"a": 1}),
    "dependentRequired": ({**NUMBERS, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "required": ({"type": "object", "properties": {}, "required": ["z"]}, {}),
    "minimum": ({"type": "integer", "minimum": 5}, 4),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, 10),
    "minProperties": ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, {"a": 1}),
    "contains": ({"type": "array", "contains": INTEGER}, ["a"]),
    "maxItems": ({"type": "array", "maxItems": 0}, [1]),
}


def by_xgrammar(schema, text):
    return _is_grammar_accept_string(xgrammar.Grammar.from_json_schema(json.dumps(schema)), text)


def by_outlines(schema, text):
    return re.fullmatch(build_regex_from_schema(json.dumps(schema)), text) is not None


def by_enforcer(schema, text):
    parser = JsonSchemaParser(schema)
    for char in text:
        if char not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(char)
    return parser.can_end()


def by_llguidance(schema, text):
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    if problem := llguidance.LLMatcher.validate_grammar(grammar, tokenizer):
        raise ValueError(problem)
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


seen = {}
for engine in (by_xgrammar, by_outlines, by_enforcer, by_llguidance):
    passed_over = []
    for keyword, (schema, document) in CASES.items():
        assert not jsonschema.Draft202012Validator(schema).is_valid(document), keyword
        try:
            if engine(schema, json.dumps(document, separators=(",", ":"))):
                passed_over.append(keyword)
        except ValueError as error:
            print(f"{engine.__name__}: {keyword} is refused: {error}")
    seen[engine.__name__] = passed_over
    print(f"{engine.__name__} takes what is forbidden by: {', '.join(passed_over) or 'none'}")
CHAINED = ["uniqueItems", "not", "if", "dependentRequired"]
wanted = {
    "by_xgrammar": ["$ref with a sibling", "allOf", *CHAINED, "required"],
    "by_outlines": ["$ref with a sibling", *CHAINED, "required", "minimum", "multipleOf", "minProperties", "contains"],
    "by_enforcer": [
        "$ref with a sibling", "allOf", *CHAINED, "minimum", "multipleOf", "minProperties", "contains", "maxItems",
    ],
    "by_llguidance": [],
}
sys.exit(seen != wanted)
PY
"$work/env/bin/python" "$work/run.py"
echo "as seen before"
