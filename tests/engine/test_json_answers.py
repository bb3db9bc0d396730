"""JSON of a small model that draws at T = 1: 200 answers, each whole, valid, and none of blanks."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import offload
from offload.engine.decoder import Decoder
from offload.options import CHAT_PAIR

pytest.importorskip("llguidance")

NUM_TOKENS = 256
SCHEMAS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "person": (
        "Describe a person as JSON.",
        67,
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    ),
    "tags": (
        "What is a list? Answer as JSON.",
        67,
        {
            "type": "object",
            "properties": {
                "title": {"type": "string", "maxLength": 30},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 4},
                "done": {"type": "boolean"},
            },
            "required": ["title", "tags", "done"],
            "additionalProperties": False,
        },
    ),
    "rows": (
        "Give rows as JSON.",
        66,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["list", "dict", "set"]},
                    "size": {"type": ["integer", "null"], "minimum": 0, "maximum": 9999},
                    "note": {"type": "string", "maxLength": 15},
                },
                "required": ["kind", "size", "note"],
                "additionalProperties": False,
            },
        },
    ),
}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "null": type(None)}


def breaches(value: Any, schema: dict[str, Any], place: str = "$") -> Iterator[str]:
    """Return what of a value breaks a schema made of the words above."""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and type(value) not in [TYPES[one] for one in types]:
        yield f"{place} is {value!r}, none of {types}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} is {value!r}, not in {schema['enum']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{place} is longer than {schema['maxLength']}: {value!r}"
    if type(value) is int and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{place} is out of bounds: {value}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{place} has {len(value)} items"
        for index, one in enumerate(value):
            yield from breaches(one, schema["items"], f"{place}[{index}]")
    if isinstance(value, dict):
        if not {*schema["required"]} <= {*value} <= {*schema["properties"]}:
            yield f"{place} has {[*value]}"
        for name in value.keys() & schema["properties"].keys():
            yield from breaches(value[name], schema["properties"][name], f"{place}.{name}")


BROKEN: list[tuple[str, Any]] = [
    ("person", []),
    ("person", {"name": "a"}),
    ("person", {"name": "a", "age": 151}),
    ("person", {"name": "a", "age": True}),
    ("person", {"name": "a" * 21, "age": 3}),
    ("person", {"name": "a", "age": 3, "more": 0}),
    ("tags", {"title": "", "tags": [], "done": True}),
    ("tags", {"title": "", "tags": ["a" * 11], "done": True}),
    ("tags", {"title": "", "tags": ["a"], "done": 1}),
    ("rows", [{"kind": "tuple", "size": 1, "note": ""}]),
    ("rows", [{"kind": "set", "size": 1.5, "note": ""}]),
]


@pytest.mark.parametrize(("name", "value"), BROKEN)
def test_what_breaks_a_schema_is_seen(name: str, value: Any) -> None:
    _, _, schema = SCHEMAS[name]
    assert len([*breaches(value, schema)]) == 1


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with offload.load(
        CHAT_PAIR / "target", CHAT_PAIR / "draft", "1GiB", "dynamic:32x6", threads=1, profile="none"
    ) as decoder:
        yield decoder


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_whole_and_valid(decoder: Decoder, name: str) -> None:
    """Each of them, and all texts are not one."""
    question, num_answers, schema = SCHEMAS[name]
    texts = list[str]()
    longest = 0
    for seed in range(num_answers):
        how: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "seed": seed, "json_schema": schema}
        answer = decoder.generate(question, **how)
        assert answer.finish_reason == "stop", f"seed {seed} is cut: {answer.text[-80:]!r}"
        assert [*breaches(json.loads(answer.text), schema)] == [], f"seed {seed}"
        between = re.sub(r'"(?:[^"\\]|\\.)*"', '""', answer.text)
        longest = max(longest, *map(len, re.findall(r"\s*", between)))
        texts.append(answer.text)
    print(f"{name}: {num_answers} valid, {len({*texts})} different, at most {longest} blanks between two parts")
    assert longest <= 1
    assert len({*texts}) > num_answers / 2
