"""A model's own words: its template tells their form, and a reader finds the same parts however an answer is cut."""

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from transformers.utils.chat_template_utils import render_jinja_template
from word_templates import FAMILIES, HERMES, Family

from offload.words.parts import Call, Part, Special, Text, Thought, schemas_of
from offload.words.probe import ModelWords, probe


def rendered(template: str, messages: Sequence[Any], **variables: Any) -> str:
    try:
        return render_jinja_template(conversations=[[*messages]], chat_template=template, **variables)[0][0]
    except Exception as error:
        raise ValueError(str(error)) from None


@cache
def words_of(name: str) -> ModelWords:
    family = FAMILIES[name]
    return probe(
        lambda messages, options: rendered(family.template, messages, **options), family.template, {*family.special}
    )


def tool(name: str, **fields: Any) -> Any:
    properties = {key: {"type": kind} for key, kind in fields.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("get_weather", city="string", days=["integer", "null"], exact="boolean"),
    tool("write-file", path="string", content="string", lines="array", more="object"),
    tool("now"),
]
WEATHER = ("get_weather", {"city": "Zürich 日本 😀", "days": 3, "exact": True})
FILE = ("write-file", {"path": "a b/c.py", "content": 'def f(x):\n    return {"a": [x]}\n', "lines": [1, 2.5, "x"],
                       "more": {"deep": {"er": ["1", None, False]}}})  # fmt: skip
NUMBERS = ("write-file", {"path": "007", "content": "true"})  # texts that look like values
NOW = ("now", dict[str, Any]())
ANSWERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [WEATHER], "code": [FILE], "like numbers": [NUMBERS], "nothing": [NOW], "two": [WEATHER, FILE],
    "the same twice": [NUMBERS, NUMBERS],
}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "switch"),
    [
        ("{{ '<think></think>' if enable_thinking is false }}", ("enable_thinking", True, False)),
        ("{{ '<think>' if thinking else '</think>' }}", ("thinking", True, False)),
        ("{{ 'Do not think.' if thinking_budget == 0 }}", ("thinking_budget", -1, 0)),
        ("{# enable_thinking #}", None),
        ("{{ raise_exception('no') if enable_thinking }}", None),
        ("{{ 'x' if think }}", None),
    ],
)
def test_the_switch_of_thoughts_is_what_changes_a_prompt(source: str, switch: object) -> None:
    words = probe(
        lambda messages, options: rendered(source + "{{ messages[0].content }}", messages, **options), source, set()
    )
    assert words.thinking == switch


def segments_of(text: str, special: Sequence[str]) -> list[str]:
    """The text as its tokens come: special ones whole, others a character each."""
    segments = []
    while text:
        mark = next((mark for mark in special if text.startswith(mark)), "")
        segments.append(Special(mark) if mark else text[0])
        text = text[len(mark) or 1 :]
    return segments


def cuts(segments: list[str], seed: int) -> list[list[list[str]]]:
    drawn = random.Random(seed)
    at = sorted(drawn.sample(range(len(segments) + 1), min(5, len(segments))))
    edges = [0, *at, len(segments)]
    pieces = [segments[lo:hi] for lo, hi in pairwise(edges)]
    return [[segments], [[segment] for segment in segments], pieces]


def joined(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    content = "".join(part.text for part in parts if isinstance(part, Text))
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return thoughts, content, [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]


def read(words: ModelWords, pieces: list[list[str]], special: Sequence[str] = (), prompt: str = "") -> Any:
    reader = words.reader(schemas_of(TOOLS), prompt, {*special})
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    keys = [part.key for part in parts if isinstance(part, Call)]
    assert len({*keys}) == len(keys) or "functions." in str(keys)
    return joined(parts)


def said(family: Family, words: ModelWords, calls: list[Any], content: str | None, thoughts: str | None) -> str:
    """What the family's own template writes for an answer."""
    keys = {"any": "call_{}", "short": "abcdefgh{}", "named": "functions.{name}:{}"}
    functions = []
    for index, (name, arguments) in enumerate(calls):
        given = json.dumps(arguments, ensure_ascii=False) if words.takes_text_arguments else arguments
        key = keys[words.key_form].format(index, name=name)
        functions.append({"id": key, "type": "function", "function": {"name": name, "arguments": given}})
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    answer |= {"tool_calls": functions} if functions else {}
    answer |= {words.thought_key: thoughts} if thoughts and words.thought_key else {}
    text = rendered(family.template, [{"role": "user", "content": "Go."}, answer], tools=TOOLS)
    text = text.partition("Go.")[2]
    text = text[text.index(family.begins) + len(family.begins) :]
    assert text.endswith(family.ends)
    return text.removesuffix(family.ends)


PAIRS = [(name, key) for name in FAMILIES for key in ANSWERS if len(ANSWERS[key]) <= FAMILIES[name].most_calls]


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_calls_in_the_form_of_a_family(name: str, key: str) -> None:
    family, words, answer = FAMILIES[name], words_of(name), ANSWERS[key]
    assert words.knows_tools and words.shows_calls and (words.calls is not None or words.is_harmony)
    tellings: list[tuple[str | None, str | None]] = [(None, None)]
    tellings += [("Let me see: <b>.", None)] if family.has_content else []
    tellings += [(None, "First,\nthe sky.")] if family.has_thoughts else []
    for content, thoughts in tellings:
        text = said(family, words, answer, content, thoughts)
        prompt = "<|start|>assistant" if words.is_harmony else ""
        for pieces in cuts(segments_of(text, family.special), len(text)):
            expected = (thoughts or "", content or "", answer)
            assert read(words, pieces, family.special, prompt) == expected, f"{text!r}, {words}"


LETTERS = [
    *"abcXYZ 019.,:;!?'_-/*%&|#",
    '"',
    "\\",
    "\n",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "=",
    "<b>",
    "a < b",
    "日本",
    "😀",
    "ß",
    "\t",
]
NUM_DRAWN = 20


def drawn_text(chance: random.Random) -> str:
    return "".join(chance.choice(LETTERS) for _ in range(chance.randrange(1, 30))).strip() or "x"


def drawn_value(chance: random.Random, depth: int = 0) -> Any:
    kinds = ("text", "integer", "number", "boolean", "null", *(("list", "object") if depth < 2 else ()))
    match chance.choice(kinds):
        case "text":
            return drawn_text(chance)
        case "integer":
            return chance.randrange(-(10**6), 10**12)
        case "number":
            return round(chance.uniform(-9, 9), 3)
        case "boolean":
            return chance.random() < 0.5
        case "list":
            return [drawn_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case "object":
            return {f"k{number}": drawn_value(chance, depth + 1) for number in range(chance.randrange(4))}
    return None


def drawn_call(chance: random.Random) -> tuple[str, dict[str, Any]]:
    lines = [drawn_value(chance, 1) for _ in range(chance.randrange(3))]
    file = {"path": drawn_text(chance), "content": drawn_text(chance), "lines": lines,
            "more": {f"k{number}": drawn_value(chance, 1) for number in range(chance.randrange(3))}}  # fmt: skip
    days = chance.choice([None, chance.randrange(9999)])
    weather = {"city": drawn_text(chance), "days": days, "exact": chance.random() < 0.5}
    name, wanted = chance.choice([("write-file", file), ("get_weather", weather), ("now", {})])
    return name, {key: value for key, value in wanted.items() if chance.random() < 0.8}


class Answered(NamedTuple):
    """What a family's template writes for an answer that was drawn."""

    text: str
    thoughts: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


def drawn_answers(name: str) -> Iterator[Answered]:
    """Answers of a family: with thoughts, words and calls, as far as its form has them together."""
    family, words = FAMILIES[name], words_of(name)
    for number in range(NUM_DRAWN):
        chance = random.Random(f"{name} {number}")
        calls = [drawn_call(chance) for _ in range(chance.randrange(family.most_calls + 1))]
        thoughts = drawn_text(chance) if family.has_thoughts and chance.random() < 0.6 else ""
        is_silent = calls and (not family.has_content or chance.random() < 0.5)
        # a template of channels writes one or the other
        content = "" if is_silent or (words.is_harmony and thoughts) else drawn_text(chance)
        if content or calls:
            yield Answered(said(family, words, calls, content or None, thoughts or None), thoughts, content, calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_drawn_answers_are_the_same_however_they_are_cut(name: str) -> None:
    family, words = FAMILIES[name], words_of(name)
    prompt = "<|start|>assistant" if words.is_harmony else ""
    num_answers = 0
    for text, *wanted in drawn_answers(name):
        num_answers += 1
        segments = segments_of(text, family.special)
        whole, single, _ = cuts(segments, 0)
        result = read(words, whole, family.special, prompt)
        # a template may have a blank before words
        assert [result[0], result[1].strip(), result[2]] == wanted, f"{text!r}"
        for pieces in (single, *(cuts(segments, seed)[2] for seed in range(3))):
            assert read(words, pieces, family.special, prompt) == result, f"{text!r}"
    assert num_answers >= NUM_DRAWN // 2


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("Qwen2.5", "qwen2"),
        ("Hermes, Qwen", "qwen3"),
        ("Qwen3-Coder, Qwen3.5", "qwen3_5"),
        ("Gemma 4, thoughts", "gemma4"),
    ],
)
def test_parts_are_those_that_transformers_reads(name: str, model_type: str) -> None:
    """By its own templates of answers, for families that it has any for; it drops blanks beside a tag's value."""
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
    from transformers.utils.chat_parsing import parse_response

    family, words = FAMILIES[name], words_of(name)
    (template,) = [fallback for types, fallback in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types]
    anchors = template["start_anchor"]
    anchor = anchors if isinstance(anchors, str) else anchors[0]
    num_compared = 0
    for text, thoughts, content, calls in drawn_answers(name):
        if model_type == "gemma4" and any("-" in call for call, _ in calls):
            continue  # a name that its template has no pattern for
        result = parse_response(text, template, prefix=anchor, tools=TOOLS)
        functions = [call["function"] for call in result.get("tool_calls", [])]
        said = (result.get("reasoning_content", ""), result.get("content", ""))
        assert tuple(map(str.strip, said)) == (thoughts, content)
        if [(function["name"], function["arguments"]) for function in functions] == calls:
            num_compared += 1
        assert read(words, [segments_of(text, family.special)], family.special) == (thoughts, content, calls)
    assert num_compared >= NUM_DRAWN // 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_of_what_was_not_offered_is_text(name: str) -> None:
    family, words = FAMILIES[name], words_of(name)
    text = said(family, words, [("launch", {"a": "b"})], None, None)
    for pieces in cuts(segments_of(text, family.special), 3):
        _, content, calls = read(words, pieces, family.special, "<|start|>assistant" if words.is_harmony else "")
        assert (not calls and '"b"' in content) or "b" in content


def test_what_a_template_does_not_tell() -> None:
    silent = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    words = probe(lambda messages, options: rendered(silent, messages, **options), silent, set())
    assert (words.knows_tools, words.shows_calls, words.calls, words.thoughts) == (False, False, None, None)
    assert words_of("Hermes, Qwen").thought_key == "reasoning_content"
    assert words_of("DeepSeek V3").takes_text_arguments and words_of("DeepSeek V3").content_form == "none"
    assert words_of("Mistral v3").key_form == "short" and words_of("Kimi K2").key_form == "named"
    assert not words_of("GLM-4.5").takes_text_arguments
    # a form that would not be read back is none: an agent is told, and gets no call as text
    odd = FAMILIES["Hermes, Qwen"].template.replace("\n</tool_call>", " please</tool_call>")
    words = probe(lambda messages, options: rendered(odd, messages, **options), odd, set())
    assert words.knows_tools and words.shows_calls and words.calls is None


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>'
FOUND = ("get_weather", {"city": "x"})
NO_CALL = '<tool_call>{"name": 1, "arguments": []}</tool_call>'
ODD: dict[str, tuple[str, str, list[Any]]] = {
    "behind text": (f"Let me see. {CALL}", "Let me see.", [FOUND]),
    "no closing mark": (CALL.removesuffix("</tool_call>"), "", [FOUND]),
    "text between": (f"{CALL}\n so \n{CALL}\n", "so", [FOUND, FOUND]),
    "no call behind one": (f"{CALL} {NO_CALL} ", f"{NO_CALL} ", [FOUND]),
    "text": ("It is <b>4</b>, a <tool", "It is <b>4</b>, a <tool", []),
    "JSON": ('{"name": "get_weather", "arguments": {}}', '{"name": "get_weather", "arguments": {}}', []),
    "broken": ("<tool_call>{</tool_call> so", "<tool_call>{</tool_call> so", []),
    "broken, then one": (f"<tool_call>{{</tool_call> so {CALL}", "<tool_call>{</tool_call> so", [FOUND]),
    "its own mark within": (CALL.replace('"x"', '"</tool_call>"'), "", [("get_weather", {"city": "</tool_call>"})]),
    "no object": (NO_CALL, NO_CALL, []),
    "space": ("  ", "  ", []),
    "nothing": ("", "", []),
    "deep": ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", []),
}  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), ODD.values(), ids=ODD)
def test_odd_answers(text: str, content: str, calls: list[Any]) -> None:
    for pieces in cuts([*text], 1):
        assert read(words_of("Hermes, Qwen"), pieces) == ("", content, calls)


def test_thoughts_that_the_prompt_begins_and_that_never_end() -> None:
    words = words_of("Hermes, Qwen")
    assert read(words, [[*"I think.\n</think>\n\nYes."]], prompt="<|im_start|>assistant\n<think>\n")[:2] == (
        "I think.",
        "Yes.",
    )
    assert read(words, [[*"<think>\nI thi"]])[:2] == ("I thi", "")
    spelled = read(words, [[*"It is <think> or </think>."]], ("<think>", "</think>"))
    assert spelled[:2] == ("", "It is <think> or </think>."), "ordinary tokens spell what is special"


def test_channels() -> None:
    special = FAMILIES["gpt-oss"].special
    words = words_of("gpt-oss")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
    text += "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    for pieces in cuts(segments_of(text, (*special, "<|constrain|>")), 1):
        assert read(words, pieces, special, "<|start|>assistant") == ("Hm.", "Wait.", [NOW])
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!"
    for pieces in cuts(segments_of(final, special), 1):
        assert read(words, pieces, special, "<|start|>assistant") == ("Hm.", "Hello!", [])
    cut = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin"
    assert read(words, [segments_of(cut, special)], special, "<|start|>assistant") == ("Hm.", "", [])


def test_values_as_their_schema_has_them() -> None:
    words = words_of("Qwen3-Coder, Qwen3.5")
    written = "<tool_call>\n<function=write-file>\n<parameter=path>\n 12\n</parameter>\n<parameter=more>\n"
    written += "{'a': True, 'b': None}\n</parameter>\n<parameter=lines>\n[1,\n</parameter>\n</function>\n</tool_call>"
    arguments = {"path": " 12", "more": {"a": True, "b": None}, "lines": "[1,"}
    assert read(words, [[*written]])[2] == [("write-file", arguments)]
    assert "tool_call" in HERMES
