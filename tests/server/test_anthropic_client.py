"""Anthropic's own client against a real server: event by event, tools in a loop, thoughts, counts and errors."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from agent_model import ANSWER, CITIES, SAYING, THOUGHT, save_agent
from reciting import failing_reads
from served import GREEDY, MODEL_ID, Served, _afresh, serving  # noqa: F401
from waiting import PATIENCE_S, until

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WEATHER: Any = {
    "name": "get_weather", "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
BOTH: Any = [{"role": "user", "content": "And in both?"}]
ASKED: Any = {"model": MODEL_ID, "max_tokens": 36, "messages": ASK, "tools": [WEATHER], "extra_body": GREEDY}
KEY = "sesame"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(save_agent(tmp_path_factory.mktemp("agent")), api_keys=(KEY,)) as server:
        yield server


def client(served: Served, **options: Any) -> anthropic.Anthropic:
    made = anthropic.Anthropic(base_url=served.address, api_key=KEY, max_retries=0, timeout=PATIENCE_S, **options)
    return served.clients.enter_context(made)


def post(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", "x-api-key": KEY, **headers}
    return httpx.post(served.address + path, content=content, headers=sent, timeout=PATIENCE_S)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in an answer, proved to have Anthropic's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    error: dict[str, Any] = body["error"]
    assert {"type", "message"} <= set(error) <= {"type", "message", "details"}
    return error


def shown(blocks: Any) -> list[Any]:
    """The blocks of an answer without the ids of calls."""
    kept = []
    for block in blocks:
        fields = block.model_dump(exclude_none=True)
        fields.pop("id", None)
        kept.append(fields)
    return kept


THINKING: Any = {"type": "thinking", "thinking": THOUGHT, "signature": "offload"}
CALLS: Any = [{"type": "tool_use", "name": "get_weather", "input": {"city": city}} for city in CITIES]
WHOLE = [THINKING, {"type": "text", "text": SAYING}, CALLS[0]]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("messages", "blocks"), [(ASK, WHOLE), (BOTH, CALLS)], ids=["one call", "two calls"])
def test_an_answer_in_blocks(served: Served, is_streamed: bool, messages: Any, blocks: Any) -> None:
    asked = {**ASKED, "messages": messages}
    if is_streamed:
        with client(served).messages.stream(**asked) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client(served).messages.create(**asked)
    assert shown(message.content) == blocks
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL_ID)
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    counted = client(served).messages.count_tokens(model=MODEL_ID, messages=messages, tools=[WEATHER])
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.output_tokens > 0


def test_events_in_their_order(served: Served) -> None:
    """Each has a name, which clients go by, and blocks are numbered without gaps."""
    body = {"model": MODEL_ID, "max_tokens": 36, "messages": ASK, "tools": [WEATHER], "stream": True, **GREEDY}
    response = post(served, MESSAGES, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = list[tuple[str, Any]]()
    for text in response.text.split("\n\n"):
        if text and not text.startswith(":"):
            name, data = text.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == 3
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None) and start["usage"]["input_tokens"] > 0
    starts = [data for name, data in events if name == "content_block_start"]
    assert [data["index"] for data in starts] == [0, 1, 2]
    assert [data["content_block"]["type"] for data in starts] == ["thinking", "text", "tool_use"]
    open_block = -1
    for name, data in events:
        if name == "content_block_start":
            open_block = data["index"]
        elif name.startswith("content_block"):
            assert data["index"] == open_block
    kinds = {data["delta"]["type"] for name, data in events if name == "content_block_delta"}
    assert kinds == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_of_tools(served: Served, is_streamed: bool) -> None:
    """What the client has got goes back as it came, thoughts and fields of other servers included."""
    asked = {**ASKED, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
    first = client(served).messages.create(**asked)
    (call,) = (block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21"}]}
    messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    asked = {**asked, "messages": messages}
    if is_streamed:
        with client(served).messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == ANSWER
            last: Any = stream.get_final_message()
    else:
        last = client(served).messages.create(**asked)
    assert (shown(last.content), last.stop_reason) == ([{"type": "text", "text": ANSWER}], "end_turn")
    written = f"TOOLS get_weather<s>system: Be brief.<s>user: {ASK[0]['content']}<s>assistant: <think>{THOUGHT}"
    written += f'</think>{SAYING}<tool_call>{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}</tool_call>'
    written += "</s><s>tool: 21<s>assistant;"
    num_prompt = last.usage.input_tokens + last.usage.cache_read_input_tokens
    assert num_prompt == len(served.decoder.encode(written, raw=True))


@pytest.mark.parametrize(
    ("extra", "reason", "stop", "text"),
    [
        ({"max_tokens": 2}, "max_tokens", None, "It is 21"),
        ({"stop_sequences": ["never", " deg"]}, "stop_sequence", " deg", "It is 21"),
        ({}, "end_turn", None, ANSWER),
        ({"max_tokens": 1 << 20}, "end_turn", None, ANSWER),
    ],
)
def test_where_it_ends(served: Served, extra: Any, reason: str, stop: str | None, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "x", "content": "21"}
    use = {"type": "tool_use", "id": "x", "name": "get_weather", "input": {}}
    messages: Any = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    asked = {**ASKED, "messages": messages, **extra}
    message = client(served).messages.create(**asked)
    with client(served).messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for got in (message, streamed):
        assert (got.content[0].text, got.stop_reason, got.stop_sequence) == (text, reason, stop)  # type: ignore


def test_an_answer_ends_where_the_context_does_whatever_limit_is_named(served: Served) -> None:
    room = client(served).models.retrieve(MODEL_ID).max_input_tokens
    begun: Any = [*ASK, {"role": "assistant", "content": "I say;"}]
    num_more = room - client(served).messages.count_tokens(model=MODEL_ID, messages=begun).input_tokens - 2
    begun[0] = {"role": "user", "content": "x" * num_more + str(begun[0]["content"])}
    message = client(served).messages.create(model=MODEL_ID, max_tokens=32_000, messages=begun, extra_body=GREEDY)
    assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", 2)


def test_a_call_that_the_limit_cuts_is_text(served: Served) -> None:
    whole = client(served).messages.create(**ASKED)
    cut = client(served).messages.create(**{**ASKED, "max_tokens": whole.usage.output_tokens - 2})
    assert [block.type for block in cut.content] == ["thinking", "text"] and cut.stop_reason == "max_tokens"


def test_an_answer_that_is_begun_is_gone_on_with(served: Served) -> None:
    begun: Any = [*ASK, {"role": "assistant", "content": "I say;"}]
    message = client(served).messages.create(**{**ASKED, "messages": begun})
    assert message.content[0].text == ANSWER  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["disabled", "enabled", "adaptive"])
def test_thoughts_are_asked_for(served: Served, kind: str) -> None:
    def count(**options: Any) -> int:
        counted = client(served).messages.count_tokens(model=MODEL_ID, messages=ASK, **options)
        return counted.input_tokens

    thinking: Any = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
    assert count(thinking=thinking) == count() + len(" quick") * (kind == "disabled")


def test_what_changes_nothing_is_named(served: Served) -> None:
    messages: Any = [{"role": "user", "content": [{**ASK[0], "type": "text", "text": "x", "role": ""}]}]
    messages[0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    body = {"model": MODEL_ID, "max_tokens": 2, "messages": messages, "metadata": {"user_id": "me"}, "speed": "fast"}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    response = post(served, MESSAGES, {**body, "thinking": thinking, "output_config": {"effort": "low"}})
    names = "messages[0].content[0].cache_control, messages[0].content[0].content, metadata, "
    names += "output_config.effort, speed, thinking.budget_tokens"
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, names)


def test_models(served: Served) -> None:
    (model,) = client(served).models.list().data
    assert (model.id, model.type, model.display_name) == (MODEL_ID, "model", MODEL_ID)
    assert client(served).models.retrieve(MODEL_ID).created_at.year >= 2026


USUAL: Any = {"model": MODEL_ID, "max_tokens": 2, "messages": ASK}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "x", "content": "y"}


def said(*blocks: Any, role: str = "user") -> Any:
    return {"messages": [{"role": role, "content": [*blocks]}]}


BAD: dict[str, tuple[Any, str]] = {
    "no limit": ({"max_tokens": None}, "'max_tokens'"),
    "no message": ({"messages": []}, "'messages'"),
    "no role": ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role'"),
    "no content": ({"messages": [{"role": "user"}]}, "'messages[0].content'"),
    "an image": (said(IMAGE), "'messages[0].content[0]': it must have a type that is read here"),
    "an image as a result": (said({**RESULT, "content": [IMAGE]}), "messages[0].content[0].content"),
    "no text": (said({"type": "text", "text": 5}), "'messages[0].content[0].text'"),
    "no kind": (said({"text": "x"}), "'messages[0].content[0]'"),
    "a call of the user": (said({"type": "tool_use", "id": "x", "name": "y", "input": {}}), "no tool_use"),
    "a result of the assistant": (said(RESULT, role="assistant"), "no tool_result"),
    "arguments as text": (said({"type": "tool_use", "id": "x", "name": "y", "input": "{}"}), "content[0].input"),
    "half a character": (said({"type": "text", "text": "\ud800"}), "JSON"),
    "a stranger's field": ({"max_token": 1}, "Unrecognized request argument supplied: max_token"),
    "too cold": ({"temperature": -1}, "temperature"),
    "too many stops": ({"stop_sequences": ["a"] * 17}, "'stop_sequences': it must have at most 16 items"),
    "no tool": ({"tools": [{"name": "x"}]}, "'tools[0].input_schema'"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    "a tool that is not there": ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "no choice": ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
    "no format": ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
    "no schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "feline"}}}}, "output_config",
    ),
    "too long": ({"messages": [{"role": "user", "content": "x" * 9999}]}, "maximum context length"),
    "no JSON": (b"{", "must be JSON"),
    "too deep": (b"[" * 100_000, "must be JSON"),
    "a list": (b"[]", "it must be an object"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(served: Served, change: Any, message: str) -> None:
    body = change if isinstance(change, bytes) else USUAL | change
    error = error_of(post(served, MESSAGES, body), 400)
    assert message in error["message"] and error["type"] == "invalid_request_error" and served.is_idle()
    if "max_tokens" not in str(change)[:14] and change != BAD["too long"][0] and "stop" not in str(change):
        counted = body if isinstance(body, bytes) else {k: v for k, v in body.items() if k != "max_tokens"}
        assert message in error_of(post(served, COUNT, counted), 400)["message"]


def test_statuses(served: Served) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client(served).with_options(api_key="open").messages.create(**ASKED)
    assert error_of(post(served, MESSAGES, USUAL, **{"x-api-key": "open"}), 401)["type"] == "authentication_error"
    assert post(served, MESSAGES, USUAL, **{"x-api-key": "", "authorization": f"Bearer {KEY}"}).status_code == 200
    with pytest.raises(anthropic.NotFoundError, match="gpt-4"):
        client(served).messages.create(**{**ASKED, "model": "gpt-4"})
    assert error_of(post(served, f"{MESSAGES}/batches", {}), 404)["type"] == "not_found_error"
    assert error_of(post(served, MESSAGES, b"x" * (5 << 20)), 413)["type"] == "request_too_large"
    assert error_of(post(served, MESSAGES, USUAL, **{"content-type": "text/plain"}), 415)
    assert error_of(post(served, MESSAGES, {**USUAL, "thread": {"type": "create"}}), 400)["details"] == {
        "error_code": "thread_unsupported_request", "unsupported": ["thread"],
    }  # fmt: skip


def test_a_fault_under_way_is_an_event(served: Served) -> None:
    """A client takes a stream that only ends for a whole answer."""
    with failing_reads(4), pytest.raises(anthropic.APIStatusError), client(served).messages.stream(**ASKED) as stream:
        stream.get_final_message()
    until(served.is_idle)
    with client(served).messages.stream(**ASKED) as stream:
        next(iter(stream))
    until(served.is_idle)


def test_forced_calls(served: Served) -> None:
    pytest.importorskip("llguidance")
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        message = client(served).messages.create(**{**ASKED, "max_tokens": 150, "tool_choice": choice})
        if message.stop_reason == "tool_use":
            assert [block.type for block in message.content] == ["tool_use"]
    none = client(served).messages.create(**{**ASKED, "tool_choice": {"type": "none"}})
    assert [block.type for block in none.content] == ["thinking", "text"]
    assert none.stop_reason == "end_turn"
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    message = client(served).messages.create(**{**ASKED, "messages": BOTH, "tool_choice": alone})
    assert shown(message.content) == CALLS[:1]
