"""Answers in a format that was asked for, and calls of tools: whole, or text that stays text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict
from reciting import TEMPLATE
from served import GREEDY, HELLO, MODEL_ID, Served, _afresh, serving  # noqa: F401
from tiny import save_reciter

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
    options: Any = {"dtype": "float32", "threads": 1, "profile": "none", "lookup": False, "context": 200, "parallel": 2}
    decoder = offload.load(PAIR / "target", PAIR / "draft", "1GiB", "8x3", **options)
    decoder.tokenizer.chat_template = TEMPLATE
    with serving(decoder) as server:
        yield server


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


ADDING: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOLD = "{% if tools %}ADDING {{ tools[0].function.name }} {% endif %}" + TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}',
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers everything with a call."""
    pieces = (":", "<tool", '_call>{"name": "add",', ' "arguments": {"a": 1, "b": "u"}', "}</tool_call>")
    return save_reciter(tmp_path_factory.mktemp("caller"), pieces, ends=True, chat_template=TOLD)


def test_a_conversation_with_a_tool(caller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(caller) as served:
        asked: Any = {"model": MODEL_ID, "messages": HELLO, **GREEDY}
        client = served.client()
        raw = client.chat.completions.with_raw_response.create
        assert raw(**asked, tools=ADDING).headers.get("x-ignored-fields") is None
        with monkeypatch.context() as patch:
            patch.setattr(served.decoder.tokenizer, "chat_template", TEMPLATE)
            with pytest.raises(openai.BadRequestError, match="does not tell the model of tools"):
                raw(**asked, tools=ADDING)
        plain = client.chat.completions.create(**asked).choices[0]
        assert (plain.finish_reason, plain.message.tool_calls) == ("stop", None)
        assert (plain.message.content or "").startswith("<tool_call>")
        choice = client.chat.completions.create(**asked, tools=ADDING).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function" and json.loads(call.function.arguments) == {"a": 1, "b": "u"}
        none = client.chat.completions.create(**asked, tools=ADDING, tool_choice="none").choices[0]
        assert none.finish_reason == "stop"
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, tools=ADDING, stream=True)]
        deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
        assert [delta.function and delta.function.name for delta in deltas] == ["add"]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
        assert chunks[-1].finish_reason == "tool_calls"
        with monkeypatch.context() as patch:
            patch.setattr(served.decoder.tokenizer, "chat_template", TEMPLATE)
            with pytest.raises(openai.BadRequestError, match="does not tell the model of calls"):
                raw(model=MODEL_ID, messages=[*HELLO, choice.message, {"role": "tool", "content": "3"}])
        call_text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "u"}}</tool_call>'
        written = f"ADDING add <s>user:Hello<s>assistant:{call_text}</s><s>tool:3<s>assistant:"
        for extra in ({}, {"reasoning_details": ["x"], "cache_control": {"type": "ephemeral"}, "annotations": None}):
            answer = {**choice.message.model_dump(exclude_none=True), **extra}
            turns = [*HELLO, answer, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            again = raw(model=MODEL_ID, messages=turns, tools=ADDING, **GREEDY)
            names = "messages[1].cache_control, messages[1].reasoning_details" if extra else None
            assert again.headers.get("x-ignored-fields") == names
            usage = again.parse().usage
            assert usage is not None and usage.prompt_tokens == len(served.decoder.encode(written, raw=True))
