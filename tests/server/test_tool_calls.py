"""Calls of tools: what models write becomes calls, whole or in any pieces, and all other text stays text."""

import json
from pathlib import Path
from typing import Any

import pytest
from reciting import TEMPLATE
from served import GREEDY, HELLO, MODEL_ID, _afresh, serving  # noqa: F401
from tiny import save_reciter

from offload.server.answer import ToolCalls

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
NO_CALL = '<tool_call>{"name": 1, "arguments": []}</tool_call>'
ADD = ("add", {"a": 1, "b": "ü"})
CASES: dict[str, tuple[str, str, list[Any]]] = {
    "hermes": (HERMES, "", [ADD]),
    "two": (f"{HERMES}\n{HERMES}", "", [ADD, ADD]),
    "behind text": (f"Let me see. {HERMES}", "Let me see. ", [ADD]),
    "no closing tag": (HERMES.removesuffix("</tool_call>"), "", [ADD]),
    "llama": ('{"name": "add", "parameters": {"a": 1, "b": "ü"}}', "", [ADD]),
    "mistral": ('[{"name": "add", "arguments": {"a": 1, "b": "ü"}}]', "", [ADD]),
    "text": ("It is <b>4</b>, a <tool", "It is <b>4</b>, a <tool", []),
    "other JSON": ('{"answer": 4}', '{"answer": 4}', []),
    "broken": ("<tool_call>{</tool_call> so", "<tool_call>{</tool_call> so", []),
    "no object": (NO_CALL, NO_CALL, []),
    "space": ("  ", "  ", []),
    "nothing": ("", "", []),
}  # fmt: skip


def parsed(pieces: list[str], *, is_wanted: bool = True) -> tuple[str, list[Any]]:
    calls = ToolCalls(is_wanted=is_wanted)
    said = "".join(calls.push(piece) for piece in pieces)
    rest, found = calls.finish()
    assert len({call["id"] for call in found}) == len(found)
    return said + rest, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize(("text", "said", "calls"), CASES.values(), ids=CASES)
def test_however_it_is_cut(text: str, said: str, calls: list[Any]) -> None:
    wanted = (said, calls)
    for size in (1, 3, 7, max(1, len(text))):
        got = parsed([text[start : start + size] for start in range(0, len(text), size)])
        assert (got[0].rstrip() if calls else got[0], got[1]) == (said.rstrip() if calls else said, calls), wanted
    assert parsed([text], is_wanted=False) == (text, [])


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOLD = "{% if tools %}TOOLS {{ tools[0].function.name }} {% endif %}" + TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}"
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers everything with a call."""
    pieces = (":", "<tool", '_call>{"name": "add",', ' "arguments": {"a": 1, "b": "u"}', "}</tool_call>")
    return save_reciter(tmp_path_factory.mktemp("caller"), pieces, ends=True, chat_template=TOLD)


def test_a_conversation_with_a_tool(caller: Path) -> None:
    with serving(caller) as served:
        asked: Any = {"model": MODEL_ID, "messages": HELLO, **GREEDY}
        client = served.client()
        plain = client.chat.completions.create(**asked).choices[0]
        assert (plain.finish_reason, plain.message.tool_calls) == ("stop", None)
        assert (plain.message.content or "").startswith("<tool_call>")
        choice = client.chat.completions.create(**asked, tools=TOOLS).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function" and json.loads(call.function.arguments) == {"a": 1, "b": "u"}
        none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices[0]
        assert none.finish_reason == "stop"
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, tools=TOOLS, stream=True)]
        deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
        assert [delta.function and delta.function.name for delta in deltas] == ["add"]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
        assert chunks[-1].finish_reason == "tool_calls"
        told = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        again = client.chat.completions.create(model=MODEL_ID, messages=told, tools=TOOLS, **GREEDY)
        written = "TOOLS add <s>user:Hello<s>assistant:1</s><s>tool:3<s>assistant:"
        assert again.usage is not None
        assert again.usage.prompt_tokens == len(served.decoder.encode(written, raw=True))
