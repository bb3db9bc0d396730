"""Answers in a format that was asked for: JSON that a schema describes, through OpenAI's own client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict
from reciting import TEMPLATE
from served import GREEDY, MODEL_ID, Served, _afresh, serving  # noqa: F401

import offload

pytest.importorskip("llguidance")

PAIR = Path(offload.__file__).parent / "demo_pair"
ASKED: Any = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Describe a cat as JSON."}], "max_tokens": 90}


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["black", "white", "red"]
    lives: Literal[1, 5, 9]
    is_asleep: bool


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    how: Any = {"dtype": "float32", "threads": 1, "profile": "none", "lookup": False, "context": 200, "parallel": 2}
    decoder = offload.load(PAIR / "target", PAIR / "draft", "1GiB", "8x3", **how)
    decoder.tokenizer.chat_template = TEMPLATE
    with serving(decoder) as found:
        yield found


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"])
def test_a_schema_is_kept(served: Served, sampling: Any) -> None:
    done = served.client().chat.completions.parse(**ASKED, **sampling, response_format=Cat)
    cat = done.choices[0].message.parsed
    assert isinstance(cat, Cat)
    assert done.choices[0].finish_reason == "stop"
    free = served.client().chat.completions.create(**ASKED, **sampling).choices[0].message.content
    with pytest.raises(ValueError, match="JSON"):
        Cat.model_validate_json(free or "")
    wished: Any = {"type": "json_schema", "json_schema": {"name": "cat", "schema": Cat.model_json_schema()}}
    chunks = served.client().chat.completions.create(**ASKED, **sampling, response_format=wished, stream=True)
    assert Cat.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_any_object(served: Served) -> None:
    done = served.client().chat.completions.create(**ASKED, **GREEDY, response_format={"type": "json_object"})
    text = done.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def _tool(name: str, **fields: Any) -> Any:
    parameters = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SHADE = {"$ref": "#/$defs/Shade"}
TOOLS: Any = [_tool("paint", shade=SHADE), _tool("count", lives={"enum": [1, 5, 9]})]
TOOLS[0]["function"]["parameters"]["$defs"] = {"Shade": {"enum": ["black", "red"]}}
FORCED: dict[str, tuple[Any, set[str]]] = {
    "any": ("required", {"paint", "count"}),
    "one": ({"type": "function", "function": {"name": "count"}}, {"count"}),
    "one with definitions": ({"type": "function", "function": {"name": "paint"}}, {"paint"}),
}


@pytest.mark.parametrize(("choice", "names"), FORCED.values(), ids=FORCED)
def test_a_tool_that_is_forced_is_called(served: Served, choice: Any, names: set[str]) -> None:
    asked = {**ASKED, **GREEDY, "tools": TOOLS, "tool_choice": choice}
    done = served.client().chat.completions.create(**asked).choices[0]
    assert (done.finish_reason, done.message.content) == ("tool_calls", None)
    (call,) = done.message.tool_calls or ()
    assert call.type == "function" and call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert arguments.get("shade") in ("black", "red") or arguments.get("lives") in (1, 5, 9)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        served.client().chat.completions.create(
            **{**asked, "tool_choice": {"type": "function", "function": {"name": "x"}}}
        )


BAD = {
    "no schema": {"type": "json_schema", "json_schema": {"name": "cat"}},
    "no description": {"type": "json_schema"},
    "no JSON schema": {"type": "json_schema", "json_schema": {"name": "cat", "schema": {"type": "feline"}}},
    "what nothing is": {"type": "json_schema", "json_schema": {"name": "cat", "schema": False}},
    "no format": {"type": "yaml"},
}


@pytest.mark.parametrize("wished", BAD.values(), ids=BAD)
def test_what_is_no_format_is_refused(served: Served, wished: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        served.client().chat.completions.create(**ASKED, response_format=wished)
    assert served.is_idle()
