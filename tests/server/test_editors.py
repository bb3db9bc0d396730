"""Editors' requests, as they send them: gaps in code that are filled, and chats with tools, in streams."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from agent_model import ANSWER, CITIES, SAYING, THOUGHT, save_agent
from served import MODEL_ID, Served, _afresh, serving  # noqa: F401
from tiny import save_reciter
from transformers import AutoTokenizer
from waiting import PATIENCE_S, until

from offload.words.infill import FORMS, infill_form, infilled

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
WRITTEN = (" return", " x +", " 1\n")
BEFORE, BEHIND = "def f(x):\n   ", "\n\nprint(f(2))\n"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that fills gaps: its marks are special tokens."""
    folder = save_reciter(tmp_path_factory.mktemp("coder"), (MARKS[2], *WRITTEN), MARKS[:2], ends=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS]})
    tokenizer.save_pretrained(folder)
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(save_agent(tmp_path_factory.mktemp("agent"))) as server:
        yield server


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a stream tells, read as editors do, line by line."""
    results = []
    address = f"{served.address}/v1/{path}"
    with httpx.stream("POST", address, json={"model": MODEL_ID, **body}, timeout=PATIENCE_S) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                results.append(json.loads(line.removeprefix("data: ")))
    return results


STOPS = ["<|endoftext|>", *MARKS, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/",
         "#- coding: utf-8", "```"]  # fmt: skip
GAPS: dict[str, dict[str, Any]] = {
    # as Continue writes them, by the family's own marks
    "marks": {"prompt": f"{MARKS[0]}{BEFORE}{MARKS[1]}{BEHIND}{MARKS[2]}", "max_tokens": 4096 >> 5, "stop": STOPS,
              "temperature": 0.01, "stream": True},
    # as Copilot and others do, which leave it to the server
    "suffix": {"prompt": BEFORE, "suffix": BEHIND, "max_tokens": 100, "temperature": 0, "top_p": 1, "n": 1,
               "stop": ["\n\n\n", "\n```"], "stream": True},
}  # fmt: skip


@pytest.mark.parametrize("body", GAPS.values(), ids=GAPS)
def test_a_gap_is_filled(coder: Served, body: dict[str, Any]) -> None:
    seen = events(coder, "completions", {**body, "stream_options": {"include_usage": True}})
    choices = [choice for event in seen for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "".join(WRITTEN)
    assert choices[-1]["finish_reason"] == "stop"
    assert seen[-1]["usage"]["prompt_tokens"] == len(BEFORE) + len(BEHIND) + 3
    asked = {"model": MODEL_ID, "prompt": BEFORE, "suffix": "", "max_tokens": 1, "temperature": 0}
    plain = httpx.post(f"{coder.address}/v1/completions", json=asked, timeout=PATIENCE_S).json()
    assert plain["usage"]["prompt_tokens"] == len(BEFORE), "nothing stands behind the gap"


def test_a_gap_that_is_closed_meanwhile_is_dropped(coder: Served) -> None:
    """Editors hang up with every key that is pressed."""
    for _ in range(3):
        body = {"model": MODEL_ID, **GAPS["suffix"]}
        with httpx.stream("POST", f"{coder.address}/v1/completions", json=body, timeout=PATIENCE_S) as stream:
            next(stream.iter_lines())
    until(coder.is_idle)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.before)
def test_forms_of_families(form: Any) -> None:
    assert infill_form({mark for mark in form if mark} | {"<pad>"}) == form
    assert infill_form({form.before, "<pad>"}) is None
    prompt = infilled(form, "BEFORE", "BEHIND")
    assert prompt.startswith(form.before if form.gap else form.behind)
    assert prompt.endswith(form.gap or "BEFORE") and (prompt.index("BEFORE") < prompt.index("BEHIND")) == bool(form.gap)


SYSTEM = {"role": "system", "content": "You edit files."}
CHATS: dict[str, dict[str, Any]] = {
    "Zed": {
        "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "How?"}]}],
        "stream": True, "stream_options": {"include_usage": True}, "stop": [], "temperature": 0.0,
        "tool_choice": "auto", "parallel_tool_calls": False, "tools": TOOLS, "prompt_cache_key": "thread-1",
    },
    "Copilot": {
        "messages": [SYSTEM, {"role": "user", "content": "How?"}], "tools": TOOLS,
        "temperature": 0, "top_p": 1, "max_tokens": 60, "n": 1, "stream": True,
        "stream_options": {"include_usage": True}, "tool_choice": "auto",
    },
    "Continue": {
        "messages": [SYSTEM, {"role": "user", "content": "How?"}], "tools": TOOLS,
        "max_completion_tokens": 60, "stream": True, "temperature": 0.0, "parallel_tool_calls": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
def test_a_chat_with_tools_in_a_stream(agent: Served, body: dict[str, Any]) -> None:
    """Two turns: a call whose arguments come in pieces, then its result, with what was said before as it came."""
    seen = events(agent, "chat/completions", body)
    deltas = [choice["delta"] for event in seen for choice in event["choices"]]
    calls: dict[int, dict[str, Any]] = {}
    for piece in (call for delta in deltas for call in delta.get("tool_calls") or []):
        call = calls.setdefault(piece["index"], {"id": piece.get("id"), "name": "", "arguments": ""})
        call["name"] += piece["function"].get("name") or ""
        call["arguments"] += piece["function"].get("arguments") or ""
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == [
        ("get_weather", {"city": CITIES[0]})
    ]
    reasons = [choice["finish_reason"] for event in seen for choice in event["choices"] if choice["finish_reason"]]
    assert reasons == ["tool_calls"] and deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == SAYING
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == THOUGHT
    assert ("stream_options" in body) == bool(seen[-1].get("usage"))
    (call,) = calls.values()
    function = {"name": call["name"], "arguments": call["arguments"]}
    said = {
        "role": "assistant",
        "content": SAYING,
        "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "21"}]}
    again = events(agent, "chat/completions", {**body, "messages": [*body["messages"], said, result]})
    assert "".join(choice["delta"].get("content") or "" for event in again for choice in event["choices"]) == ANSWER
