"""Conversations in a model's own template: messages become what the template takes, and a turn has an end."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template
from word_templates import FAMILIES

from offload.engine.conversation import TemplateOptions, encode_messages, turn_end_ids, words_of
from offload.engine.request import Request, encode
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError


def tokenizer_with(template: str, folder: Path) -> PreTrainedTokenizerFast:
    save_tokenizer(folder, [" the"])
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    return tokenizer


def call(arguments: Any, key: str = "abcdefgh1") -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": "get", "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]
ASKED = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get", "content": "ok"}
# as OpenAI's clients send them, and what a template of objects is given
CONVERSATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "question": ([ASKED], [ASKED]),
    "turns": ([ASKED, {"role": "assistant", "content": "a\nb"}, ASKED],) * 2,
    "call": (
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [call('{"on": true}')]}, RESULT],
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [call({"on": True})]}, RESULT],
    ),
    "nothing given": (
        [ASKED, {"role": "assistant", "tool_calls": [call("")]}, RESULT],
        [ASKED, {"role": "assistant", "tool_calls": [call({})]}, RESULT],
    ),
    "object": (
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [call({"a": ["ü"]})]}, RESULT],
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [call({"a": ["ü"]})]}, RESULT],
    ),
}  # fmt: skip
TEMPLATES = [
    "Hermes, Qwen",
    "Qwen3-Coder, Qwen3.5",
    "GLM-4.5",
    "DeepSeek V3",
    "DeepSeek V3.1",
    "Mistral v3",
    "Llama 3.1",
]
TEMPLATES += ["MiniMax M2", "Granite 3", "FunctionGemma"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_prompt_holds_is_what_the_template_writes(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(FAMILIES[name].template, tmp_path)
    for sent, known in copy.deepcopy([*CONVERSATIONS.values()]):
        for message in known:
            for asked in message.get("tool_calls", ()) if words_of(tokenizer).takes_text_arguments else ():
                asked = asked["function"]
                if not isinstance(asked["arguments"], str):
                    asked["arguments"] = json.dumps(asked["arguments"], ensure_ascii=False)
            if "tool_calls" in message and name == "DeepSeek V3":
                message["content"] = None
        for tools in ([], TOOLS):
            options: Any = {"tools": tools or None, "add_generation_prompt": True, "tokenize": False}
            if name == "DeepSeek V3":  # `apply_chat_template` drops what is None, by which this one knows calls
                variables = {**options, **tokenizer.special_tokens_map}
                del variables["tokenize"]
                text = render_jinja_template([known], chat_template=tokenizer.chat_template, **variables)[0][0]
            else:
                text = tokenizer.apply_chat_template(known, **options)
            wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert encode(tokenizer, sent, 10**6, options=TemplateOptions(tools)) == wanted


PRINTED = """{% for m in messages %}{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments }}
{{- c.function.name }}{% endfor %}{{ m.content }};{% endfor %}"""


def rendered_by(template: str, messages: list[Any], folder: Path, **options: Any) -> str:
    tokenizer = tokenizer_with(template, folder)
    return str(tokenizer.decode(encode(tokenizer, messages, 10**6, options=TemplateOptions(**options))))


def test_arguments_content_and_keys(tmp_path: Path) -> None:
    sent = CONVERSATIONS["call"][0]
    assert rendered_by(PRINTED, sent, tmp_path) == 'hi;<call>{"on": true}get;ok;', "Python's own form is none"
    joined = PRINTED.replace("{{ c.function.arguments }}", "{{ '' + c.function.arguments }}")
    assert rendered_by(joined, sent, tmp_path) == 'hi;<call>{"on": true}get;ok;'
    broken = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call('{"on')]}, RESULT]
    assert '{"on' in rendered_by(joined, broken, tmp_path)
    assert '{"on' in rendered_by(FAMILIES["GLM-4.5"].template, broken, tmp_path)
    foreign = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call("{}", "call_12345678")]},
               {**RESULT, "tool_call_id": "call_12345678"}]  # fmt: skip
    text = rendered_by(FAMILIES["Mistral v3"].template, foreign, tmp_path)
    key = text.partition('"id": "')[2][:9]
    assert key.isalnum() and f'"call_id": "{key}"' in text
    thoughts = [ASKED, {"role": "assistant", "content": "x", "reasoning_content": "tq"}, ASKED]
    assert "tq" in rendered_by(
        FAMILIES["gpt-oss"].template, [ASKED, {**sent[1], "reasoning_content": "tq"}, RESULT], tmp_path
    )
    assert "tq" in rendered_by(FAMILIES["GLM-4.5"].template, thoughts, tmp_path)


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    silent = "{% for m in messages %}{{ m.content or '' }}{% endfor %}"
    with pytest.raises(UserError, match="does not tell the model of calls"):
        rendered_by(silent, CONVERSATIONS["call"][0], tmp_path)
    halves = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call('{"a": "\\ud800"}')]}]
    with pytest.raises(UserError, match="half a character"):
        rendered_by(FAMILIES["Hermes, Qwen"].template, halves, tmp_path)
    with pytest.raises(UserError, match="what it wants of messages, calls"):
        rendered_by("{% if tools %}{{ tools.x.y.z }}{% endif %}", [ASKED], tmp_path, tools=TOOLS)
    for name in ("tools", "chat_template", "a b"):
        with pytest.raises(UserError, match="template_variables"):
            Request([ASKED], template_variables={name: 1}).check()


def test_variables_and_a_message_that_goes_on(tmp_path: Path) -> None:
    template = "{% if think is defined and not think %}NO {% endif %}" + FAMILIES["Hermes, Qwen"].template
    assert rendered_by(template, [ASKED], tmp_path, variables={"think": False}).startswith("NO ")
    begun = [ASKED, {"role": "assistant", "content": "I sa"}]
    assert rendered_by(template, begun, tmp_path, continues=True).endswith("assistant\nI sa")


class _Decoder:
    pass


DECODER = _Decoder()


def test_a_turn_ends_as_tokenizer_and_template_say(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content }}<pad>{% endfor %}", tmp_path)
    names = {tokenizer.convert_ids_to_tokens(index) for index in turn_end_ids(tokenizer)}
    assert names == {"<pad>", tokenizer.eos_token} - {None}
    end = tokenizer.convert_tokens_to_ids("</s>")
    other = tokenizer_with("{% for m in messages %}{{ m.content }}</s>{% endfor %}", tmp_path)
    asked = Request([ASKED]).prepared([1], DECODER)
    assert asked.is_answer and end in asked.end_ids(other, frozenset())
    assert not Request("x", raw=True).prepared([1], DECODER).is_answer
    assert encode_messages(other, [ASKED])
