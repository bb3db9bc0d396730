"""OpenAI's responses by its own client, and an editor's and an agent kit's requests as they send them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from agent_model import ANSWER, CITIES, SAYING, THOUGHT, save_agent
from reciting import failing_reads
from served import GREEDY, MODEL_ID, Served, _afresh, serving  # noqa: F401
from waiting import PATIENCE_S, until

PATH = "/v1/responses"
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
ASK = "How is the weather in Paris?"
ASKED: Any = {"model": MODEL_ID, "input": ASK, "tools": [WEATHER], "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(save_agent(tmp_path_factory.mktemp("agent"))) as server:
        yield server


def post(served: Served, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(served.address + PATH, content=content, headers=headers, timeout=PATIENCE_S)


def answered(served: Served, is_streamed: bool, **asked: Any) -> Any:
    if not is_streamed:
        return served.client().responses.create(**asked)
    with served.client().responses.stream(**asked) as stream:
        numbers = [event.sequence_number for event in stream]
        assert numbers == [*range(len(numbers))]
        return stream.get_final_response()


def shown(response: Any) -> list[Any]:
    items = list[Any]()
    for item in response.output:
        assert item.status == "completed" and item.id
        if item.type == "function_call":
            items.append((item.name, json.loads(item.arguments)))
        else:
            (content,) = item.content
            items.append((item.type, content.text))
    return items


CALLS: Any = [("get_weather", {"city": city}) for city in CITIES]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_of_tools(served: Served, is_streamed: bool) -> None:
    """As kits do: whole histories, with the items of answers as they came."""
    first = answered(served, is_streamed, **ASKED)
    assert shown(first) == [("reasoning", THOUGHT), ("message", SAYING), CALLS[0]]
    assert (first.status, first.output_text, first.error) == ("completed", SAYING, None)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    history: Any = [{"role": "user", "content": [{"type": "input_text", "text": ASK}]}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    asked = {**ASKED, "instructions": "Be brief.", "input": [*history, result]}
    last = answered(served, is_streamed, **asked)
    assert shown(last) == [("message", ANSWER)]
    written = f"TOOLS get_weather<s>system: Be brief.<s>user: {ASK}<s>assistant: <think>{THOUGHT}"
    written += f'</think>{SAYING}<tool_call>{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}</tool_call>'
    written += "</s><s>tool: 21<s>assistant;"
    assert last.usage.input_tokens == len(served.decoder.encode(written, raw=True))
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
def test_parallel_calls(served: Served, is_streamed: bool) -> None:
    asked = {**ASKED, "input": "And in both?"}
    assert shown(answered(served, is_streamed, **asked)) == CALLS
    assert shown(answered(served, is_streamed, **asked, parallel_tool_calls=False)) == CALLS[:1]


def test_an_answer_that_the_limit_cuts(served: Served) -> None:
    cut = served.client().responses.create(**ASKED, max_output_tokens=6)
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    events = [*served.client().responses.create(**ASKED, max_output_tokens=6, stream=True)]
    assert events[-1].type == "response.incomplete"
    counted = {name: ASKED[name] for name in ("model", "input", "tools")}
    assert cut.usage and served.client().responses.input_tokens.count(**counted).input_tokens == cut.usage.input_tokens


def test_chat_has_the_same_parts(served: Served) -> None:
    """And so do its streams; a named choice, and one of several that are allowed, keep to what they name."""
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
    tools.append({"type": "function", "function": {"name": "other", "parameters": PARAMETERS}})
    asked: Any = {"model": MODEL_ID, "messages": [{"role": "user", "content": ASK}], "tools": tools, **GREEDY}
    message = served.client().chat.completions.create(**asked).choices[0].message
    fields = message.model_dump()
    assert (fields["reasoning_content"], message.content) == (THOUGHT, SAYING)
    chunks = [chunk.choices[0].delta.model_dump() for chunk in served.client().chat.completions.create(
        **asked, stream=True)]  # fmt: skip
    assert "".join(chunk.get("reasoning_content") or "" for chunk in chunks) == THOUGHT
    assert "".join(chunk["content"] or "" for chunk in chunks) == SAYING
    for name, wanted in (("get_weather", 1), ("other", 0)):
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": name}}]}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        message = served.client().chat.completions.create(**asked, tool_choice=choice).choices[0].message
        assert len(message.tool_calls or ()) == wanted


def test_a_schema_is_kept(served: Served) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    wished: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    done = served.client().responses.create(model=MODEL_ID, input=ASK, temperature=0, text=wished, max_output_tokens=60)
    assert json.loads(done.output_text) == {"a": 1}
    choice: Any = {"type": "function", "name": "get_weather"}
    forced = served.client().responses.create(**ASKED, tool_choice=choice, max_output_tokens=60)
    assert forced.status == "incomplete" or [item.type for item in forced.output] == ["function_call"]


def test_a_fault_under_way_is_an_event(served: Served) -> None:
    with failing_reads(4):
        events = [*served.client().responses.create(**ASKED, stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    until(served.is_idle)


def test_what_changes_nothing_is_named(served: Served) -> None:
    body = {**ASKED, "store": True, "include": [], "reasoning": {"effort": "low", "summary": "auto"}}
    response = post(served, {**body, "text": {"format": {"type": "text"}, "verbosity": "low"}})
    names = "include, reasoning.effort, reasoning.summary, store, text.verbosity"
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, names)


RESULT = {"type": "function_call_output", "call_id": "x"}
BAD: dict[str, tuple[Any, str]] = {
    "a kept answer": ({"previous_response_id": "resp_1"}, "send the whole conversation as 'input'"),
    "a kept conversation": ({"conversation": "conv_1"}, "'conversation' is not supported"),
    "a kept prompt": ({"prompt": {"id": "x"}}, "'prompt' is not supported"),
    "in the background": ({"background": True}, "'background' is not supported"),
    "no input": ({"input": None}, "'input'"),
    "an empty one": ({"input": []}, "'input'"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input[0].content[0].type'"),
    "another item": ({"input": [{"type": "item_reference", "id": "x"}]}, "'input[0]': it must have a type"),
    "no role": ({"input": [{"content": "x"}]}, "'input[0].role'"),
    "no arguments": ({"input": [{"type": "function_call", "call_id": "x", "name": "y"}]}, "'input[0].arguments'"),
    "no output": ({"input": [{"role": "user", "content": "x"}, RESULT]}, "'input[1].output'"),
    "no text": ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "'input[0].content[0].text'"),
    "a server's tool": ({"tools": [{"type": "web_search"}]}, "'tools[0].type': it must be 'function'"),
    "a tool that is not there": ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    "no allowed tool": ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
    "no format": ({"text": {"format": {"type": "yaml"}}}, "'text'"),
    "a format that is no object": ({"text": {"format": 5}}, "'text.format'"),
    "logprobs": ({"top_logprobs": 3}, "'top_logprobs'"),
    "a stranger's field": ({"max_tokens": 1}, "Unrecognized request argument supplied: max_tokens"),
    "too long": ({"input": "x" * 9999}, "maximum context length"),
    "half a character": ({"input": "\ud800"}, "JSON"),
    "too deep": (b"[" * 100_000, "must be JSON"),
    "a list": (b"[]", "it must be an object"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(served: Served, change: Any, message: str) -> None:
    response = post(served, change if isinstance(change, bytes) else ASKED | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"] and error["type"] == "invalid_request_error" and served.is_idle()


def test_a_model_that_is_not_there(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client().responses.create(**{**ASKED, "model": "gpt-4"})
