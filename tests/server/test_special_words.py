"""A model whose marks are special tokens: thoughts, ends of turns and stop strings, over a socket and in Python."""

from pathlib import Path
from typing import Any

import pytest
from served import GREEDY, HELLO, MODEL_ID, _afresh, serving  # noqa: F401
from tiny import save_reciter
from transformers import AutoTokenizer

import offload

MARKS = ["<think>", "</think>", "<|im_end|>"]
PIECES = (":", "<think>", "Hm.", "</think>", "\n\nYes", ".", "<|im_end|>", "\nuser\nmore")
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant{{ ' QUICK' if quick else '' }}:"
TEMPLATE += "{{ '<think></think>' if enable_thinking is false else '' }}{% endif %}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_reciter(tmp_path_factory.mktemp("thinker"), PIECES, chat_template=TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(folder)
    return folder


def test_over_a_socket(thinker: Path) -> None:
    with serving(thinker) as served:
        client = served.client()
        asked: Any = {"model": MODEL_ID, "messages": HELLO, **GREEDY}
        done = client.chat.completions.create(**asked, max_tokens=30)
        message = done.choices[0].message
        assert (message.content, done.choices[0].finish_reason) == ("Yes.", "stop"), "its template ends a turn there"
        assert message.model_dump()["reasoning_content"] == "Hm."
        chunks = [chunk.choices[0].delta.model_dump() for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(chunk["content"] or "" for chunk in chunks) == "Yes."
        assert "".join(chunk.get("reasoning_content") or "" for chunk in chunks) == "Hm."
        again = client.chat.completions.create(
            **{**asked, "messages": [*HELLO, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, *HELLO]}
        )
        assert again.choices[0].message.content == "Yes."
        # as Mistral's API has them
        parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, {"type": "text", "text": "Yes."}]
        turns: Any = [*HELLO, {"role": "assistant", "content": parts}, *HELLO]
        other = client.chat.completions.create(**{**asked, "messages": turns})
        assert other.usage and again.usage and other.usage.prompt_tokens == again.usage.prompt_tokens
        assert done.usage is not None
        for variables, num_added in (({"quick": True}, len(" QUICK")), ({}, 0), ({"enable_thinking": False}, 2)):
            body = {"chat_template_kwargs": variables}
            counted = client.chat.completions.create(**asked, max_tokens=1, extra_body=body).usage
            assert counted is not None and counted.prompt_tokens == done.usage.prompt_tokens + num_added
        begun = {**asked, "messages": [*HELLO, {"role": "assistant", "content": "I say:"}]}
        extra = client.chat.completions.create(**begun, extra_body={"continue_final_message": True})
        written = served.decoder.encode("user:Hello<|im_end|>assistant:I say:", raw=True)
        assert extra.usage is not None and extra.usage.prompt_tokens == len(written)


def test_thinking_is_switched_where_a_template_has_a_switch(thinker: Path, tmp_path: Path) -> None:
    options: Any = {"ram": "1GiB", "dtype": "float32", "threads": 1, "profile": "none", "lookup": False, "context": 200}
    with offload.load(thinker, **options) as decoder:
        usual, on, off = (decoder.encode(HELLO, think=think) for think in (None, True, False))
        assert usual == on and off == usual + decoder.encode("<think></think>", raw=True)
        chat = offload.Chat(decoder, think=False)
        list(chat.ask("Hello"))
        assert chat.turn is not None and chat.turn.sequence.tokens[: len(off)] == off
        assert decoder.generate("Hello", max_new_tokens=1, think=False).stats.num_prompt_tokens == len(off)
        with pytest.raises(offload.UserError, match="`think` is told to a chat template"):
            decoder.generate("Hello", raw=True, think=False)
        with pytest.raises(offload.UserError, match="`think` must be True or False, got 'no'"):
            decoder.generate("Hello", think="no")  # type: ignore[arg-type]
    plain = TEMPLATE.replace("enable_thinking", "other")
    with offload.load(save_reciter(tmp_path, PIECES, chat_template=plain), **options) as decoder:
        for think in (True, False):
            with pytest.raises(offload.UserError, match="needs a chat template with a switch for thoughts"):
                offload.Chat(decoder, think=think)


def test_in_python(thinker: Path) -> None:
    options: Any = {"dtype": "float32", "threads": 1, "profile": "none", "lookup": False, "context": 200}
    with offload.load(thinker, ram="1GiB", **options) as decoder:
        chat = offload.Chat(decoder)
        assert "".join(chat.ask("Hello")) == "<think>\nHm.\n</think>\n\nYes."
        assert chat.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
        for tree in ("none", None):
            stopped = decoder.generate("x:", raw=True, max_new_tokens=30, stop="<|im_end|>", tree=tree)
            assert (stopped.text, stopped.finish_reason) == ("Hm.\n\nYes.", "stop")
            around = decoder.generate("x:", raw=True, max_new_tokens=30, stop=["Hm.</think>\n"], tree=tree)
            assert around.text == ""
        raw = decoder.generate("x:", raw=True, max_new_tokens=8)
        assert raw.text == "Hm.\n\nYes.\nuser\nmore:", "a text that is no conversation goes on, as transformers'"
